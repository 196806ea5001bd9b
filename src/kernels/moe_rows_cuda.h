// CUDA kernels over the rows of the MoE block, bfloat16: dispatch, combine, SwiGLU and its backward with the router's gradient.
// Tensor side and meaning: layers/dispatch.h, layers/mlp.h, layers/moe.h. Sizes are multiples of 8, pointers 16-byte aligned.
#pragma once

#include <cstdint>

namespace headrace {

/// rows[row_of_pair[t, j]] = x[t] for every choice j. x [num_tokens, size], row_of_pair [num_tokens, top_k] int64, rows
/// [num_tokens * top_k, size]. 2 * size * (top_k + 1) bytes a token.
void dispatch_rows_cuda(const void* x, const int64_t* row_of_pair, int64_t num_tokens, int64_t top_k, int64_t size, void* rows,
                        void* stream);

/// out[t] = addend[t] + sum over j of weights[t, j] * rows[row_of_pair[t, j]], in float32, j ascending, rounded once; weights
/// null: ones; addend null: 0. 2 * size * (top_k + 1 or 2) bytes a token.
void combine_rows_cuda(const void* rows, const float* weights, const int64_t* row_of_pair, const void* addend,
                       int64_t num_tokens, int64_t top_k, int64_t size, void* out, void* stream);

/// activation [rows, width] = silu(gate) * up of gate_up [rows, 2 * width].
void swiglu_cuda(const void* gate_up, int64_t rows, int64_t width, void* activation, void* stream);

/// For each row r with weight s = pair_weights[pair_of_row[r]] and a = silu(gate) * up:
///   dpair_weights[pair_of_row[r]] = sum over the width of dactivation * a     (the router's gradient)
///   scaled_activation[r] = s * a                                            (for the down projection's weight gradient)
///   dgate_up[r] = gradient of gate_up for s * dactivation
/// Null pair_weights: s = 1, and neither dpair_weights nor scaled_activation is written (the dense MLP). dactivation [rows,
/// width]. dgate_up may be gate_up, and scaled_activation may be dactivation. 2 * width * 6 bytes a row.
void swiglu_backward_cuda(const void* dactivation, const void* gate_up, const float* pair_weights, const int64_t* pair_of_row,
                          int64_t rows, int64_t width, void* dgate_up, void* scaled_activation, float* dpair_weights,
                          void* stream);

}  // namespace headrace
