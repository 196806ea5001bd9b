// One optimizer step: invariant to the split into micro-batches, refused when not finite, harmless without a trained token.
#include "trainer/train_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "data/tiny_shards.h"
#include "models/tiny_models.h"

namespace headrace {
namespace {

using namespace testing_data;
using namespace testing_models;

OptimizerSection optimizer_settings() {
  OptimizerSection settings;
  settings.lr = 1e-3;
  settings.eps = 1e-3;  // with 1e-8 Adam makes whole steps of the rounding of gradients that are nearly 0
  settings.max_grad_norm = 0.1;
  settings.weight_decay = 0.1;
  return settings;
}

struct Trained {
  at::Tensor weights;
  StepResult result;
};

class TrainStep : public testing::Test {
 protected:
  TrainStep() : folder_(fresh_folder("train_step")) {
    std::vector<TinyDocument> documents = random_documents(8, 20, /*seed=*/3);
    write_tiny_shards(folder_, documents);
    shards_.emplace(folder_, "train");
    write_model(folder_ / "model", tiny_config("qwen3_moe"));
  }

  StepBatches batches(int64_t local_batch_size) const {
    BatchSettings settings;
    settings.sequence_length = 32;
    settings.pack = false;
    settings.shuffle = false;
    settings.global_batch_size = 8;
    settings.local_batch_size = local_batch_size;
    return Batches(*shards_, settings).next();
  }

  Trained train(const StepBatches& batches, Recompute recompute = Recompute::none, const LoadSettings& load = {}) const {
    LoadedModel model = load_model(folder_ / "model", load, at::kCPU);
    AdamW optimizer = make_optimizer(model.decoder, optimizer_settings(), 1);
    const StepResult result = train_step(model.decoder, optimizer, batches, recompute, 1e-3);
    return {model.decoder.parameters().flat().clone(), result};
  }

