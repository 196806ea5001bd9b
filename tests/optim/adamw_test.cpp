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

// Without history in the moments (beta 0) the update depends on the gradient alone, so float32 weights must come out to the
// bit.
TEST(AdamW, MasterWeightsAreExactlyFloat32) {
  OptimizerSection settings;
  settings.beta1 = settings.beta2 = 0;
  settings.weight_decay = 0.1;
  settings.max_grad_norm = 0;
  settings.master_weights = true;
  at::Tensor weights = random({4000}, 1).to(at::kBFloat16), exact = weights.to(at::kFloat);
  AdamW bfloat16(weights, {{0, 4000, true}}, settings, 3), float32(exact, {{0, 4000, true}}, settings, 3);
  EXPECT_FALSE(float32.master_remainders().defined());  // float32 weights are their own masters
  for (int step = 0; step < 50; ++step) {
    const at::Tensor gradient = random({4000}, 10 + step).to(at::kBFloat16), wide = gradient.to(at::kFloat);
    bfloat16.step(weights, gradient, bfloat16.gradient_norm(gradient), 1e-4);
    float32.step(exact, wide, float32.gradient_norm(wide), 1e-4);
  }
  const at::Tensor bits = weights.view(at::kShort).to(at::kInt).mul(1 << 16).add(bfloat16.master_remainders().to(at::kInt));
  EXPECT_TRUE(at::equal(bits.view(at::kFloat), exact));
  EXPECT_LE((weights.to(at::kFloat) - exact).abs().div(exact.abs()).max().item<double>(), 1.0 / 256);  // half a bfloat16 step
}

TEST(AdamW, PartsOfTheBufferAddUpToTheWhole) {
  OptimizerSection settings;
  settings.weight_decay = 0.1;
  settings.max_grad_norm = 0;
  const std::vector<DecaySegment> segments = {{0, 304, true}, {304, 504, false}, {504, 1000, true}};
  const at::Tensor start = random({1000}, 1).to(at::kBFloat16), gradient = random({1000}, 2).to(at::kBFloat16);
  at::Tensor whole = start.clone(), parts = start.clone();
  AdamW a(whole, segments, settings, 5), b(parts, segments, settings, 5);
  a.step(whole, gradient, a.gradient_norm(gradient), 1e-2);
  b.begin_step(1e-2);
  for (const auto& [begin, end] : {std::pair{600, 1000}, {248, 600}, {0, 248}}) {
    const at::Tensor part = gradient.narrow(0, begin, end - begin).clone();
    b.update(parts, part, begin, b.gradient_scale(b.gradient_norm(part)));
  }
  EXPECT_TRUE(at::equal(whole, parts));
  EXPECT_TRUE(at::equal(a.second_moments(), b.second_moments()));
}

TEST(AdamW, ANormThatIsNotFiniteChangesNothing) {
  for (const double max_grad_norm : {0.0, 1.0}) {
    OptimizerSection settings;
    settings.max_grad_norm = max_grad_norm;
    at::Tensor weights = random({100}, 1);
    const at::Tensor before = weights.clone();
    AdamW optimizer(weights, {{0, 100, true}}, settings, 5);
    for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      at::Tensor gradient = random({100}, 2);
      gradient[3] = bad;
      optimizer.step(weights, gradient, optimizer.gradient_norm(gradient), 1e-2);
      EXPECT_TRUE(at::equal(weights, before));
      EXPECT_EQ(optimizer.first_moments().abs().max().item<double>(), 0.0);
    }
  }
}

}  // namespace headrace
