#include "layers/mlp.h"

#include <ATen/TensorOperators.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include "layers/linear.h"

namespace headrace {

at::Tensor swiglu_forward(const at::Tensor& gate_up) {
  const int64_t width = gate_up.size(1) / 2;
  return at::silu(gate_up.narrow(1, 0, width)).mul_(gate_up.narrow(1, width, width));
}

at::Tensor swiglu_backward(const at::Tensor& da, const at::Tensor& gate_up) {
  const int64_t width = gate_up.size(1) / 2;
  const at::Tensor gate = gate_up.narrow(1, 0, width), up = gate_up.narrow(1, width, width);
  at::Tensor grad = at::empty_like(gate_up, gate_up.options(), at::MemoryFormat::Contiguous);
  grad.narrow(1, 0, width).copy_(at::silu_backward(da * up, gate));
  grad.narrow(1, width, width).copy_(at::silu(gate).mul_(da));
  return grad;
}

MlpForward mlp_forward(const at::Tensor& x, const MlpTensors& weights) {
  MlpSaved saved{linear_forward(x, weights.gate_up, weights.gate_up_bias)};
  at::Tensor y = linear_forward(swiglu_forward(saved.gate_up), weights.down, weights.down_bias);
  return {std::move(y), std::move(saved)};
}

at::Tensor mlp_backward(const at::Tensor& dy, const at::Tensor& x, const MlpSaved& saved, const MlpTensors& weights,
                        const MlpTensors& grads) {
  const at::Tensor da = linear_backward(dy, swiglu_forward(saved.gate_up), weights.down, grads.down, grads.down_bias);
  return linear_backward(swiglu_backward(da, saved.gate_up), x, weights.gate_up, grads.gate_up, grads.gate_up_bias);
}

}  // namespace headrace
