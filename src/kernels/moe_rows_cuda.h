// CUDA kernels over the rows of the MoE block, bfloat16: gather, combine, SwiGLU and its backward with the router's gradient.
// Tensor side and meaning: layers/dispatch.h, layers/mlp.h, layers/moe.h. Sizes are multiples of 8, pointers 16-byte aligned.
#pragma once

#include <cstdint>

namespace headrace {

/// out[r] = x[row_ids[r]]. x [*, size], row_ids [rows] int64. 2 * size * (1 to 2) bytes a row.
void gather_rows_cuda(const void* x, const int64_t* row_ids, int64_t rows, int64_t size, void* out, void* stream);

/// out[t] = sum over j of weights[t, j] * rows[row_of_pair[t, j]], in float32, j ascending; weights null: ones.
void combine_rows_cuda(const void* rows, const float* weights, const int64_t* row_of_pair, int64_t num_tokens, int64_t top_k,
                       int64_t size, void* out, void* stream);

/// activation [rows, width] = silu(gate) * up of gate_up [rows, 2 * width].
void swiglu_cuda(const void* gate_up, int64_t rows, int64_t width, void* activation, void* stream);

/// For each row r with weight s = pair_weights[pair_of_row[r]] and a = silu(gate) * up:
///   dpair_weights[pair_of_row[r]] = sum over the width of dactivation * a     (the router's gradient)
///   scaled_activation[r] = s * a                                            (for the down projection's weight gradient)
///   dgate_up[r] = gradient of gate_up for s * dactivation
/// Null pair_weights: s = 1, and neither dpair_weights nor scaled_activation is written (the dense MLP). dactivation [rows,
/// width]. 2 * width * 6 bytes a row.
void swiglu_backward_cuda(const void* dactivation, const void* gate_up, const float* pair_weights, const int64_t* pair_of_row,
                          int64_t rows, int64_t width, void* dgate_up, void* scaled_activation, float* dpair_weights,
                          void* stream);

}  // namespace headrace
