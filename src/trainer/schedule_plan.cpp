#include "trainer/schedule_plan.h"

#include "headrace/error.h"

namespace headrace {
namespace {

bool is_due(int64_t every, int64_t step, int64_t total_steps) {
  return step == total_steps || (every > 0 && step % every == 0);
}

}  // namespace

bool SchedulePlan::is_log_due(int64_t step) const { return is_due(log_every_steps, step, total_steps); }
bool SchedulePlan::is_validation_due(int64_t step) const { return is_due(val_every_steps, step, total_steps); }
bool SchedulePlan::is_checkpoint_due(int64_t step) const { return is_due(ckpt_every_steps, step, total_steps); }

SchedulePlan make_schedule_plan(const StepSchedulerSection& section, const std::function<int64_t(int64_t)>& steps_in_epoch) {
  SchedulePlan plan{0, section.log_every_steps, section.val_every_steps, section.ckpt_every_steps};
  if (section.max_steps > 0) {
    plan.total_steps = section.max_steps;
  } else {
    // Packing differs a little from epoch to epoch, so each is asked.
    for (int64_t epoch = 0; epoch < section.num_epochs; ++epoch) plan.total_steps += steps_in_epoch(epoch);
  }
  require(plan.total_steps > 0,
          "the run has no steps: step_scheduler.num_epochs is {} and max_steps is {}; one of them must be above 0",
          section.num_epochs, section.max_steps);
  return plan;
}

double epochs_done(int64_t epoch, int64_t step_in_epoch, int64_t steps_in_epoch) {
  return static_cast<double>(epoch) + static_cast<double>(step_in_epoch + 1) / static_cast<double>(steps_in_epoch);
}

}  // namespace headrace
