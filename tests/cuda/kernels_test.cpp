// Every CUDA kernel against its CPU reference: odd sizes, empty experts, poisoned memory, new random numbers in every run.
#include "layers/embedding.h"
#include "layers/linear_cross_entropy.h"
#include "layers/norm.h"
#include "layers/qk_norm_rope.h"
#include "layers/router.h"
#include "layers/swiglu.h"
#include "optim/adamw.h"
#include "tests/cuda/gpu.h"

namespace headrace {
using namespace testing;

TEST_F(GpuKernels, NewMemoryIsPoisoned) {
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    EXPECT_TRUE(at::empty({1000}, at::TensorOptions().device(at::kCUDA).dtype(type)).isnan().all().item<bool>());
  }
}

TEST_F(GpuKernels, DispatchPlanIsTheStableOrderByExpert) {
  struct Case {
    int64_t tokens, num_experts, top_k;
  };
  for (const auto& [tokens, num_experts, top_k] :
       {Case{1, 1, 1}, {1, 8, 2}, {1, 128, 8}, {1025, 128, 8}, {333, 40, 7}, {2000, 512, 9}, {40000, 64, 4}, {300000, 2, 1}}) {
    for (const at::Tensor& ids : {choices(tokens, num_experts, top_k), at::full({tokens, top_k}, num_experts - 1, at::kLong)}) {
      const DispatchPlan expected = make_dispatch_plan(ids, num_experts), ours = make_dispatch_plan(on_gpu(ids), num_experts);
      EXPECT_TRUE(at::equal(ours.row_of_pair.cpu(), expected.row_of_pair)) << tokens << ", " << num_experts << " experts";
      EXPECT_TRUE(at::equal(ours.pair_of_row.cpu(), expected.pair_of_row)) << tokens << ", " << num_experts << " experts";
      EXPECT_TRUE(at::equal(ours.ends.cpu(), expected.ends)) << tokens << ", " << num_experts << " experts";
    }
  }
}

TEST_F(GpuKernels, DispatchAndCombine) {
  for (const auto& [top_k, size] : {std::pair<int64_t, int64_t>{1, 8}, {2, 72}, {8, 2048}, {10, 2056}, {7, 5120}}) {
    const at::Tensor ids = choices(123, 12, top_k);
    const DispatchPlan plan = make_dispatch_plan(ids, 12), gpu_plan = make_dispatch_plan(on_gpu(ids), 12);
    const at::Tensor x = normal_bf16({123, size}), rows = dispatch(x, plan);
    EXPECT_TRUE(at::equal(dispatch(on_gpu(x), gpu_plan).cpu(), rows));
    const at::Tensor weights = normal({123, top_k}).abs();
    for (const at::Tensor& addend : {at::Tensor(), normal_bf16({123, size})}) {
      const auto gpu_addend = addend.defined() ? on_gpu(addend) : addend,
                 wide_addend = addend.defined() ? wide(addend) : addend;
      const std::string what = "top_k " + std::to_string(top_k) + (addend.defined() ? " with addend" : "");
      expect_as_good_as_plain(combine(on_gpu(rows), on_gpu(weights), gpu_plan, gpu_addend),
                              combine(rows, weights, plan, addend), combine(wide(rows), weights, plan, wide_addend), what);
      expect_as_good_as_plain(combine(on_gpu(rows), {}, gpu_plan, gpu_addend), combine(rows, {}, plan, addend),
                              combine(wide(rows), {}, plan, wide_addend), what + ", no weights");
    }
  }
}

TEST_F(GpuKernels, Swiglu) {
  for (const auto& [tokens, width] : {std::pair<int64_t, int64_t>{1, 8}, {3, 40}, {100, 768}, {33, 1536}, {5, 14336}}) {
    const at::Tensor gate_up = normal_bf16({tokens, 2 * width}), da = normal_bf16({tokens, width});
    const std::string what = "width " + std::to_string(width);
    expect_as_good_as_plain(swiglu_forward(on_gpu(gate_up)), swiglu_forward(gate_up), swiglu_forward(wide(gate_up)), what);
    expect_as_good_as_plain(swiglu_backward(on_gpu(da), on_gpu(gate_up)), swiglu_backward(da, gate_up),
                            swiglu_backward(wide(da), wide(gate_up)), what);
  }
}

