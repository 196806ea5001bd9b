// Attention block: normed input -> q|k|v in one GEMM -> optional per-head q/k norm -> RoPE -> attention core -> output
// projection. Reference: transformers Qwen3MoeAttention, MixtralAttention, LlamaAttention.
#pragma once

#include <ATen/core/Tensor.h>

#include "headrace/token_batch.h"
#include "layers/attention_config.h"
#include "layers/attention_core.h"
#include "layers/rope.h"

namespace headrace {

/// Kept: the projections before norm and RoPE, the core's output and log-sum-exp. In bytes a token (bf16):
/// 2 * qkv_size + 2 * num_heads * head_dim + 4 * num_heads. The block's input is the caller's to keep or to recompute.
struct AttentionSaved {
  at::Tensor qkv;  // [num_tokens, qkv_size]
  AttentionCoreSaved core;
};

struct AttentionForward {
  at::Tensor y;  // [num_tokens, hidden_size]
  AttentionSaved saved;
};

/// x [num_tokens, hidden_size], already normed.
AttentionForward attention_forward(const at::Tensor& x, const AttentionConfig& config, const AttentionTensors& weights,
                                   const RopeTables& rope, const TokenBatch& batch);

/// Adds to grads and returns dx. `x` is the forward's input.
at::Tensor attention_backward(const at::Tensor& dy, const at::Tensor& x, const AttentionSaved& saved,
                              const AttentionConfig& config, const AttentionTensors& weights, const AttentionTensors& grads,
                              const RopeTables& rope, const TokenBatch& batch);

}  // namespace headrace
