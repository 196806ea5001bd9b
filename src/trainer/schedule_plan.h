// Schedule plan: how many steps a run has, and what is due after which step.
// Flow: recipe step_scheduler + Batches::steps_in_epoch -> [schedule_plan] -> train.
#pragma once

#include <cstdint>
#include <functional>

#include "headrace/recipe.h"

namespace headrace {

struct SchedulePlan {
  int64_t total_steps = 0;  // optimizer steps of the whole run
  int64_t log_every_steps = 1;
  int64_t val_every_steps = 0;   // 0: only after the last step
  int64_t ckpt_every_steps = 0;  // 0: only after the last step

  /// `step` counts from 1: the number of updates done. What is periodic is also due after the last step.
  bool is_log_due(int64_t step) const;
  bool is_validation_due(int64_t step) const;
  bool is_checkpoint_due(int64_t step) const;
};

/// max_steps where it is given, else the sum of steps_in_epoch(0 .. num_epochs - 1). Throws UserError when that is 0.
SchedulePlan make_schedule_plan(const StepSchedulerSection& section, const std::function<int64_t(int64_t)>& steps_in_epoch);

/// Passes over the data done after step `step_in_epoch` (from 0) of `epoch`, as transformers logs it: 0.5 in the middle of the
/// first.
double epochs_done(int64_t epoch, int64_t step_in_epoch, int64_t steps_in_epoch);

}  // namespace headrace
