// Blocks on a GPU against the same blocks in float32 on the CPU, whose tests compare them with autograd. Skipped without a GPU.
// bfloat16 operands are rounded once on the CPU and used by both sides, so the error is that of the GPU's arithmetic alone.
#include <ATen/Context.h>

#include "config/model_config.h"
#include "layers/attention.h"
#include "layers/embedding.h"
#include "layers/grouped_linear.h"
#include "layers/linear_cross_entropy.h"
#include "layers/moe.h"
#include "layers/norm.h"
#include "models/decoder.h"
#include "models/registry.h"
#include "tests/layers/gradients.h"
#include "trainer/train_step.h"

namespace headrace {
using namespace testing;

namespace {

constexpr double kBfloat16Tolerance = 1e-2;

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

at::Tensor on_gpu(const at::Tensor& x) { return x.to(at::kCUDA); }
at::Tensor rounded(const at::Tensor& x) { return x.to(at::kBFloat16); }
at::Tensor wide(const at::Tensor& x) { return x.to(at::kFloat); }

// Every byte set, so that an element the kernel does not write shows.
at::Tensor poisoned_like(const at::Tensor& x) { return at::full_like(x, std::numeric_limits<double>::quiet_NaN()); }

TokenBatch gpu_documents(const std::vector<int64_t>& lengths) {
  TokenBatch batch = documents(lengths);
  batch.position_ids = on_gpu(batch.position_ids);
  batch.cu_seqlens = on_gpu(batch.cu_seqlens);
  return batch;
}

}  // namespace

TEST_F(Cuda, AttentionMatchesTheCpu) {
  for (const int64_t window : {0, 50}) {
    AttentionConfig config{128, 8, 2, 64, false, false, true, 1e-6, window};
    const std::vector<int64_t> lengths = {130, 1, 77};
    const TokenBatch batch = documents(lengths), gpu_batch = gpu_documents(lengths);
    RopeFrequencies frequencies;
    for (int i = 0; i < 32; ++i)
      frequencies.inverse_frequencies.push_back(std::pow(10000.0F, -2.0F * static_cast<float>(i) / 64));
    const at::Tensor x = rounded(random({208, 128}, 1)), dy = rounded(random({208, 128}, 2));
    const AttentionTensors w{rounded(random({config.qkv_size(), 128}, 3, 0.1)),
                             {},
                             rounded(random({64}, 4).add(2)),
                             rounded(random({64}, 5).add(2)),
                             rounded(random({128, 512}, 6, 0.1)),
                             {}};
    const auto run = [&](auto convert, const TokenBatch& b) {
      const AttentionTensors weights{convert(w.qkv), {}, convert(w.q_norm), convert(w.k_norm), convert(w.output), {}};
      const AttentionTensors grads{at::zeros_like(weights.qkv),    {},
                                   at::zeros_like(weights.q_norm), at::zeros_like(weights.k_norm),
                                   at::zeros_like(weights.output), {}};
      const RopeTables rope = rope_tables(frequencies, b.position_ids, weights.qkv.scalar_type());
      const AttentionForward forward = attention_forward(convert(x), config, weights, rope, b);
      const at::Tensor dx = attention_backward(convert(dy), convert(x), forward.saved, config, weights, grads, rope, b);
      return std::vector<at::Tensor>{forward.y, dx, grads.qkv, grads.q_norm, grads.k_norm, grads.output};
    };
    const auto expected = run(wide, batch);
    const auto plain = run([](const at::Tensor& t) { return t; }, batch);  // bfloat16 on the CPU: several roundings in a row
    const auto bfloat16 = run(on_gpu, gpu_batch);
    const auto float32 = run([](const at::Tensor& t) { return on_gpu(wide(t)); }, gpu_batch);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LT(relative_error(bfloat16[i].cpu(), expected[i]), 1.5 * relative_error(plain[i], expected[i]))
          << "result " << i << ", window " << window;
      EXPECT_LT(relative_error(float32[i].cpu(), expected[i]), 1e-4) << "result " << i << ", window " << window;
    }
  }
}

