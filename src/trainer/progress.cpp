#include "trainer/progress.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace headrace {

std::string with_thousands(int64_t value) {
  const std::string digits = fmt::format("{}", value);
  const std::size_t sign = value < 0 ? 1 : 0;
  std::string out = digits.substr(0, sign);
  for (std::size_t i = sign; i < digits.size(); ++i) {
    if (i > sign && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string duration_text(double seconds) {
  constexpr double kLongest = 1e9;  // thirty years: nothing is known yet
  if (!(seconds >= 0 && seconds < kLongest)) return "?";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

double seconds_left(int64_t steps_done, double seconds_passed, int64_t steps_remaining) {
  if (steps_done <= 0) return std::numeric_limits<double>::quiet_NaN();
  return seconds_passed / static_cast<double>(steps_done) * static_cast<double>(steps_remaining);
}

std::string progress_line(const TrainingRecord& record, int64_t total_steps, double seconds_left) {
  const std::string aux_loss = record.aux_loss ? fmt::format(" | aux_loss {:.4f}", *record.aux_loss) : "";
  const std::string tps = std::isfinite(record.tokens_per_s) ? with_thousands(std::llround(record.tokens_per_s)) : "?";
  return fmt::format(
      "step {}/{} | epoch {:.2f} | loss {:.4f}{} | grad_norm {:.2f} | lr {:.1e} | mem {:.2f} GiB | tps {} | ETA {}",
      record.step, total_steps, record.epoch, record.loss, aux_loss, record.grad_norm, record.lr, record.mem_gib, tps,
      duration_text(seconds_left));
}

std::string validation_line(const ValidationRecord& record, int64_t total_steps) {
  return fmt::format("step {}/{} | epoch {:.2f} | val_loss {:.4f} | num_trained_tokens {}", record.step, total_steps,
                     record.epoch, record.val_loss, with_thousands(record.num_trained_tokens));
}

}  // namespace headrace