  std::filesystem::path folder_;
  std::optional<TokenShards> shards_;
};

TEST_F(TrainStep, SplitIntoMicroBatchesChangesNothing) {
  const Trained whole = train(batches(8));
  EXPECT_GT(whole.result.grad_norm, 0.1);  // clipped
  for (const int64_t local : {4, 2, 1}) {
    const StepBatches split = batches(local);
    ASSERT_EQ(static_cast<int64_t>(split.micro_batches.size()), 8 / local);
    const Trained parts = train(split);
    EXPECT_NEAR(parts.result.loss, whole.result.loss, 1e-6 * whole.result.loss);
    EXPECT_NEAR(parts.result.grad_norm, whole.result.grad_norm, 1e-5 * whole.result.grad_norm);
    EXPECT_LT((parts.weights - whole.weights).abs().max().item<double>(), 1e-6);
  }
}

TEST_F(TrainStep, RecomputeChangesNothing) {
  const Trained kept = train(batches(4));
  for (const Recompute recompute : {Recompute::selective, Recompute::full}) {
    EXPECT_TRUE(at::equal(train(batches(4), recompute).weights, kept.weights));
  }
}

TEST_F(TrainStep, BalancingLossMovesTheRouter) {
  const Trained off = train(batches(4)), on = train(batches(4), Recompute::none, {"auto", true, 1.0});
  EXPECT_EQ(off.result.balance_loss, 0.0);
  EXPECT_GT(on.result.balance_loss, 0.0);
  EXPECT_NEAR(on.result.loss, off.result.loss, 1e-12);  // reported without it
  EXPECT_FALSE(at::equal(on.weights, off.weights));
}

TEST_F(TrainStep, WithoutATrainedTokenOnlyDecayMovesTheWeights) {
  StepBatches step = batches(4);
  for (TokenBatch& batch : step.micro_batches) {
    batch.targets.fill_(-100);
    batch.num_trained_tokens = 0;
  }
  step.global_trained_tokens = 0;
  LoadedModel model = load_model(folder_ / "model", {}, at::kCPU);
  OptimizerSection settings = optimizer_settings();
  settings.weight_decay = 0.0;
  AdamW optimizer = make_optimizer(model.decoder, settings, 1);
  const at::Tensor before = model.decoder.parameters().flat().clone();
  const StepResult result = train_step(model.decoder, optimizer, step, Recompute::none, 1e-3);
  EXPECT_TRUE(result.finite);
  EXPECT_EQ(result.loss, 0.0);
  EXPECT_EQ(result.grad_norm, 0.0);
  EXPECT_TRUE(at::equal(model.decoder.parameters().flat(), before));
}

TEST_F(TrainStep, WithoutATokenNothingHappens) {
  StepBatches step = batches(8);
  step.micro_batches.clear();
  for (const bool fused : {false, true}) {
    OptimizerSection settings = optimizer_settings();
    settings.max_grad_norm = fused ? 0 : settings.max_grad_norm;
    settings.fused_backward = fused;
    LoadedModel model = load_model(folder_ / "model", {}, at::kCPU);
    AdamW optimizer = make_optimizer(model.decoder, settings, 1);
    const at::Tensor before = model.decoder.parameters().flat().clone();
    EXPECT_TRUE(train_step(model.decoder, optimizer, step, Recompute::none, 1e-3).finite);
    EXPECT_TRUE(at::equal(model.decoder.parameters().flat(), before));
    EXPECT_EQ(optimizer.steps_done(), 0);
  }
}

TEST_F(TrainStep, NotFiniteIsRefusedAndLeavesEverythingAsItWas) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    LoadedModel model = load_model(folder_ / "model", {}, at::kCPU);
    AdamW optimizer = make_optimizer(model.decoder, optimizer_settings(), 1);
    ASSERT_TRUE(train_step(model.decoder, optimizer, batches(4), Recompute::none, 1e-3).finite);
    const at::Tensor moments = optimizer.first_moments().clone();
    model.decoder.parameters().weight("model.layers.0.self_attn.o_proj.weight")[0][0].fill_(value);
    const at::Tensor before = model.decoder.parameters().flat().clone();
    EXPECT_FALSE(train_step(model.decoder, optimizer, batches(4), Recompute::none, 1e-3).finite);
    EXPECT_TRUE(at::allclose(model.decoder.parameters().flat(), before, 0, 0, /*equal_nan=*/true));
    EXPECT_TRUE(at::equal(optimizer.first_moments(), moments));
    EXPECT_EQ(optimizer.steps_done(), 1);
    // The next whole step is as if the broken one had not been.
    model.decoder.parameters().weight("model.layers.0.self_attn.o_proj.weight")[0][0].fill_(0.1);
    EXPECT_TRUE(train_step(model.decoder, optimizer, batches(4), Recompute::none, 1e-3).finite);
  }
}

OptimizerSection fused_settings(bool fused) {
  OptimizerSection settings = optimizer_settings();
  settings.max_grad_norm = 0;
  settings.fused_backward = fused;
  return settings;
}

TEST_F(TrainStep, FusedBackwardIsTheSameUpdateWithoutAFullSetOfGradients) {
  for (const bool tied : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      std::filesystem::remove_all(folder_ / "another");
      write_model(folder_ / "another", tiny_config("qwen3_moe", tied), dtype);
      std::vector<at::Tensor> weights, moments;
      std::vector<StepResult> results;
      for (const bool fused : {false, true}) {
        LoadedModel model = load_model(folder_ / "another", {"auto", true, 0.1}, at::kCPU);
        AdamW optimizer = make_optimizer(model.decoder, fused_settings(fused), 1);
        for (int step = 0; step < 2; ++step) {
          results.push_back(train_step(model.decoder, optimizer, batches(8), Recompute::none, 1e-3));
        }
        EXPECT_EQ(model.decoder.parameters().gradients().empty(), fused);
        weights.push_back(model.decoder.parameters().flat());
        moments.push_back(optimizer.second_moments());
        EXPECT_EQ(optimizer.steps_done(), 2);
      }
      EXPECT_TRUE(at::equal(weights[0], weights[1]));
      EXPECT_TRUE(at::equal(moments[0], moments[1]));
      for (int step = 0; step < 2; ++step) {
        EXPECT_EQ(results[2 + step].loss, results[step].loss);
        EXPECT_NEAR(results[2 + step].grad_norm, results[step].grad_norm, 1e-5 * results[step].grad_norm);
      }
    }
  }
}