TEST_F(Cuda, AttentionCoreMatchesTheCpu) {
  for (const auto& lengths : {std::vector<int64_t>{130, 1, 77}, std::vector<int64_t>{104, 104}}) {  // FA2; cuDNN
    const at::Tensor q = rounded(random({208, 8, 64}, 1)), k = rounded(random({208, 2, 64}, 2)),
                     v = rounded(random({208, 2, 64}, 3));
    const at::Tensor dout = rounded(random({208, 8, 64}, 4));
    for (const int64_t window : {0, 50}) {
      const AttentionCoreConfig config{0.125, window};
      const TokenBatch batch = documents(lengths), gpu_batch = gpu_documents(lengths);
      const auto expected = attention_core_reference_forward(wide(q), wide(k), wide(v), batch, config);
      const auto expected_grads = attention_core_reference_backward(wide(dout), wide(q), wide(k), wide(v), batch, config);
      const auto ours = attention_core_forward(on_gpu(q), on_gpu(k), on_gpu(v), gpu_batch, config);
      const auto grads = attention_core_backward(on_gpu(dout), on_gpu(q), on_gpu(k), on_gpu(v), ours, gpu_batch, config);
      EXPECT_LT(relative_error(ours.out.cpu(), expected.out), kBfloat16Tolerance);
      EXPECT_LT(relative_error(grads.dq.cpu(), expected_grads.dq), kBfloat16Tolerance);
      EXPECT_LT(relative_error(grads.dk.cpu(), expected_grads.dk), kBfloat16Tolerance);
      EXPECT_LT(relative_error(grads.dv.cpu(), expected_grads.dv), kBfloat16Tolerance);
    }
  }
}

TEST_F(Cuda, GroupedLinearWritesEverythingAndSkipsEmptyExperts) {
  const int64_t num_experts = 9, in = 64, out = 48;
  at::Tensor ids = at::randint(num_experts, {301, 3}, at::detail::createCPUGenerator(1), at::kLong);
  ids.masked_fill_(ids.eq(4), 5);  // nobody chooses expert 4
  ids.masked_fill_(ids.eq(8), 0);  // nor the last
  const DispatchPlan cpu_plan = make_dispatch_plan(ids, num_experts), plan = make_dispatch_plan(on_gpu(ids), num_experts);
  EXPECT_TRUE(at::equal(plan.pair_of_row.cpu(), cpu_plan.pair_of_row));
  EXPECT_TRUE(at::equal(plan.ends.cpu(), cpu_plan.ends));
  const at::Tensor x = rounded(random({903, in}, 2)), w = rounded(random({num_experts, out, in}, 3)),
                   dy = rounded(random({903, out}, 4));
  EXPECT_LT(relative_error(grouped_linear_forward(on_gpu(x), on_gpu(w), plan).cpu(),
                           grouped_linear_forward(wide(x), wide(w), cpu_plan)),
            kBfloat16Tolerance);
  EXPECT_LT(relative_error(grouped_linear_input_backward(on_gpu(dy), on_gpu(w), plan).cpu(),
                           grouped_linear_input_backward(wide(dy), wide(w), cpu_plan)),
            kBfloat16Tolerance);
  const at::Tensor dw = at::zeros({num_experts, out, in}), gpu_dw = at::zeros({num_experts, out, in}, on_gpu(w).options());
  // Memory just freed and full of NaN: an empty expert's gradient must come out as zero, not as what lay there.
  { const at::Tensor poison = poisoned_like(gpu_dw); }
  grouped_linear_weight_backward(wide(dy), wide(x), dw, cpu_plan);
  grouped_linear_weight_backward(on_gpu(dy), on_gpu(x), gpu_dw, plan);
  EXPECT_LT(relative_error(gpu_dw.cpu(), dw), kBfloat16Tolerance);
  EXPECT_EQ(gpu_dw[4].abs().sum().item<double>(), 0.0);
  EXPECT_EQ(gpu_dw[8].abs().sum().item<double>(), 0.0);
  const at::Tensor stored = poisoned_like(gpu_dw);
  grouped_linear_weight_backward(on_gpu(dy), on_gpu(x), stored, plan, /*overwrite=*/true);
  EXPECT_TRUE(at::equal(stored, gpu_dw));
}

