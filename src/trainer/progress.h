// Progress: the line that people read while a run goes on. Pure functions from a record to text.
// Flow: train -> TrainingRecord -> [progress] -> log_info.
#pragma once

#include <cstdint>
#include <string>

#include "trainer/metrics.h"

namespace headrace {

/// "step 4/100 | epoch 0.12 | loss 1.5514 | grad_norm 0.83 | lr 1.0e-05 | mem 3.21 GiB | tps 1,234 | ETA 0:03:21", with
/// "aux_loss 0.0123" after the loss where there is one.
std::string progress_line(const TrainingRecord& record, int64_t total_steps, double seconds_left);

/// "step 4/100 | epoch 0.12 | val_loss 1.4321 | num_trained_tokens 12,345"
std::string validation_line(const ValidationRecord& record, int64_t total_steps);

/// Seconds until the end when the remaining steps go as fast as the `steps_done` did in `seconds_passed` (both since this
/// process began or resumed). Not a number before the first step.
double seconds_left(int64_t steps_done, double seconds_passed, int64_t steps_remaining);

/// "0:03:21", "27:00:00", or "?" for a value that is negative or not finite.
std::string duration_text(double seconds);

/// "1,234,567"
std::string with_thousands(int64_t value);

}  // namespace headrace
