// CUDA kernel: cross-entropy of bfloat16 logits, whose gradient overwrites them. Tensor side: layers/linear_cross_entropy.h.
#pragma once

#include <cstdint>

namespace headrace {

/// logits [rows, vocab_size] bfloat16, vocab_size a multiple of 8; targets [rows] int64 in [0, vocab_size). Writes loss [rows]
/// float = log_sum_exp - logit of the target (float32 arithmetic) and, with `with_gradient`, puts (softmax - onehot) *
/// grad_scale in place of the logits. A block a row; the second read of a row mostly comes from the L2 cache. Bytes a row: 2 *
/// vocab_size * 3.
void cross_entropy_cuda(void* logits, const int64_t* targets, int64_t rows, int64_t vocab_size, float grad_scale,
                        bool with_gradient, float* loss, void* stream);

}  // namespace headrace
