#include "layers/embedding.h"

#include <ATen/TensorOperators.h>

#include <ATen/ops/embedding_dense_backward.h>

namespace headrace {

at::Tensor embedding_forward(const at::Tensor& input_ids, const at::Tensor& weight) {
  return weight.index_select(0, input_ids);
}

void embedding_backward(const at::Tensor& dy, const at::Tensor& input_ids, const at::Tensor& weight_grad, int64_t padding_idx) {
  if (!weight_grad.defined() || input_ids.numel() == 0) return;
  if (weight_grad.is_cpu()) {
    // Touches only the rows that occur; embedding_dense_backward would build a whole second gradient.
    const at::Tensor rows = padding_idx >= 0 ? dy * input_ids.ne(padding_idx).unsqueeze(1) : dy;
    weight_grad.index_add_(0, input_ids, rows);
    return;
  }
  // On a GPU index_add_ sums in no fixed order; this one sorts.
  weight_grad.add_(at::embedding_dense_backward(dy, input_ids, weight_grad.size(0), padding_idx, /*scale_grad_by_freq=*/false));
}

}  // namespace headrace
