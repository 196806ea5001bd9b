#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace headrace {
namespace {

// The only owner of the logger: made on first use, standard error, one line a message.
spdlog::logger& logger() {
  static const auto instance = [] {
    auto made = std::make_shared<spdlog::logger>("headrace", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("[%H:%M:%S] %^%l%$: %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void set_log_rank(int rank) { logger().set_level(rank == 0 ? spdlog::level::info : spdlog::level::err); }
void log_info(const std::string& text) { logger().info("{}", text); }
void log_warning(const std::string& text) { logger().warn("{}", text); }
void log_error(const std::string& text) { logger().error("{}", text); }

}  // namespace headrace
