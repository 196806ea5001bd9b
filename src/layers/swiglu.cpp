#include "layers/swiglu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include "kernels/cuda_launch.h"
#include "kernels/moe_rows_cuda.h"

namespace headrace {
namespace {

[[maybe_unused]] bool takes_kernel(const at::Tensor& gate_up) {
  return fits_bf16_kernels(gate_up) && gate_up.size(1) % 16 == 0;
}

[[maybe_unused]] at::Tensor empty_rows(const at::Tensor& like, int64_t width) {
  return at::empty({like.size(0), width}, like.options());
}

}  // namespace

at::Tensor swiglu_forward(const at::Tensor& gate_up) {
  const int64_t width = gate_up.size(1) / 2;
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(gate_up)) {
    at::Tensor activation = empty_rows(gate_up, width);
    swiglu_cuda(gate_up.const_data_ptr(), gate_up.size(0), width, activation.data_ptr(), current_stream(gate_up));
    return activation;
  }
#endif
  return at::silu(gate_up.narrow(1, 0, width)).mul_(gate_up.narrow(1, width, width));
}

at::Tensor swiglu_backward(const at::Tensor& da, const at::Tensor& gate_up) {
  const int64_t width = gate_up.size(1) / 2;
  at::Tensor grad = at::empty_like(gate_up, gate_up.options(), at::MemoryFormat::Contiguous);
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(gate_up) && fits_bf16_kernels(da)) {
    swiglu_backward_cuda(da.const_data_ptr(), gate_up.const_data_ptr(), nullptr, nullptr, gate_up.size(0), width,
                         grad.data_ptr(), nullptr, nullptr, current_stream(gate_up));
    return grad;
  }
#endif
  const at::Tensor gate = gate_up.narrow(1, 0, width), up = gate_up.narrow(1, width, width);
  grad.narrow(1, 0, width).copy_(at::silu_backward(da * up, gate));
  grad.narrow(1, width, width).copy_(at::silu(gate).mul_(da));
  return grad;
}

WeightedSwigluBackward swiglu_backward_weighted(at::Tensor dactivation, at::Tensor gate_up, const at::Tensor& weights,
                                                const DispatchPlan& plan) {
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(gate_up) && fits_bf16_kernels(dactivation)) {
    const int64_t width = gate_up.size(1) / 2;
    at::Tensor dweights = at::empty_like(weights);
    swiglu_backward_cuda(dactivation.const_data_ptr(), gate_up.const_data_ptr(), weights.const_data_ptr<float>(),
                         plan.pair_of_row.const_data_ptr<int64_t>(), gate_up.size(0), width, gate_up.data_ptr(),
                         dactivation.data_ptr(), dweights.data_ptr<float>(), current_stream(gate_up));
    return {std::move(gate_up), std::move(dactivation), std::move(dweights)};
  }
#endif
  const at::Tensor activation = swiglu_forward(gate_up);
  const at::Tensor dweight_rows = (dactivation.to(at::kFloat) * activation).sum(-1);  // one float a row, then in pair order
  const at::Tensor weight_rows = weights.reshape({-1}).index_select(0, plan.pair_of_row).unsqueeze(1).to(gate_up.scalar_type());
  return {swiglu_backward(dactivation * weight_rows, gate_up), activation * weight_rows,
          dweight_rows.index_select(0, plan.row_of_pair.reshape({-1})).view(plan.row_of_pair.sizes())};
}

}  // namespace headrace
