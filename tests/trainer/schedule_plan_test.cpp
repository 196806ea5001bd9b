#include "trainer/schedule_plan.h"

#include <gtest/gtest.h>

#include "headrace/error.h"

namespace headrace {

TEST(SchedulePlan, TotalSteps) {
  const auto steps_in_epoch = [](int64_t epoch) { return epoch == 1 ? 9 : 10; };  // packing differs a little
  StepSchedulerSection section;
  EXPECT_EQ(make_schedule_plan(section, steps_in_epoch).total_steps, 10);
  section.num_epochs = 3;
  EXPECT_EQ(make_schedule_plan(section, steps_in_epoch).total_steps, 29);
  section.max_steps = 50;  // may go beyond the epochs
  EXPECT_EQ(make_schedule_plan(section, steps_in_epoch).total_steps, 50);
  section.num_epochs = 0;
  EXPECT_EQ(make_schedule_plan(section, steps_in_epoch).total_steps, 50);
  section.max_steps = -1;
  EXPECT_THROW(make_schedule_plan(section, steps_in_epoch), UserError);
}

TEST(SchedulePlan, WhatIsDue) {
  const SchedulePlan plan{.total_steps = 7, .log_every_steps = 1, .val_every_steps = 3, .ckpt_every_steps = 0};
  for (int64_t step = 1; step <= 7; ++step) {
    EXPECT_TRUE(plan.is_log_due(step));
    EXPECT_EQ(plan.is_validation_due(step), step == 3 || step == 6 || step == 7) << step;
    EXPECT_EQ(plan.is_checkpoint_due(step), step == 7) << step;
  }
}

TEST(SchedulePlan, EpochsDone) {
  EXPECT_EQ(epochs_done(0, 4, 10), 0.5);
  EXPECT_EQ(epochs_done(0, 9, 10), 1.0);
  EXPECT_EQ(epochs_done(2, 0, 4), 2.25);
}

}  // namespace headrace