TEST_F(GpuKernels, WeightedSwigluBackward) {
  for (const auto& [tokens, width] : {std::pair<int64_t, int64_t>{1, 8}, {100, 768}, {33, 1544}}) {
    const at::Tensor ids = choices(tokens, 9, 3), weights = normal({tokens, 3}).abs();
    const DispatchPlan plan = make_dispatch_plan(ids, 9), gpu_plan = make_dispatch_plan(on_gpu(ids), 9);
    const at::Tensor gate_up = normal_bf16({3 * tokens, 2 * width}), da = normal_bf16({3 * tokens, width});
    const auto exact = swiglu_backward_weighted(wide(da), wide(gate_up), weights, plan);
    const auto plain = swiglu_backward_weighted(da.clone(), gate_up.clone(), weights, plan);
    const auto ours = swiglu_backward_weighted(on_gpu(da), on_gpu(gate_up), on_gpu(weights), gpu_plan);
    const std::string what = "width " + std::to_string(width);
    expect_as_good_as_plain(ours.dgate_up, plain.dgate_up, exact.dgate_up, what);
    expect_as_good_as_plain(ours.scaled_activation, plain.scaled_activation, exact.scaled_activation, what);
    expect_as_good_as_plain(ours.dweights, plain.dweights, exact.dweights, what);
  }
}

TEST_F(GpuKernels, RmsNorm) {
  for (const int64_t size : {8, 72, 2048, 4096, 8192}) {
    for (const int64_t rows : {1, 3, 1000}) {
      const at::Tensor x = normal_bf16({rows, size}), delta = normal_bf16({rows, size}), w = normal_bf16({size});
      const at::Tensor dy = normal_bf16({rows, size}), dresidual = normal_bf16({rows, size});
      const std::string what = std::to_string(rows) + " x " + std::to_string(size);
      const AddNormForward plain = add_rms_norm_forward(x, delta, w, 1e-6);
      const AddNormForward ours = add_rms_norm_forward(on_gpu(x), on_gpu(delta), on_gpu(w), 1e-6);
      EXPECT_TRUE(at::equal(ours.sum.cpu(), plain.sum)) << what;
      const at::Tensor sum = plain.sum;
      const NormForward exact = rms_norm_forward(wide(sum), wide(w), 1e-6);
      expect_as_good_as_plain(ours.y, plain.y, exact.y, what);
      EXPECT_TRUE(at::equal(rms_norm_apply(ours.sum, on_gpu(w), ours.saved), ours.y)) << what;

      const at::Tensor dw = at::zeros({size}), plain_dw = rounded(dw), gpu_dw = on_gpu(plain_dw);
      const at::Tensor dx = rms_norm_backward(wide(dy), wide(sum), wide(w), exact.saved, dw, wide(dresidual));
      const at::Tensor plain_dx = rms_norm_backward(dy, sum, w, plain.saved, plain_dw, dresidual);
      const at::Tensor gpu_dx = rms_norm_backward(on_gpu(dy), ours.sum, on_gpu(w), ours.saved, gpu_dw, on_gpu(dresidual));
      expect_as_good_as_plain(gpu_dx, plain_dx, dx, what);
      expect_as_good_as_plain(gpu_dw, plain_dw, dw, what);
    }
  }
}

