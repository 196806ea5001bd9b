// CUDA kernels: per-head RMSNorm (optional) and RoPE of the query and key heads in a packed bfloat16 projection, and their
// gradient. Tensor side: layers/qk_norm_rope.h. head_dim is 64, 128 or 256 and rotated whole.
#pragma once

#include <cstdint>

namespace headrace {

struct QkShape {
  int64_t num_tokens = 0;
  int num_heads = 0, num_key_value_heads = 0, head_dim = 0;
  float eps = 0;
};

/// qkv [num_tokens, (num_heads + 2 * num_key_value_heads) * head_dim]; cos, sin [num_tokens, head_dim / 2]; q_weight, k_weight
/// [head_dim] or null (no norm). Writes q [num_tokens, num_heads, head_dim] and k [num_tokens, num_key_value_heads, head_dim].
void qk_norm_rope_cuda(const QkShape& shape, const void* qkv, const void* q_weight, const void* k_weight, const void* cos,
                       const void* sin, void* q, void* k, void* stream);

/// Rows of partial weight gradients.
int64_t qk_norm_rope_partials(const QkShape& shape);

/// dq, dk, dv (contiguous, as q, k and v) -> dqkv; partial [partials, 2, head_dim] float: sums are the gradients of q_weight
/// and k_weight (null weights: may be null, not written).
void qk_norm_rope_backward_cuda(const QkShape& shape, const void* dq, const void* dk, const void* dv, const void* qkv,
                                const void* q_weight, const void* k_weight, const void* cos, const void* sin, void* dqkv,
                                float* partial, void* stream);

}  // namespace headrace
