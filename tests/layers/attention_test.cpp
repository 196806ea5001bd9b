#include "layers/attention.h"

#include <cmath>

#include "tests/layers/gradients.h"

namespace headrace {
using namespace testing;

namespace {

// The block as plain differentiable ATen, one mask for the whole row.
at::Tensor plain_attention(const at::Tensor& x, const AttentionConfig& c, const AttentionTensors& w, const RopeTables& rope,
                           const TokenBatch& batch) {
  const int64_t t = x.size(0), nq = c.num_heads, nkv = c.num_key_value_heads, d = c.head_dim;
  at::Tensor qkv = at::matmul(x, w.qkv.t());
  if (w.qkv_bias.defined()) qkv = qkv + w.qkv_bias;
  const at::Tensor heads = qkv.view({t, nq + 2 * nkv, d});
  const auto norm = [&](const at::Tensor& h, const at::Tensor& weight) {
    return c.qk_norm ? h * at::rsqrt(h.square().mean(-1, true) + c.rms_norm_eps) * weight : h;
  };
  const auto rotate = [&](const at::Tensor& h) {
    const at::Tensor cos = at::cat({rope.cos, rope.cos}, -1), sin = at::cat({rope.sin, rope.sin}, -1);
    return h * cos + at::cat({-h.narrow(-1, d / 2, d / 2), h.narrow(-1, 0, d / 2)}, -1) * sin;
  };
  const at::Tensor q = rotate(norm(heads.narrow(1, 0, nq), w.q_norm)).transpose(0, 1);
  const at::Tensor k = rotate(norm(heads.narrow(1, nq, nkv), w.k_norm)).repeat_interleave(nq / nkv, 1).transpose(0, 1);
  const at::Tensor v = heads.narrow(1, nq + nkv, nkv).repeat_interleave(nq / nkv, 1).transpose(0, 1);
  at::Tensor visible = at::zeros({t, t}, at::kBool);
  for (std::size_t doc = 0; doc + 1 < batch.document_bounds.size(); ++doc) {
    for (int64_t i = batch.document_bounds[doc]; i < batch.document_bounds[doc + 1]; ++i) {
      for (int64_t j = batch.document_bounds[doc]; j <= i; ++j) {
        if (c.sliding_window == 0 || j > i - c.sliding_window) visible[i][j] = true;
      }
    }
  }
  const at::Tensor scores = at::matmul(q, k.transpose(-1, -2)) / std::sqrt(static_cast<double>(d));
  const at::Tensor p = scores.masked_fill(visible.logical_not(), -INFINITY).softmax(-1);
  at::Tensor y = at::matmul(at::matmul(p, v).transpose(0, 1).reshape({t, nq * d}), w.output.t());
  return w.output_bias.defined() ? y + w.output_bias : y;
}

struct Case {
  std::vector<int64_t> lengths;
  int64_t num_heads, num_key_value_heads, head_dim, window;
  bool qk_norm, bias;
};

class Attention : public ::testing::TestWithParam<Case> {};

}  // namespace

TEST_P(Attention, MatchesAutogradOfThePlainForm) {
  const Case& p = GetParam();
  AttentionConfig config{20, p.num_heads, p.num_key_value_heads, p.head_dim, p.bias, p.bias, p.qk_norm, 1e-6, p.window};
  const TokenBatch batch = documents(p.lengths);
  const int64_t tokens = batch.document_bounds.back();
  RopeFrequencies frequencies;
  for (int64_t i = 0; i < p.head_dim / 2; ++i)
    frequencies.inverse_frequencies.push_back(std::pow(100.0F, -2.0F * i / p.head_dim));
  const RopeTables rope = rope_tables(frequencies, batch.position_ids, at::kFloat);

  AttentionTensors w{leaf(random({config.qkv_size(), 20}, 1, 0.3)),        {}, {}, {},
                     leaf(random({20, p.num_heads * p.head_dim}, 2, 0.3)), {}};
  if (p.bias) w.qkv_bias = leaf(random({config.qkv_size()}, 3)), w.output_bias = leaf(random({20}, 4));
  if (p.qk_norm) w.q_norm = leaf(random({p.head_dim}, 5)), w.k_norm = leaf(random({p.head_dim}, 6));
  const at::Tensor x = leaf(random({tokens, 20}, 7)), dy = random({tokens, 20}, 8);
  const at::Tensor y = plain_attention(x, config, w, rope, batch);
  std::vector<at::Tensor> inputs = {x, w.qkv, w.output};
  if (p.bias) inputs.insert(inputs.end(), {w.qkv_bias, w.output_bias});
  if (p.qk_norm) inputs.insert(inputs.end(), {w.q_norm, w.k_norm});
  const auto expected = reference_gradients(y, dy, inputs);

  const auto detached = [](const at::Tensor& t) { return t.defined() ? t.detach() : t; };
  const auto zeros = [](const at::Tensor& t) { return t.defined() ? at::zeros_like(t.detach()) : t; };
  const AttentionTensors plain{detached(w.qkv),    detached(w.qkv_bias), detached(w.q_norm),
                               detached(w.k_norm), detached(w.output),   detached(w.output_bias)};
  const AttentionTensors grads{zeros(w.qkv),    zeros(w.qkv_bias), zeros(w.q_norm),
                               zeros(w.k_norm), zeros(w.output),   zeros(w.output_bias)};
  const AttentionForward forward = attention_forward(x.detach(), config, plain, rope, batch);
  EXPECT_LT(relative_error(forward.y, y), kTolerance);
  const at::Tensor dx = attention_backward(dy, x.detach(), forward.saved, config, plain, grads, rope, batch);
  EXPECT_LT(relative_error(dx, expected[0]), kTolerance);
  EXPECT_LT(relative_error(grads.qkv, expected[1]), kTolerance);
  EXPECT_LT(relative_error(grads.output, expected[2]), kTolerance);
  std::size_t next = 3;
  if (p.bias) {
    EXPECT_LT(relative_error(grads.qkv_bias, expected[next++]), kTolerance);
    EXPECT_LT(relative_error(grads.output_bias, expected[next++]), kTolerance);
  }
  if (p.qk_norm) {
    EXPECT_LT(relative_error(grads.q_norm, expected[next++]), kTolerance);
    EXPECT_LT(relative_error(grads.k_norm, expected[next++]), kTolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Attention,
                         ::testing::Values(Case{{7}, 4, 2, 8, 0, true, false}, Case{{1, 5, 3}, 4, 4, 6, 0, false, true},
                                           Case{{9, 2}, 6, 1, 10, 3, true, true}, Case{{40, 33}, 2, 1, 16, 0, false, false},
                                           Case{{}, 4, 2, 8, 0, true, false}));

TEST(AttentionCore, ReferenceEqualsFastPath) {
  const TokenBatch batch = documents({5, 1, 20});
  const at::Tensor q = random({26, 4, 8}, 1), k = random({26, 2, 8}, 2), v = random({26, 2, 8}, 3),
                   dout = random({26, 4, 8}, 4);
  for (const int64_t window : {0, 4}) {
    const AttentionCoreConfig config{0.35, window};
    const AttentionCoreSaved fast = attention_core_forward(q, k, v, batch, config);
    EXPECT_LT(relative_error(fast.out, attention_core_reference_forward(q, k, v, batch, config).out), kTolerance);
    const AttentionCoreGrads a = attention_core_backward(dout, q, k, v, fast, batch, config);
    const AttentionCoreGrads b = attention_core_reference_backward(dout, q, k, v, batch, config);
    EXPECT_LT(relative_error(a.dq, b.dq), kTolerance);
    EXPECT_LT(relative_error(a.dk, b.dk), kTolerance);
    EXPECT_LT(relative_error(a.dv, b.dv), kTolerance);
  }
}

// Fault kind "packed documents see each other": what stands before a document must not change it.
TEST(AttentionCore, PackedDocumentsDoNotSeeEachOther) {
  const TokenBatch batch = documents({6, 9});
  at::Tensor q = random({15, 2, 8}, 1), k = random({15, 2, 8}, 2), v = random({15, 2, 8}, 3);
  const at::Tensor before = attention_core_forward(q, k, v, batch, {0.3, 0}).out.narrow(0, 6, 9).clone();
  k.narrow(0, 0, 6).fill_(3.0);
  v.narrow(0, 0, 6).fill_(-5.0);
  EXPECT_TRUE(at::equal(attention_core_forward(q, k, v, batch, {0.3, 0}).out.narrow(0, 6, 9), before));
}

}  // namespace headrace
