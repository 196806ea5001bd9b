// Whole optimizer steps on a GPU: the numbers of the CPU, no waiting for the device, no growing memory, the same bits again.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Backtrace.h>

#include "config/model_config.h"
#include "models/decoder.h"
#include "models/registry.h"
#include "tests/cuda/gpu.h"
#include "trainer/train_step.h"

namespace headrace {
using namespace testing;

namespace {

// Four layers, one of them dense, every path of the decoder: experts, dense MLP, balancing loss, q/k norm.
DecoderSpec small_spec(bool deterministic = false) {
  const ModelConfig config(
      parse_json(R"({"model_type": "qwen3_moe", "vocab_size": 504, "hidden_size": 64, "intermediate_size": 96,
      "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
      "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": true, "mlp_only_layers": [1], "output_router_logits": true,
      "router_aux_loss_coef": 0.01, "initializer_range": 0.1})",
                 "test"),
      "test");
  DecoderSpec spec = find_family(config).spec(config);
  for (LayerSpec& layer : spec.layers) layer.attention.deterministic = deterministic;
  return spec;
}

StepBatches step_of(const std::vector<int64_t>& lengths, uint64_t seed = 1) {
  TokenBatch batch = documents(lengths);
  const int64_t tokens = batch.document_bounds.back();
  batch.input_ids = at::randint(500, {tokens}, at::detail::createCPUGenerator(seed), at::kLong);
  batch.targets = at::randint(500, {tokens}, at::detail::createCPUGenerator(seed + 1), at::kLong);
  batch.targets[tokens / 2] = -100;
  batch.num_trained_tokens = tokens - 1;
  return {{batch}, tokens - 1, tokens, 0, 0};
}

// The same random weights on any device and in any dtype.
Decoder decoder_on(at::Device device, at::ScalarType type, const DecoderSpec& spec) {
  Decoder decoder(spec, type, device), source(spec, at::kFloat, at::kCPU);
  initialize_parameters(spec, source.parameters(), at::detail::createCPUGenerator(3));
  decoder.parameters().flat().copy_(source.parameters().flat());
  return decoder;
}

OptimizerSection fused_settings() {
  OptimizerSection settings;
  settings.max_grad_norm = 0;
  settings.fused_backward = true;
  return settings;
}

// Counts libtorch's warnings of operations that made the host wait.
class WaitCounter : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("synchronizing CUDA operation") == std::string::npos) return;
    ++count;
    where += c10::get_backtrace(2, 12) + "\n";
  }
  std::string where;
  int count = 0;
};

}  // namespace

TEST_F(Gpu, WholeStepsFollowTheCpu) {
  const StepBatches step = step_of({100, 37, 64});
  const auto losses = [&](at::Device device, at::ScalarType type, const OptimizerSection& settings = {}) {
    Decoder decoder = decoder_on(device, type, small_spec());
    AdamW optimizer = make_optimizer(decoder, settings, 1);
    std::vector<double> result;
    for (int i = 0; i < 8; ++i) result.push_back(train_step(decoder, optimizer, step, Recompute::none, 2e-3).loss);
    return result;
  };
  const auto expected = losses(at::kCPU, at::kFloat), float32 = losses(at::kCUDA, at::kFloat),
             bfloat16 = losses(at::kCUDA, at::kBFloat16);
  OptimizerSection fused = fused_settings(), unclipped = fused;
  unclipped.fused_backward = false;
  const auto fused_bfloat16 = losses(at::kCUDA, at::kBFloat16, fused),
             unclipped_bfloat16 = losses(at::kCUDA, at::kBFloat16, unclipped);
  EXPECT_LT(expected.back(), 0.9 * expected.front());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(float32[i] / expected[i], 1.0, 1e-4) << "step " << i;
    EXPECT_NEAR(bfloat16[i] / expected[i], 1.0, 1e-2) << "step " << i;
    EXPECT_NEAR(fused_bfloat16[i] / unclipped_bfloat16[i], 1.0, 1e-3) << "step " << i;
  }
}

TEST_F(Gpu, AStepWaitsForTheDeviceOnceAtItsEnd) {
  for (const auto& settings : {OptimizerSection{}, fused_settings()}) {
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{64, 64}, {100, 37, 64}}) {
        Decoder decoder = decoder_on(at::kCUDA, at::kBFloat16, small_spec());
        AdamW optimizer = make_optimizer(decoder, settings, 1);
        const StepBatches step = step_of(lengths);
        train_step(decoder, optimizer, step, recompute, 1e-3);  // libraries load
        WaitCounter counter;
        {
          const c10::WarningUtils::WarningHandlerGuard guard(&counter);
          const c10::WarningUtils::WarnAlways always(true);
          c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_WARN);
          train_step(decoder, optimizer, step, recompute, 1e-3);
          c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
        }
        EXPECT_EQ(counter.count, 1) << lengths.size() << " documents; waited in\n" << counter.where;
      }
    }
  }
}

TEST_F(Gpu, MemoryDoesNotGrowOverFiftySteps) {
  for (const auto& settings : {OptimizerSection{}, fused_settings()}) {
    Decoder decoder = decoder_on(at::kCUDA, at::kBFloat16, small_spec());
    AdamW optimizer = make_optimizer(decoder, settings, 1);
    const auto statistics = [] { return c10::cuda::CUDACachingAllocator::getDeviceStats(0); };
    const auto used = [&] { return statistics().allocated_bytes[0].current; };
    int64_t used_before = 0, segments_before = 0;
    for (int i = 0; i < 50; ++i) {
      // Other tokens, another routing and other documents of the same total in every step.
      train_step(decoder, optimizer, step_of({100 + i, 101 - i}, static_cast<uint64_t>(i)), Recompute::none, 1e-3);
      if (i == 4) used_before = used(), segments_before = statistics().num_device_alloc;
    }
    EXPECT_EQ(used(), used_before);
    EXPECT_EQ(statistics().num_device_alloc, segments_before);
  }
}

TEST_F(Gpu, DeterministicRunsAreTheSameToTheBit) {
  const auto weights = [](const std::vector<int64_t>& lengths) {
    Decoder decoder = decoder_on(at::kCUDA, at::kBFloat16, small_spec(/*deterministic=*/true));
    AdamW optimizer = make_optimizer(decoder, {}, 1);
    for (int i = 0; i < 3; ++i) train_step(decoder, optimizer, step_of(lengths), Recompute::none, 1e-3);
    return decoder.parameters().flat().clone();
  };
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{1500, 3000}, {2048, 2048}}) {
    const at::Tensor first = weights(lengths);
    for (int again = 0; again < 3; ++again) EXPECT_TRUE(at::equal(weights(lengths), first));
  }
}

}  // namespace headrace
