// CUDA kernel of the embedding's backward, bfloat16. Tensor side and meaning: layers/embedding.h.
#pragma once

#include <cstdint>

namespace headrace {

/// weight_grad[id] += sum of dy[t] over the tokens t with that id, in float32 and in the order given, rounded once.
/// sorted_ids [num_tokens] ascending, positions [num_tokens]: the token of each; dy [num_tokens, size], size a multiple of 8.
/// Rows of padding_idx (-1: none) and rows whose id does not occur are not touched.
void embedding_backward_cuda(const void* dy, const int64_t* sorted_ids, const int64_t* positions, int64_t num_tokens,
                             int64_t size, int64_t padding_idx, void* weight_grad, void* stream);

}  // namespace headrace
