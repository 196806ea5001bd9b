#include "optim/adamw.h"

#include <torch/csrc/api/include/torch/optim/adamw.h>

#include "tests/layers/gradients.h"

namespace headrace {
using namespace testing;

TEST(AdamW, FollowsTorchOptimAdamW) {
  OptimizerSection settings;
  settings.weight_decay = 0.1;
  settings.max_grad_norm = 0.5;
  at::Tensor ours = random({1000}, 1);
  at::Tensor decayed = leaf(ours.narrow(0, 0, 600)), plain = leaf(ours.narrow(0, 600, 400));
  const auto options = torch::optim::AdamWOptions(0.01).eps(1e-8);
  torch::optim::AdamW with_decay({decayed}, torch::optim::AdamWOptions(options).weight_decay(0.1));
  torch::optim::AdamW without_decay({plain}, torch::optim::AdamWOptions(options).weight_decay(0.0));
  AdamW optimizer(ours, {{0, 600, true}, {600, 1000, false}}, settings, 7);
  for (int step = 0; step < 10; ++step) {
    const at::Tensor gradient = random({1000}, 10 + step, step % 2 == 0 ? 0.01 : 1.0);  // clipped every second time
    const at::Tensor norm = optimizer.gradient_norm(gradient);
    EXPECT_NEAR(norm.item<double>(), gradient.norm().item<double>(), 1e-4);
    const double coefficient = std::min(1.0, 0.5 / (norm.item<double>() + 1e-6));
    decayed.mutable_grad() = gradient.narrow(0, 0, 600) * coefficient;
    plain.mutable_grad() = gradient.narrow(0, 600, 400) * coefficient;
    with_decay.step();
    without_decay.step();
    optimizer.step(ours, gradient, norm, 0.01);
  }
  EXPECT_LT(relative_error(ours.narrow(0, 0, 600), decayed.detach()), 1e-6);
  EXPECT_LT(relative_error(ours.narrow(0, 600, 400), plain.detach()), 1e-6);
}

// With a gradient far below half a bfloat16 step, nearest rounding never moves; stochastic rounding moves by the right amount
// on average.
TEST(AdamW, StochasticRoundingKeepsSmallUpdates) {
  for (const bool stochastic : {false, true}) {
    OptimizerSection settings;
    settings.max_grad_norm = 0;
    settings.stochastic_rounding = stochastic ? "true" : "false";
    at::Tensor weights = at::ones({20000}, at::kBFloat16);
    AdamW optimizer(weights, {{0, 20000, true}}, settings, 3);
    const at::Tensor gradient = at::ones({20000}, at::kBFloat16);
    // Adam's update is lr for a constant gradient: 10 steps of 1e-4 from 1.0, where a bfloat16 step is 1/256 (below 1).
    for (int step = 0; step < 10; ++step) optimizer.step(weights, gradient, optimizer.gradient_norm(gradient), 1e-4);
    const double moved = 1.0 - weights.to(at::kDouble).mean().item<double>();
    if (stochastic) {
      EXPECT_NEAR(moved, 1e-3, 1e-4);
    } else {
      EXPECT_EQ(moved, 0.0);
    }
  }
}

TEST(AdamW, StochasticRoundingIsUnbiasedInTheMomentsAndRepeats) {
  OptimizerSection settings;
  const at::Tensor gradient = random({5000}, 4).to(at::kBFloat16);
  std::vector<at::Tensor> results;
  for (int run = 0; run < 2; ++run) {
    at::Tensor weights = random({5000}, 5).to(at::kBFloat16);
    AdamW optimizer(weights, {{0, 5000, true}}, settings, 11);
    for (int step = 0; step < 5; ++step) optimizer.step(weights, gradient, optimizer.gradient_norm(gradient), 1e-2);
    results.push_back(weights);
    const double scale = std::min(1.0, 1.0 / (gradient.to(at::kFloat).norm().item<double>() + 1e-6));
    const double expected = (gradient.to(at::kDouble) * scale).square().mean().item<double>() * (1.0 - std::pow(0.999, 5));
    EXPECT_NEAR(optimizer.second_moments().to(at::kDouble).mean().item<double>() / expected, 1.0, 0.01);
  }
  EXPECT_TRUE(at::equal(results[0], results[1]));
}

}  // namespace headrace
