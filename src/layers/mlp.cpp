#include "layers/mlp.h"

#include "layers/linear.h"
#include "layers/swiglu.h"

namespace headrace {

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
