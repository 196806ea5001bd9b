#include "trainer/metrics.h"

#include <cmath>
#include <ctime>

#include "base/file.h"
#include "base/json.h"
#include "headrace/error.h"

namespace headrace {
namespace {

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

/// The step of one line, or nullopt when the line is no record.
std::optional<int64_t> step_of_line(const std::string& line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("step") || !json.at("step").is_number_integer()) return std::nullopt;
  return json.at("step").get<int64_t>();
}

/// The lines up to `restored_step`, unchanged.
std::string lines_until(const std::string& text, int64_t restored_step, const std::filesystem::path& path) {
  std::string kept;
  int64_t line_number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    ++line_number;
    const std::string line = text.substr(begin, end == std::string::npos ? end : end - begin);
    begin = end == std::string::npos ? text.size() : end + 1;
    const std::optional<int64_t> step = step_of_line(line);
    // A line without its end was being written when the run died; it counts only if all of it is there.
    if (end == std::string::npos && !step) break;
    require(step.has_value(), "{} line {} is no record of a step; repair or move the file, then resume again", path.string(),
            line_number);
    if (*step <= restored_step) kept += line + "\n";
  }
  return kept;
}

}  // namespace

std::string to_json_line(const TrainingRecord& record) {
  Json json = {{"step", record.step},
               {"epoch", number(record.epoch)},
               {"loss", number(record.loss)},
               {"grad_norm", number(record.grad_norm)},
               {"lr", number(record.lr)},
               {"tokens_per_s", number(record.tokens_per_s)},
               {"mem_gib", number(record.mem_gib)},
               {"num_tokens", record.num_tokens},
               {"num_trained_tokens", record.num_trained_tokens}};
  if (record.aux_loss) json["aux_loss"] = number(*record.aux_loss);
  json["time"] = record.time;
  return json.dump();
}

std::string to_json_line(const ValidationRecord& record) {
  const Json json = {{"step", record.step},
                     {"epoch", number(record.epoch)},
                     {"val_loss", number(record.val_loss)},
                     {"num_trained_tokens", record.num_trained_tokens}};
  return json.dump();
}

std::string utc_time_text(int64_t seconds_since_1970) {
  const auto seconds = static_cast<std::time_t>(seconds_since_1970);
  std::tm utc = {};
  ::gmtime_r(&seconds, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday, utc.tm_hour,
                     utc.tm_min, utc.tm_sec);
}

MetricsFile::MetricsFile(std::filesystem::path path, std::optional<int64_t> restored_step) : path_(std::move(path)) {
  const bool keeps = restored_step.has_value() && std::filesystem::exists(path_);
  write_file_atomically(path_, keeps ? lines_until(read_file(path_), *restored_step, path_) : "");
  file_.open(path_, std::ios::binary | std::ios::app);
  require(file_.good(), "cannot open {} for writing", path_.string());
}

void MetricsFile::write_line(const std::string& line) {
  file_ << line << '\n' << std::flush;
  require(file_.good(), "cannot write {}: is the disk full?", path_.string());
}

}  // namespace headrace
