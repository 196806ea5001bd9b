// Sizes and weights of an attention block. Flow: DecoderSpec -> [AttentionConfig] -> attention.
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

struct AttentionConfig {
  int64_t hidden_size = 0, num_heads = 0, num_key_value_heads = 0, head_dim = 0;
  bool qkv_bias = false, output_bias = false;
  bool qk_norm = false;  // RMSNorm over head_dim on every query and key head, before RoPE
  double rms_norm_eps = 1e-6;
  int64_t sliding_window = 0;  // 0 = none
  bool deterministic = false;  // take a backward that gives the same bits every time, where the fastest does not
  int64_t qkv_size() const { return (num_heads + 2 * num_key_value_heads) * head_dim; }
};

/// Weights, or their gradients: same names and shapes. Undefined where the model has none (or the gradient is not wanted).
struct AttentionTensors {
  at::Tensor qkv;             // [(num_heads + 2 * num_key_value_heads) * head_dim, hidden_size]: q_proj, k_proj, v_proj rows
  at::Tensor qkv_bias;        // [(num_heads + 2 * num_key_value_heads) * head_dim]
  at::Tensor q_norm, k_norm;  // [head_dim]
  at::Tensor output;          // o_proj [hidden_size, num_heads * head_dim]
  at::Tensor output_bias;     // [hidden_size]
};

}  // namespace headrace