TEST_F(Cuda, MoeMatchesTheCpu) {
  const MoeConfig config{64, 48, {8, 3, true, false}};
  const at::Tensor x = rounded(random({257, 64}, 1)), dy = rounded(random({257, 64}, 2));
  const MoeTensors w{rounded(random({8, 64}, 3, 0.3)), rounded(random({8, 96, 64}, 4, 0.2)),
                     rounded(random({8, 64, 48}, 5, 0.2))};
  const auto run = [&](auto convert, const Routing& routing) {
    const MoeTensors weights{convert(w.router), convert(w.gate_up), convert(w.down)};
    const MoeTensors grads{at::zeros_like(weights.router), at::zeros_like(weights.gate_up), at::zeros_like(weights.down)};
    MoeSaved routed{routing, make_dispatch_plan(routing.expert_ids, 8), {}};
    const MoeForward forward = moe_forward_routed(convert(x), std::move(routed), weights);
    const at::Tensor dx = moe_backward(convert(dy), {}, convert(x), forward.saved, config, weights, grads);
    return std::vector<at::Tensor>{forward.y, dx, grads.router, grads.gate_up, grads.down};
  };
  // One routing for both: rounding may order near-equal experts differently.
  const Routing routing = router_forward(wide(x), wide(w.router), config.router);
  const auto expected = run(wide, routing);
  const auto bfloat16 = run(on_gpu, {on_gpu(routing.expert_ids), on_gpu(routing.weights), on_gpu(rounded(routing.logits))});
  const auto float32 = run([](const at::Tensor& t) { return on_gpu(wide(t)); },
                           {on_gpu(routing.expert_ids), on_gpu(routing.weights), on_gpu(routing.logits)});
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT(relative_error(bfloat16[i].cpu(), expected[i]), kBfloat16Tolerance) << "result " << i;
    EXPECT_LT(relative_error(float32[i].cpu(), expected[i]), 1e-4) << "result " << i;
  }
}

// One-hot rows make the logits exact on both sides, and few distinct values make ties: the lower expert must win everywhere.
TEST_F(Cuda, RouterChoosesAsTheCpuDoes) {
  for (const auto& [num_experts, top_k] : {std::pair<int64_t, int64_t>{8, 2}, {128, 8}, {40, 7}, {256, 9}}) {
    const at::Tensor x = rounded(at::eye(64)), w = rounded(random({num_experts, 64}, 1).mul(2).round().div(2));
    for (const bool normalize : {false, true}) {
      const RouterConfig config{num_experts, top_k, normalize, normalize};
      const Routing expected = router_forward(x, w, config), ours = router_forward(on_gpu(x), on_gpu(w), config);
      EXPECT_TRUE(at::equal(ours.logits.cpu(), expected.logits));
      EXPECT_TRUE(at::equal(ours.expert_ids.cpu(), expected.expert_ids)) << num_experts << " experts";
      EXPECT_LT(relative_error(ours.weights.cpu(), expected.weights), normalize ? 1e-5 : 1e-3);
    }
  }
}

TEST_F(Cuda, NormsMatchTheCpu) {
  for (const int64_t size : {8, 72, 2048, 4096, 8192}) {
    for (const int64_t rows : {1, 3, 1000}) {
      const at::Tensor x = rounded(random({rows, size}, 1)), delta = rounded(random({rows, size}, 2)),
                       w = rounded(random({size}, 3));
      const at::Tensor dy = rounded(random({rows, size}, 4)), dresidual = rounded(random({rows, size}, 5));
      const AddNormForward expected = add_rms_norm_forward(x, delta, w, 1e-6);  // bfloat16 rounds at the same places
      const AddNormForward ours = add_rms_norm_forward(on_gpu(x), on_gpu(delta), on_gpu(w), 1e-6);
      EXPECT_TRUE(at::equal(ours.sum.cpu(), expected.sum));
      EXPECT_LT(relative_error(ours.y.cpu(), expected.y), 1e-3) << rows << " x " << size;
      EXPECT_TRUE(at::equal(rms_norm_apply(ours.sum, on_gpu(w), ours.saved), ours.y));
      const at::Tensor dw = at::zeros({size}), gpu_dw = at::zeros({size}, on_gpu(dw).options());
      const at::Tensor dx = rms_norm_backward(wide(dy), wide(expected.sum), wide(w), expected.saved, dw, wide(dresidual));
      const at::Tensor gpu_dx = rms_norm_backward(on_gpu(dy), ours.sum, on_gpu(w), ours.saved, gpu_dw, on_gpu(dresidual));
      EXPECT_LT(relative_error(gpu_dx.cpu(), dx), kBfloat16Tolerance) << rows << " x " << size;
      EXPECT_LT(relative_error(gpu_dw.cpu(), dw), 1e-4) << rows << " x " << size;
    }
  }
}