TEST_F(GpuKernels, QkNormRope) {
  struct Case {
    int64_t tokens, num_heads, num_key_value_heads, head_dim;
  };
  for (const auto& [tokens, nq, nkv, d] :
       {Case{1, 1, 1, 64}, {3, 3, 1, 128}, {517, 32, 4, 128}, {130, 8, 8, 64}, {65, 5, 1, 256}}) {
    for (const bool norm : {true, false}) {
      AttentionConfig config;
      config.num_heads = nq, config.num_key_value_heads = nkv, config.head_dim = d, config.qk_norm = norm;
      config.rms_norm_eps = 1e-6;
      RopeFrequencies frequencies;
      for (int64_t i = 0; i < d / 2; ++i) {
        frequencies.inverse_frequencies.push_back(std::pow(1e4F, -2.0F * static_cast<float>(i) / static_cast<float>(d)));
      }
      const at::Tensor positions = whole_numbers(5000, {tokens});
      const at::Tensor qkv = normal_bf16({tokens, (nq + 2 * nkv) * d}), q_norm = normal_bf16({d}), k_norm = normal_bf16({d});
      const Heads douts{normal_bf16({tokens, nq, d}), normal_bf16({tokens, nkv, d}), normal_bf16({tokens, nkv, d})};
      const auto run = [&](auto convert) {
        AttentionTensors weights, grads;
        if (norm) {
          weights.q_norm = convert(q_norm), weights.k_norm = convert(k_norm);
          grads.q_norm = at::zeros_like(weights.q_norm), grads.k_norm = at::zeros_like(weights.k_norm);
        }
        const at::Tensor x = convert(qkv);
        // The tables are rounded once for all sides: they are an input here.
        const RopeTables rounded_tables = rope_tables(frequencies, positions, at::kBFloat16);
        const RopeTables rope{convert(rounded_tables.cos), convert(rounded_tables.sin)};
        const Heads heads = qk_norm_rope_forward(x, config, weights, rope);
        const Heads dheads{convert(douts.q), convert(douts.k), convert(douts.v)};
        const at::Tensor dqkv = qk_norm_rope_backward(dheads, x, config, weights, grads, rope);
        std::vector<at::Tensor> results = {heads.q, heads.k, dqkv};
        if (norm) results.insert(results.end(), {grads.q_norm, grads.k_norm});
        return results;
      };
      const auto exact = run(wide), plain = run([](const at::Tensor&t) { return t; }),
                 ours = run([](const at::Tensor&t) { return on_gpu(t); });
      for (std::size_t i = 0; i < exact.size(); ++i) {
        expect_as_good_as_plain(ours[i], plain[i], exact[i],
                                "result " + std::to_string(i) + ", head_dim " + std::to_string(d) + (norm ? ", norm" : ""));
      }
    }
  }
}

// One-hot rows make the logits exact on both sides, and few distinct values make ties: the lower expert must win everywhere.
TEST_F(GpuKernels, RouterChoosesAsTheCpuDoes) {
  for (const auto& [num_experts, top_k] : {std::pair<int64_t, int64_t>{8, 2}, {128, 8}, {40, 7}, {256, 9}, {512, 10}}) {
    const at::Tensor x = rounded(at::eye(64)), w = rounded(normal({num_experts, 64}).mul(2).round().div(2));
    for (const bool normalize : {false, true}) {
      const RouterConfig config{num_experts, top_k, normalize, normalize};
      const Routing expected = router_forward(x, w, config), ours = router_forward(on_gpu(x), on_gpu(w), config);
      EXPECT_TRUE(at::equal(ours.logits.cpu(), expected.logits));
      EXPECT_TRUE(at::equal(ours.expert_ids.cpu(), expected.expert_ids)) << num_experts << " experts";
      EXPECT_LT(relative_error(ours.weights.cpu(), expected.weights), normalize ? 1e-5 : 1e-3);
    }
  }
}

TEST_F(GpuKernels, LinearCrossEntropy) {
  for (const int64_t vocab : {8, 1000, 4104}) {
    for (const int64_t chunk : {16, 75}) {
      const at::Tensor h = normal_bf16({75, 32}), w = normal_bf16({vocab, 32}, 0.3);
      at::Tensor targets = whole_numbers(vocab, {75});
      targets.narrow(0, 10, 20).fill_(-100);
      const auto run = [&](auto convert, const at::Tensor& t, bool overwrite) {
        const at::Tensor weight = convert(w), dw = overwrite ? poisoned_like(weight) : at::zeros_like(weight);
        const auto result = linear_cross_entropy_forward_backward(convert(h), weight, t, 55, 1.0 / 55, dw, overwrite, {chunk});
        return std::vector<at::Tensor>{result.dh, dw, result.loss_sum};
      };
      const auto exact = run(wide, targets, false), plain = run([](const at::Tensor&t) { return t; }, targets, false);
      for (const bool overwrite : {false, true}) {
        const auto ours = run([](const at::Tensor& t) { return on_gpu(t); }, on_gpu(targets), overwrite);
        const std::string what = "vocabulary " + std::to_string(vocab) + ", chunk " + std::to_string(chunk);
        expect_as_good_as_plain(ours[0], plain[0], exact[0], what);
        expect_as_good_as_plain(ours[1], plain[1], exact[1], what);
        EXPECT_LT(relative_error(ours[2].cpu(), exact[2]), 1e-3) << what;
        const auto loss = linear_cross_entropy_forward(on_gpu(h), on_gpu(w), on_gpu(targets), 55, {chunk});
        EXPECT_EQ(loss.loss_sum.item<float>(), ours[2].item<float>()) << what;
      }
    }
  }
}

