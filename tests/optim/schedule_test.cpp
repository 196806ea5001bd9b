#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <vector>

namespace headrace {
namespace {

struct Golden {
  std::string type;
  int64_t num_warmup_steps, num_training_steps;
  double min_lr;  // of lr 2e-5
  std::vector<double> multipliers;
};

// Printed by transformers 5.17: get_scheduler(name, SGD(lr=2e-5), num_warmup_steps, num_training_steps).lr_lambdas[0](step);
// with min_lr: cosine_with_min_lr(min_lr=2e-6) and polynomial(lr_end=2e-6, power=1).
const std::vector<Golden> kGolden = {
    {"constant", 0, 5, 0.0, {1.0, 1.0, 1.0, 1.0, 1.0, 1.0}},
    {"constant", 0, 1, 0.0, {1.0, 1.0}},
    {"constant_with_warmup", 0, 5, 0.0, {1.0, 1.0, 1.0, 1.0, 1.0, 1.0}},
    {"constant_with_warmup", 3, 10, 0.0, {0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0}},
    {"constant_with_warmup", 10, 10, 0.0, {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}},
    {"constant_with_warmup",
     12,
     10,
     0.0,
     {0.0, 0.08333333333333333, 0.16666666666666666, 0.25, 0.3333333333333333, 0.4166666666666667, 0.5, 0.5833333333333334,
      0.6666666666666666, 0.75, 0.8333333333333334}},
    {"constant_with_warmup", 0, 1, 0.0, {1.0, 1.0}},
    {"linear", 0, 5, 0.0, {1.0, 0.8, 0.6, 0.4, 0.2, 0.0}},
    {"linear",
     3,
     10,
     0.0,
     {0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 0.8571428571428571, 0.7142857142857143, 0.5714285714285714,
      0.42857142857142855, 0.2857142857142857, 0.14285714285714285, 0.0}},
    {"linear", 10, 10, 0.0, {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.0}},
    {"linear",
     12,
     10,
     0.0,
     {0.0, 0.08333333333333333, 0.16666666666666666, 0.25, 0.3333333333333333, 0.4166666666666667, 0.5, 0.5833333333333334,
      0.6666666666666666, 0.75, 0.8333333333333334}},
    {"linear", 0, 1, 0.0, {1.0, 0.0}},
    {"cosine", 0, 5, 0.0, {1.0, 0.9045084971874737, 0.6545084971874737, 0.34549150281252633, 0.09549150281252633, 0.0}},
    {"cosine",
     3,
     10,
     0.0,
     {0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 0.9504844339512095, 0.8117449009293668, 0.6112604669781572,
      0.38873953302184283, 0.18825509907063326, 0.04951556604879048, 0.0}},
    {"cosine", 10, 10, 0.0, {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}},
    {"cosine",
     12,
     10,
     0.0,
     {0.0, 0.08333333333333333, 0.16666666666666666, 0.25, 0.3333333333333333, 0.4166666666666667, 0.5, 0.5833333333333334,
      0.6666666666666666, 0.75, 0.8333333333333334}},
    {"cosine", 0, 1, 0.0, {1.0, 0.0}},
    {"cosine",
     0,
     5,
     2e-6,
     {1.0, 0.9140576474687263, 0.6890576474687263, 0.4109423525312737, 0.1859423525312737, 0.09999999999999999}},
    {"cosine",
     3,
     10,
     2e-6,
     {0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 0.9554359905560885, 0.8305704108364301, 0.6501344202803414,
      0.4498655797196585, 0.2694295891635699, 0.14456400944391143, 0.09999999999999999}},
    {"cosine", 10, 10, 2e-6, {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}},
    {"linear",
     0,
     5,
     2e-6,
     {1.0, 0.8200000000000001, 0.6399999999999999, 0.45999999999999996, 0.2799999999999999, 0.09999999999999999}},
    {"linear",
     3,
     10,
     2e-6,
     {0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 0.8714285714285716, 0.7428571428571428, 0.6142857142857142,
      0.4857142857142857, 0.3571428571428571, 0.2285714285714286, 0.09999999999999999}},
};

}  // namespace

TEST(Schedule, EqualsTransformersAtEveryStep) {
  for (const Golden& golden : kGolden) {
    LrSchedulerSection section;
    section.type = golden.type;
    section.warmup_steps = static_cast<double>(golden.num_warmup_steps);
    section.min_lr = golden.min_lr;
    const LrSchedule schedule = make_lr_schedule(section, 2e-5, golden.num_training_steps);
    for (std::size_t step = 0; step < golden.multipliers.size(); ++step) {
      // Four units in the last place (of 1): min_lr changes the order of the arithmetic in the linear case.
      EXPECT_NEAR(lr_multiplier(schedule, static_cast<int64_t>(step)), golden.multipliers[step], 9e-16)
          << golden.type << " warmup " << golden.num_warmup_steps << " of " << golden.num_training_steps << " step " << step;
      if (golden.min_lr == 0) EXPECT_DOUBLE_EQ(lr_multiplier(schedule, static_cast<int64_t>(step)), golden.multipliers[step]);
    }
  }
}

// TrainingArguments(warmup_steps=w).get_warmup_steps(n) of transformers 5.17.
TEST(Schedule, WarmupBelowOneIsAShare) {
  EXPECT_EQ(num_warmup_steps(0, 100), 0);
  EXPECT_EQ(num_warmup_steps(0.03, 100), 3);
  EXPECT_EQ(num_warmup_steps(0.1, 7), 1);
  EXPECT_EQ(num_warmup_steps(0.5, 3), 2);
  EXPECT_EQ(num_warmup_steps(0.999, 10), 10);
  EXPECT_EQ(num_warmup_steps(1, 10), 1);
  EXPECT_EQ(num_warmup_steps(17, 10), 17);
  EXPECT_EQ(num_warmup_steps(0.07, 100), 8);  // 100 * 0.07 is above 7 in binary
}

TEST(Schedule, StaysAtItsEnd) {
  for (const char* type : {"linear", "cosine"}) {
    EXPECT_NEAR(lr_multiplier({type, 2, 10, 0.1}, 15), 0.1, 1e-15);
    EXPECT_NEAR(lr_multiplier({type, 2, 10, 0.0}, 1000), 0.0, 1e-15);
  }
}

TEST(Schedule, WrongArguments) {
  EXPECT_THROW(lr_multiplier({"step", 0, 10, 0}, 1), std::invalid_argument);
  EXPECT_THROW(make_lr_schedule({}, 1e-5, 0), std::invalid_argument);
  EXPECT_THROW(make_lr_schedule({}, 0, 1), std::invalid_argument);
}

}  // namespace headrace
