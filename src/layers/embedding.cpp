#include "layers/embedding.h"

#include <ATen/TensorOperators.h>

#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/sort.h>

#include "kernels/cuda_launch.h"
#include "kernels/embedding_cuda.h"

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
#ifdef HEADRACE_HAS_CUDA
  if (fits_bf16_kernels(dy) && fits_bf16_kernels(weight_grad)) {
    const auto [sorted_ids, positions] = at::sort(input_ids, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    embedding_backward_cuda(dy.const_data_ptr(), sorted_ids.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(),
                            dy.size(0), dy.size(1), padding_idx, weight_grad.data_ptr(), current_stream(dy));
    return;
  }
#endif
  // On a GPU index_add_ sums in no fixed order; this one sorts.
  weight_grad.add_(at::embedding_dense_backward(dy, input_ids, weight_grad.size(0), padding_idx, /*scale_grad_by_freq=*/false));
}

}  // namespace headrace
