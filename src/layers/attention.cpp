#include "layers/attention.h"

#include <cmath>

#include "layers/linear.h"
#include "layers/qk_norm_rope.h"

namespace headrace {
namespace {

AttentionCoreConfig core_config(const AttentionConfig& config) {
  return {1.0 / std::sqrt(static_cast<double>(config.head_dim)), config.sliding_window, config.deterministic};
}

}  // namespace

AttentionForward attention_forward(const at::Tensor& x, const AttentionConfig& config, const AttentionTensors& weights,
                                   const RopeTables& rope, const TokenBatch& batch) {
  AttentionSaved saved;
  saved.qkv = linear_forward(x, weights.qkv, weights.qkv_bias);
  const Heads heads = qk_norm_rope_forward(saved.qkv, config, weights, rope);
  saved.core = attention_core_forward(heads.q, heads.k, heads.v, batch, core_config(config));
  const at::Tensor merged = saved.core.out.reshape({x.size(0), config.num_heads * config.head_dim});
  return {linear_forward(merged, weights.output, weights.output_bias), std::move(saved)};
}

at::Tensor attention_backward(const at::Tensor& dy, const at::Tensor& x, const AttentionSaved& saved,
                              const AttentionConfig& config, const AttentionTensors& weights, const AttentionTensors& grads,
                              const RopeTables& rope, const TokenBatch& batch) {
  const int64_t tokens = x.size(0);
  const at::Tensor merged = saved.core.out.reshape({tokens, config.num_heads * config.head_dim});
  const at::Tensor dmerged = linear_backward(dy, merged, weights.output, grads.output, grads.output_bias);
  const Heads heads = qk_norm_rope_forward(saved.qkv, config, weights, rope);  // again: cheaper than keeping them
  AttentionCoreGrads core = attention_core_backward(dmerged.view({tokens, config.num_heads, config.head_dim}), heads.q, heads.k,
                                                    heads.v, saved.core, batch, core_config(config));
  const Heads dheads{std::move(core.dq), std::move(core.dk), std::move(core.dv)};
  const at::Tensor dqkv = qk_norm_rope_backward(dheads, saved.qkv, config, weights, grads, rope);
  return linear_backward(dqkv, x, weights.qkv, grads.qkv, grads.qkv_bias);
}

}  // namespace headrace
