#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "headrace/error.h"

namespace headrace {

int64_t num_warmup_steps(double warmup_steps, int64_t num_training_steps) {
  if (warmup_steps >= 1) return static_cast<int64_t>(warmup_steps);
  return static_cast<int64_t>(std::ceil(static_cast<double>(num_training_steps) * warmup_steps));
}

LrSchedule make_lr_schedule(const LrSchedulerSection& section, double lr, int64_t num_training_steps) {
  check_argument(num_training_steps >= 1, "make_lr_schedule: num_training_steps is {}, but it must be at least 1",
                 num_training_steps);
  check_argument(lr > 0, "make_lr_schedule: lr is {}, but it must be above 0", lr);
  return {section.type, num_warmup_steps(section.warmup_steps, num_training_steps), num_training_steps, section.min_lr / lr};
}

double lr_multiplier(const LrSchedule& schedule, int64_t updates_done) {
  if (schedule.type == "constant") return 1.0;
  check_argument(schedule.type == "constant_with_warmup" || schedule.type == "linear" || schedule.type == "cosine",
                 "lr_multiplier: unknown type \"{}\"", schedule.type);
  const auto warmup = static_cast<double>(schedule.num_warmup_steps);
  const auto done =
      static_cast<double>(std::min(updates_done, std::max(schedule.num_training_steps, schedule.num_warmup_steps)));
  if (updates_done < schedule.num_warmup_steps) return done / std::max(1.0, warmup);
  if (schedule.type == "constant_with_warmup") return 1.0;

  const auto total = static_cast<double>(schedule.num_training_steps);
  const double decay_steps = std::max(1.0, total - warmup);
  const double factor = schedule.type == "linear" ? std::max(0.0, (total - done) / decay_steps)
                                                  : 0.5 * (1.0 + std::cos(std::numbers::pi * ((done - warmup) / decay_steps)));
  return std::max(0.0, factor * (1.0 - schedule.min_lr_rate) + schedule.min_lr_rate);
}

}  // namespace headrace
