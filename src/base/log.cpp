#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>

#include <fmt/format.h>

namespace headrace {
namespace {

// The only state: whether this process is the one that speaks. (spdlog 1.10 does not compile against the newer fmt that torch's
// headers bring along, so the few lines it would save are written here.)
std::atomic<bool>& speaks() {
  static std::atomic<bool> value = true;
  return value;
}

// One write call for a line, so that the lines of several ranks do not mix.
void write_line(const char* level, const std::string& text) {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm local = {};
  ::localtime_r(&now, &local);
  const std::string line = fmt::format("[{:02}:{:02}:{:02}] {}: {}\n", local.tm_hour, local.tm_min, local.tm_sec, level, text);
  std::size_t done = 0;
  while (done < line.size()) {
    const ssize_t written = ::write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (written <= 0) return;   // standard error is gone: there is nobody to tell
    done += static_cast<std::size_t>(written);
  }
}

}  // namespace

void set_log_rank(int rank) { speaks() = rank == 0; }
void log_info(const std::string& text) {
  if (speaks()) write_line("info", text);
}
void log_warning(const std::string& text) {
  if (speaks()) write_line("warning", text);
}
void log_error(const std::string& text) { write_line("error", text); }

}  // namespace headrace
