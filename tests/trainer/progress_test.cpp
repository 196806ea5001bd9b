#include "trainer/progress.h"

#include <gtest/gtest.h>

#include <limits>

namespace headrace {

TEST(Progress, LineByHand) {
  TrainingRecord record{4, 0.1234, 1.55142, 0.8301, 1e-5, 1233.6, 3.2149, 4096, 1000, std::nullopt, ""};
  EXPECT_EQ(progress_line(record, 100, 201.4),
            "step 4/100 | epoch 0.12 | loss 1.5514 | grad_norm 0.83 | lr 1.0e-05 | mem 3.21 GiB | tps 1,234 | ETA 0:03:21");
  record.aux_loss = 0.01234;
  record.grad_norm = std::numeric_limits<double>::infinity();
  record.tokens_per_s = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(
      progress_line(record, 100, std::numeric_limits<double>::quiet_NaN()),
      "step 4/100 | epoch 0.12 | loss 1.5514 | aux_loss 0.0123 | grad_norm inf | lr 1.0e-05 | mem 3.21 GiB | tps ? | ETA ?");
  EXPECT_EQ(validation_line({4, 0.125, 1.43214, 12345}, 100),
            "step 4/100 | epoch 0.12 | val_loss 1.4321 | num_trained_tokens 12,345");
}

TEST(Progress, Durations) {
  EXPECT_EQ(duration_text(0), "0:00:00");
  EXPECT_EQ(duration_text(59.6), "0:01:00");
  EXPECT_EQ(duration_text(3599), "0:59:59");
  EXPECT_EQ(duration_text(97200), "27:00:00");
  EXPECT_EQ(duration_text(-1), "?");
  EXPECT_EQ(duration_text(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(seconds_left(4, 8, 10), 20);
  EXPECT_EQ(duration_text(seconds_left(0, 8, 10)), "?");
}

TEST(Progress, Thousands) {
  EXPECT_EQ(with_thousands(0), "0");
  EXPECT_EQ(with_thousands(999), "999");
  EXPECT_EQ(with_thousands(1000), "1,000");
  EXPECT_EQ(with_thousands(-100), "-100");
  EXPECT_EQ(with_thousands(-1234567), "-1,234,567");
  EXPECT_EQ(with_thousands(123456), "123,456");
}

}  // namespace headrace