TEST_F(Cuda, LossAndEmbeddingMatchTheCpu) {
  const at::Tensor h = rounded(random({75, 32}, 1)), w = rounded(random({1000, 32}, 2, 0.3));
  at::Tensor targets = at::randint(1000, {75}, at::detail::createCPUGenerator(3), at::kLong);
  targets.narrow(0, 10, 20).fill_(-100);
  const at::Tensor dw = at::zeros({1000, 32}), gpu_dw = at::zeros({1000, 32}, on_gpu(w).options());
  const auto expected = linear_cross_entropy_forward_backward(wide(h), wide(w), targets, 55, 1.0 / 55, dw, {16});
  const auto ours = linear_cross_entropy_forward_backward(on_gpu(h), on_gpu(w), on_gpu(targets), 55, 1.0 / 55, gpu_dw, {16});
  EXPECT_LT(relative_error(ours.loss_sum.cpu(), expected.loss_sum), 1e-3);
  EXPECT_LT(relative_error(ours.dh.cpu(), expected.dh), kBfloat16Tolerance);
  EXPECT_LT(relative_error(gpu_dw.cpu(), dw), kBfloat16Tolerance);

  const at::Tensor ids = at::randint(50, {300}, at::detail::createCPUGenerator(4), at::kLong), dy = random({300, 16}, 5);
  const at::Tensor grad = at::zeros({50, 16}), gpu_grad = at::zeros({50, 16}, on_gpu(dy).options());
  embedding_backward(dy, ids, grad, 7);
  embedding_backward(on_gpu(dy), on_gpu(ids), gpu_grad, 7);
  EXPECT_LT(relative_error(gpu_grad.cpu(), grad), 1e-5);
}

// The same numbers on both: one formula, one random generator, float32 arithmetic in the same order.
TEST_F(Cuda, AdamWMatchesTheCpu) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    OptimizerSection settings;
    settings.weight_decay = 0.1;
    at::Tensor weights = random({10007}, 1).to(type), gpu_weights = on_gpu(weights);
    AdamW cpu(weights, {{0, 5000, true}, {5000, 10007, false}}, settings, 9);
    AdamW gpu(gpu_weights, {{0, 5000, true}, {5000, 10007, false}}, settings, 9);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor gradient = random({10007}, 20 + step).to(type), gpu_gradient = on_gpu(gradient);
      const at::Tensor norm = cpu.gradient_norm(gradient);
      cpu.step(weights, gradient, norm, 1e-2);
      gpu.step(gpu_weights, gpu_gradient, on_gpu(norm), 1e-2);
    }
    EXPECT_LT(relative_error(gpu_weights.cpu(), weights), type == at::kFloat ? 1e-6 : 1e-3);
    EXPECT_LT(relative_error(gpu.second_moments().cpu(), cpu.second_moments()), type == at::kFloat ? 1e-6 : 1e-3);
  }
}

TEST_F(Cuda, WholeStepsFollowTheCpu) {
  const ModelConfig config(
      parse_json(R"({"model_type": "qwen3_moe", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96,
      "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
      "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": true, "mlp_only_layers": [1], "output_router_logits": true,
      "router_aux_loss_coef": 0.01, "initializer_range": 0.1})",
                 "test"),
      "test");
  const DecoderSpec spec = find_family(config).spec(config);
  TokenBatch batch = documents({100, 37, 64});
  batch.input_ids = at::randint(500, {201}, at::detail::createCPUGenerator(1), at::kLong);
  batch.targets = at::randint(500, {201}, at::detail::createCPUGenerator(2), at::kLong);
  batch.targets[100] = -100;
  batch.num_trained_tokens = 200;
  const StepBatches step{{batch}, 200, 201, 0, 0};
  const auto losses = [&](at::Device device, at::ScalarType type) {
    Decoder decoder(spec, type, device);
    Decoder source(spec, at::kFloat, at::kCPU);
    initialize_parameters(spec, source.parameters(), at::detail::createCPUGenerator(3));
    decoder.parameters().flat().copy_(source.parameters().flat());
    AdamW optimizer = make_optimizer(decoder, {}, 1);
    std::vector<double> result;
    for (int i = 0; i < 8; ++i) result.push_back(train_step(decoder, optimizer, step, Recompute::none, 2e-3).loss);
    return result;
  };
  const auto expected = losses(at::kCPU, at::kFloat), float32 = losses(at::kCUDA, at::kFloat),
             bfloat16 = losses(at::kCUDA, at::kBFloat16);
  EXPECT_LT(expected.back(), 0.9 * expected.front());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(float32[i] / expected[i], 1.0, 1e-4) << "step " << i;
    EXPECT_NEAR(bfloat16[i] / expected[i], 1.0, 1e-2) << "step " << i;
  }
}

}  // namespace headrace
