// Learning-rate schedule: what the highest learning rate is multiplied with at each step.
// Flow: recipe lr_scheduler -> [schedule] -> trainer -> AdamW. Reference: transformers 5.17 optimization.py, get_scheduler.
#pragma once

#include <cstdint>
#include <string>

#include "headrace/recipe.h"

namespace headrace {

struct LrSchedule {
  std::string type = "linear";  // linear | cosine | constant | constant_with_warmup
  int64_t num_warmup_steps = 0;
  int64_t num_training_steps = 1;
  double min_lr_rate = 0.0;  // where linear and cosine end, as a share of the highest learning rate
};

/// warmup_steps as transformers' TrainingArguments.get_warmup_steps reads it: from 1 on a number of steps, below 1 a share of
/// num_training_steps, rounded up.
int64_t num_warmup_steps(double warmup_steps, int64_t num_training_steps);

/// The schedule of a run. Throws std::invalid_argument when num_training_steps < 1 or lr <= 0.
LrSchedule make_lr_schedule(const LrSchedulerSection& section, double lr, int64_t num_training_steps);

/// The multiplier of the update that follows `updates_done` others: 0 for the first one. It equals transformers' get_scheduler
/// (cosine with min_lr_rate: cosine_with_min_lr; linear with it: polynomial with power 1) for 0 to num_training_steps; later it
/// stays where it ended, where transformers' cosine would rise again. Throws std::invalid_argument for an unknown type.
double lr_multiplier(const LrSchedule& schedule, int64_t updates_done);

}  // namespace headrace
