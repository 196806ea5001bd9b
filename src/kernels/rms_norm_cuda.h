// CUDA kernels of RMSNorm for bfloat16 rows, raw pointers and a stream (a cudaStream_t). Tensor side and meaning:
// layers/norm.h. Every pointer is 16-byte aligned, rows are contiguous, size is a multiple of 8 and at most kMaxNormSize.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int64_t kMaxNormSize = 8192;

/// sum = x + delta (delta null: sum is not written), rstd [rows] float, y = weight * bf16(sum * rstd).
/// Bytes a row: 2 * size * (2 to 4).
void add_rms_norm_cuda(const void* x, const void* delta, const void* weight, float eps, int64_t rows, int64_t size, void* sum,
                       void* y, float* rstd, void* stream);

/// y from x and rstd: 2 * size * 2 bytes a row.
void rms_norm_apply_cuda(const void* x, const void* weight, const float* rstd, int64_t rows, int64_t size, void* y,
                         void* stream);

/// Rows of partial weight gradients that rms_norm_backward_cuda writes.
int64_t rms_norm_backward_partials(int64_t rows);

/// dx = (dresidual or 0) + gradient through the norm; partial_weight_grad [partials, size] float, each row written whole: their
/// sum is the weight's gradient (no atomics: the same bits every time). 2 * size * 4 bytes a row.
void rms_norm_backward_cuda(const void* dy, const void* x, const void* weight, const float* rstd, const void* dresidual,
                            int64_t rows, int64_t size, void* dx, float* partial_weight_grad, void* stream);

}  // namespace headrace
