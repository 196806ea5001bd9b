#include "layers/linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace headrace {

at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::addmm(bias, x, weight.t()) : at::mm(x, weight.t());
}

at::Tensor linear_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& weight_grad,
                           const at::Tensor& bias_grad, bool overwrite) {
  const double keep = overwrite ? 0.0 : 1.0;  // a factor 0 leaves what was there unread, NaN included
  if (weight_grad.defined()) weight_grad.addmm_(dy.t(), x, keep);
  if (bias_grad.defined() && overwrite) bias_grad.copy_(dy.sum(0));
  if (bias_grad.defined() && !overwrite) bias_grad.add_(dy.sum(0));
  return at::mm(dy, weight);
}

}  // namespace headrace
