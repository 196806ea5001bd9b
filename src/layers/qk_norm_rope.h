// Per-head RMSNorm (where the family has it) and RoPE of the query and key heads of a packed projection, and their gradient.
// Flow: q|k|v projection -> [q/k norm + RoPE] -> attention core. bfloat16 on a GPU goes to one kernel each way
// (kernels/qk_norm_rope.cu), all else to the ATen form. Reference: transformers Qwen3MoeAttention.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/attention_config.h"
#include "layers/rope.h"

namespace headrace {

/// Heads of a packed projection. q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_key_value_heads, head_dim].
struct Heads {
  at::Tensor q, k, v;
};

/// qkv [num_tokens, qkv_size]. q and k are new tensors, v is a view of qkv.
Heads qk_norm_rope_forward(const at::Tensor& qkv, const AttentionConfig& config, const AttentionTensors& weights,
                           const RopeTables& rope);

/// Gradient of qkv for those of the heads; adds to grads.q_norm and grads.k_norm.
at::Tensor qk_norm_rope_backward(const Heads& dheads, const at::Tensor& qkv, const AttentionConfig& config,
                                 const AttentionTensors& weights, const AttentionTensors& grads, const RopeTables& rope);

}  // namespace headrace
