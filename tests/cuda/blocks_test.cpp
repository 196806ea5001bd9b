// Blocks on a GPU against the same blocks in float32 on the CPU, whose tests compare them with autograd. Skipped without a GPU.
#include "layers/attention.h"
#include "layers/grouped_linear.h"
#include "layers/moe.h"
#include "tests/cuda/gpu.h"

namespace headrace {
using namespace testing;

TEST_F(Gpu, AttentionMatchesTheCpu) {
  for (const int64_t window : {0, 50}) {
    AttentionConfig config{128, 8, 2, 64, false, false, true, 1e-6, window};
    const std::vector<int64_t> lengths = {130, 1, 77};
    const TokenBatch batch = documents(lengths), gpu_batch = on_gpu(documents(lengths));
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
    const auto bfloat16 = run([](const at::Tensor& t) { return on_gpu(t); }, gpu_batch);
    const auto float32 = run([](const at::Tensor& t) { return on_gpu(wide(t)); }, gpu_batch);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LT(relative_error(bfloat16[i].cpu(), expected[i]), 1.5 * relative_error(plain[i], expected[i]))
          << "result " << i << ", window " << window;
      EXPECT_LT(relative_error(float32[i].cpu(), expected[i]), 1e-4) << "result " << i << ", window " << window;
    }
  }
}

TEST_F(Gpu, AttentionCoreMatchesTheCpu) {
  for (const auto& lengths : {std::vector<int64_t>{130, 1, 77}, std::vector<int64_t>{104, 104}}) {  // FA2; cuDNN
    const at::Tensor q = rounded(random({208, 8, 64}, 1)), k = rounded(random({208, 2, 64}, 2)),
                     v = rounded(random({208, 2, 64}, 3));
    const at::Tensor dout = rounded(random({208, 8, 64}, 4));
    for (const int64_t window : {0, 50}) {
      const AttentionCoreConfig config{0.125, window};
      const TokenBatch batch = documents(lengths), gpu_batch = on_gpu(documents(lengths));
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

TEST_F(Gpu, GroupedLinearWritesEverythingAndSkipsEmptyExperts) {
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

TEST_F(Gpu, MoeMatchesTheCpu) {
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
  const auto bfloat16 = run([](const at::Tensor& t) { return on_gpu(t); },
                            {on_gpu(routing.expert_ids), on_gpu(routing.weights), on_gpu(rounded(routing.logits))});
  const auto float32 = run([](const at::Tensor& t) { return on_gpu(wide(t)); },
                           {on_gpu(routing.expert_ids), on_gpu(routing.weights), on_gpu(routing.logits)});
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT(relative_error(bfloat16[i].cpu(), expected[i]), kBfloat16Tolerance) << "result " << i;
    EXPECT_LT(relative_error(float32[i].cpu(), expected[i]), 1e-4) << "result " << i;
  }
}

}  // namespace headrace
