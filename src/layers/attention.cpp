#include "layers/attention.h"

#include <ATen/ops/cat.h>

#include <cmath>

#include "layers/linear.h"
#include "layers/norm.h"

namespace headrace {
namespace {

// The three parts of a packed projection [num_tokens, qkv_size] as heads; views.
struct Heads {
  at::Tensor q, k, v;  // [num_tokens, heads, head_dim]
};

Heads split_heads(const at::Tensor& qkv, const AttentionConfig& config) {
  const int64_t tokens = qkv.size(0);
  const int64_t nq = config.num_heads, nkv = config.num_key_value_heads;
  const at::Tensor heads = qkv.view({tokens, nq + 2 * nkv, config.head_dim});
  return {heads.narrow(1, 0, nq), heads.narrow(1, nq, nkv), heads.narrow(1, nq + nkv, nkv)};
}

AttentionCoreConfig core_config(const AttentionConfig& config) {
  return {1.0 / std::sqrt(static_cast<double>(config.head_dim)), config.sliding_window};
}

// Norm and rotation of one head group, with what its backward needs; recomputed there from the saved projection.
struct Positioned {
  at::Tensor heads;
  NormSaved norm;
};

Positioned position_heads(const at::Tensor& raw, const at::Tensor& norm_weight, const AttentionConfig& config,
                          const RopeTables& rope) {
  if (!config.qk_norm) return {rope_forward(raw, rope), {}};
  NormForward normed = rms_norm_forward(raw, norm_weight, config.rms_norm_eps);
  return {rope_forward(normed.y, rope), std::move(normed.saved)};
}

at::Tensor position_heads_backward(const at::Tensor& grad, const at::Tensor& raw, const Positioned& positioned,
                                   const at::Tensor& norm_weight, const at::Tensor& norm_grad, const AttentionConfig& config,
                                   const RopeTables& rope) {
  const at::Tensor unrotated = rope_backward(grad, rope);
  return config.qk_norm ? rms_norm_backward(unrotated, raw, norm_weight, positioned.norm, norm_grad) : unrotated;
}

}  // namespace

AttentionForward attention_forward(const at::Tensor& x, const AttentionConfig& config, const AttentionTensors& weights,
                                   const RopeTables& rope, const TokenBatch& batch) {
  AttentionSaved saved;
  saved.qkv = linear_forward(x, weights.qkv, weights.qkv_bias);
  const Heads raw = split_heads(saved.qkv, config);
  const at::Tensor q = position_heads(raw.q, weights.q_norm, config, rope).heads;
  const at::Tensor k = position_heads(raw.k, weights.k_norm, config, rope).heads;
  saved.core = attention_core_forward(q, k, raw.v, batch, core_config(config));
  const at::Tensor merged = saved.core.out.reshape({x.size(0), config.num_heads * config.head_dim});
  return {linear_forward(merged, weights.output, weights.output_bias), std::move(saved)};
}

at::Tensor attention_backward(const at::Tensor& dy, const at::Tensor& x, const AttentionSaved& saved,
                              const AttentionConfig& config, const AttentionTensors& weights, const AttentionTensors& grads,
                              const RopeTables& rope, const TokenBatch& batch) {
  const int64_t tokens = x.size(0);
  const at::Tensor merged = saved.core.out.reshape({tokens, config.num_heads * config.head_dim});
  const at::Tensor dmerged = linear_backward(dy, merged, weights.output, grads.output, grads.output_bias);

  const Heads raw = split_heads(saved.qkv, config);
  const Positioned q = position_heads(raw.q, weights.q_norm, config, rope);
  const Positioned k = position_heads(raw.k, weights.k_norm, config, rope);
  const AttentionCoreGrads core = attention_core_backward(dmerged.view({tokens, config.num_heads, config.head_dim}), q.heads,
                                                          k.heads, raw.v, saved.core, batch, core_config(config));
  const at::Tensor dq = position_heads_backward(core.dq, raw.q, q, weights.q_norm, grads.q_norm, config, rope);
  const at::Tensor dk = position_heads_backward(core.dk, raw.k, k, weights.k_norm, grads.k_norm, config, rope);
  const at::Tensor dqkv = at::cat({dq, dk, core.dv}, 1).view({tokens, config.qkv_size()});
  return linear_backward(dqkv, x, weights.qkv, grads.qkv, grads.qkv_bias);
}

}  // namespace headrace
