// Token embedding. Flow: input_ids -> [embedding] -> residual stream. Reference: torch.nn.Embedding with padding_idx.
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

/// weight [vocab_size, hidden_size], input_ids [num_tokens] int64; returns [num_tokens, hidden_size].
at::Tensor embedding_forward(const at::Tensor& input_ids, const at::Tensor& weight);

/// weight_grad[id] += dy of every token with that id, except for padding_idx (-1: none), whose row gets nothing from look-ups.
void embedding_backward(const at::Tensor& dy, const at::Tensor& input_ids, const at::Tensor& weight_grad, int64_t padding_idx);

}  // namespace headrace