TEST_F(GpuKernels, EmbeddingBackward) {
  for (const auto& [vocab, tokens, size] :
       {std::tuple<int64_t, int64_t, int64_t>{50, 300, 16}, {5000, 777, 2056}, {2, 3000, 8}, {9, 1, 64}}) {
    const at::Tensor ids = whole_numbers(vocab, {tokens}), dy = normal_bf16({tokens, size}),
                     before = normal_bf16({vocab, size});
    for (const int64_t padding_idx : {int64_t{-1}, vocab / 2}) {
      const at::Tensor exact = wide(before), plain = before.clone(), ours = on_gpu(before);
      embedding_backward(wide(dy), ids, exact, padding_idx);
      embedding_backward(dy, ids, plain, padding_idx);
      embedding_backward(on_gpu(dy), on_gpu(ids), ours, padding_idx);
      expect_as_good_as_plain(ours, plain, exact, "vocabulary " + std::to_string(vocab));
      if (padding_idx >= 0) EXPECT_TRUE(at::equal(ours[padding_idx].cpu(), before[padding_idx]));
    }
  }
}

// The same numbers on both: one formula, one random generator, float32 arithmetic in the same order.
TEST_F(GpuKernels, AdamW) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const bool master_weights : {false, true}) {
      for (const int64_t size : {7, 10007}) {
        OptimizerSection settings;
        settings.weight_decay = 0.1;
        settings.master_weights = master_weights;
        const std::vector<DecaySegment> segments = {{0, size / 16 * 8, true}, {size / 16 * 8, size, false}};
        at::Tensor weights = normal({size}).to(type), gpu_weights = on_gpu(weights);
        headrace::AdamW cpu(weights, segments, settings, 9), gpu(gpu_weights, segments, settings, 9);
        for (int step = 0; step < 3; ++step) {
          const at::Tensor gradient = normal({size}).to(type), norm = cpu.gradient_norm(gradient);
          cpu.step(weights, gradient, norm, 1e-2);
          gpu.step(gpu_weights, on_gpu(gradient), on_gpu(norm), 1e-2);
        }
        const double tolerance = type == at::kFloat ? 1e-6 : 1e-3;
        EXPECT_LT(relative_error(gpu_weights.cpu(), weights), tolerance);
        EXPECT_LT(relative_error(gpu.second_moments().cpu(), cpu.second_moments()), tolerance);
        if (!gpu.master_remainders().defined()) continue;
        const auto master = [](const at::Tensor& upper, const at::Tensor& lower) {
          return upper.cpu().view(at::kShort).to(at::kInt).mul(1 << 16).add(lower.cpu().to(at::kInt)).view(at::kFloat);
        };
        EXPECT_LT(relative_error(master(gpu_weights, gpu.master_remainders()), master(weights, cpu.master_remainders())), 1e-5);
      }
    }
  }
}

TEST_F(GpuKernels, AdamWLeavesEverythingAtAScaleOfNaN) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    at::Tensor weights = on_gpu(normal({1001}).to(type)), gradient = on_gpu(normal({1001}).to(type));
    const at::Tensor before = weights.clone();
    headrace::AdamW optimizer(weights, {{0, 1001, true}}, {}, 9);
    gradient[500] = std::numeric_limits<double>::infinity();
    optimizer.step(weights, gradient, optimizer.gradient_norm(gradient), 1e-2);
    EXPECT_TRUE(at::equal(weights, before));
    EXPECT_EQ(optimizer.second_moments().abs().max().item<double>(), 0.0);
  }
}

}  // namespace headrace
