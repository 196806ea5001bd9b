// Attention block: normed input -> q|k|v in one GEMM -> optional per-head q/k norm -> RoPE -> attention core -> output projection.
// Reference: transformers Qwen3MoeAttention, MixtralAttention, LlamaAttention.
#pragma once

#include <ATen/core/Tensor.h>

#include "headrace/token_batch.h"
#include "layers/attention_core.h"
#include "layers/rope.h"

namespace headrace {

struct AttentionConfig {
  int64_t hidden_size = 0, num_heads = 0, num_key_value_heads = 0, head_dim = 0;
  bool qkv_bias = false, output_bias = false;
  bool qk_norm = false;           // RMSNorm over head_dim on every query and key head, before RoPE
  double rms_norm_eps = 1e-6;
  int64_t sliding_window = 0;     // 0 = none
  int64_t qkv_size() const { return (num_heads + 2 * num_key_value_heads) * head_dim; }
};

/// Weights, or their gradients: same names and shapes. Undefined where the model has none (or the gradient is not wanted).
struct AttentionTensors {
  at::Tensor qkv;            // [(num_heads + 2 * num_key_value_heads) * head_dim, hidden_size]: q_proj, k_proj, v_proj rows
  at::Tensor qkv_bias;       // [(num_heads + 2 * num_key_value_heads) * head_dim]
  at::Tensor q_norm, k_norm; // [head_dim]
  at::Tensor output;         // o_proj [hidden_size, num_heads * head_dim]
  at::Tensor output_bias;    // [hidden_size]
};

/// Kept: the projections before norm and RoPE, the core's output and log-sum-exp. In bytes a token (bf16):
/// 2 * qkv_size + 2 * num_heads * head_dim + 4 * num_heads. The block's input is the caller's to keep or to recompute.
struct AttentionSaved {
  at::Tensor qkv;            // [num_tokens, qkv_size]
  AttentionCoreSaved core;
};

struct AttentionForward {
  at::Tensor y;              // [num_tokens, hidden_size]
  AttentionSaved saved;
};

/// x [num_tokens, hidden_size], already normed.
AttentionForward attention_forward(const at::Tensor& x, const AttentionConfig& config, const AttentionTensors& weights,
                                   const RopeTables& rope, const TokenBatch& batch);

/// Adds to grads and returns dx. `x` is the forward's input.
at::Tensor attention_backward(const at::Tensor& dy, const at::Tensor& x, const AttentionSaved& saved, const AttentionConfig& config,
                              const AttentionTensors& weights, const AttentionTensors& grads, const RopeTables& rope,
                              const TokenBatch& batch);

}  // namespace headrace