// Layer 0's inputs are scaled up and its projections down by the same power of two: the loss is what it was, but the gradients'
// squares overflow. By then the layers behind it have been updated.
TEST_F(TrainStep, FusedBackwardUpdatesNothingAfterAGradientThatIsNotFinite) {
  LoadedModel model = load_model(folder_ / "model", {}, at::kCPU);
  Parameters& parameters = model.decoder.parameters();
  const double power = std::ldexp(1.0, 90);
  parameters.weight("model.layers.0.input_layernorm.weight").mul_(power);
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
    parameters.weight("model.layers.0.self_attn." + std::string(name) + ".weight").div_(power);
  }
  AdamW optimizer = make_optimizer(model.decoder, fused_settings(true), 1);
  const at::Tensor before = parameters.flat().clone();
  const StepResult result = train_step(model.decoder, optimizer, batches(8), Recompute::none, 1e-3);
  EXPECT_TRUE(std::isfinite(result.loss));
  EXPECT_FALSE(result.finite);
  EXPECT_TRUE(result.partly_updated);
  for (const ParameterInfo& info : parameters.layout().entries()) {
    const bool behind =
        info.name.find("layers.1.") != std::string::npos || info.name == "lm_head.weight" || info.name == "model.norm.weight";
    EXPECT_EQ(at::equal(parameters.weight(info.name), parameters.view(before, info.name)), !behind) << info.name;
  }
}

TEST_F(TrainStep, FusedBackwardTakesOneMicroBatch) {
  LoadedModel model = load_model(folder_ / "model", {}, at::kCPU);
  AdamW optimizer = make_optimizer(model.decoder, fused_settings(true), 1);
  EXPECT_THROW(train_step(model.decoder, optimizer, batches(4), Recompute::none, 1e-3), std::invalid_argument);
}

TEST_F(TrainStep, EvaluationIsTheMeanOverTrainedTokens) {
  LoadedModel model = load_model(folder_ / "model", {}, at::kCPU);
  BatchSettings settings;
  settings.sequence_length = 32;
  settings.shuffle = false;
  settings.pack = false;
  Batches three(*shards_, [&] {
    settings.global_batch_size = settings.local_batch_size = 3;
    return settings;
  }());  // the last one is short
  const EvalResult result = evaluate(model.decoder, three);
  AdamW optimizer = make_optimizer(model.decoder, optimizer_settings(), 1);
  const StepBatches step = batches(8);
  EXPECT_EQ(result.num_trained_tokens, step.global_trained_tokens);
  EXPECT_NEAR(result.loss, train_step(model.decoder, optimizer, step, Recompute::none, 1e-3).loss, 1e-6 * result.loss);
}

TEST_F(TrainStep, NormsAreNotDecayed) {
  LoadedModel model = load_model(folder_ / "model", {}, at::kCPU);
  OptimizerSection settings = optimizer_settings();
  settings.weight_decay = 0.5;
  AdamW optimizer = make_optimizer(model.decoder, settings, 1);
  Parameters& parameters = model.decoder.parameters();
  const at::Tensor before = parameters.flat().clone();
  const at::Tensor gradients = at::zeros_like(parameters.flat());
  optimizer.step(parameters.flat(), gradients, optimizer.gradient_norm(gradients), 0.1);
  for (const ParameterInfo& info : parameters.layout().entries()) {
    const at::Tensor old = parameters.view(before, info.name), now = parameters.weight(info.name);
    const bool norm = info.name.find("norm") != std::string::npos;
    EXPECT_TRUE(at::allclose(now, norm ? old : old * 0.95, 1e-6, 1e-8)) << info.name;
  }
}

}  // namespace
}  // namespace headrace
