// The softmax(q k^T) v part of attention over packed documents; a query never sees another document.
// Flow: q, k, v with positions applied -> [attention core] -> output projection. Paths, chosen by device and dtype:
//   CPU                      ATen's flash attention for CPU, one call a document
//   CUDA, bfloat16/float16   all documents equally long and no window: cuDNN's attention (the fastest);
//                            else ATen's variable-length flash attention (FA2); one call in all
//   else                     the plain reference below, one document at a time
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "headrace/token_batch.h"

namespace headrace {

struct AttentionCoreConfig {
  double scale = 1.0;
  int64_t sliding_window = 0;  // keys a query sees including its own; 0 = no window
  bool deterministic = false;  // cuDNN's and FA2's usual backwards add in no fixed order: take FA2's deterministic one
};

/// Kept for the backward beside q, k and v: the output and 4 bytes a token and head.
struct AttentionCoreSaved {
  at::Tensor out;                       // [num_tokens, num_heads, head_dim]
  std::vector<at::Tensor> log_sum_exp;  // CPU: one [1, num_heads, length] a document; flash: one tensor
  at::Tensor rng_state, unused;         // what flash's backward wants back
};

/// q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_key_value_heads, head_dim]; query head h reads key/value head
/// h / (num_heads / num_key_value_heads). Causal within each document of `batch`. Returns out in the saved set.
AttentionCoreSaved attention_core_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                          const TokenBatch& batch, const AttentionCoreConfig& config);

struct AttentionCoreGrads {
  at::Tensor dq, dk, dv;
};
AttentionCoreGrads attention_core_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const AttentionCoreSaved& saved, const TokenBatch& batch,
                                           const AttentionCoreConfig& config);

/// The plain form in one dtype, for tests and for what no fast path takes: same arguments and result.
AttentionCoreSaved attention_core_reference_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const TokenBatch& batch, const AttentionCoreConfig& config);
AttentionCoreGrads attention_core_reference_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v, const TokenBatch& batch,
                                                     const AttentionCoreConfig& config);

}  // namespace headrace
