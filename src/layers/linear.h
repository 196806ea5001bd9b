// Linear: y = x W^T (+ b) and its gradients. Every projection of every block goes through here.
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

/// x [num_tokens, in], weight [out, in], bias [out] or undefined; all of one dtype. Returns [num_tokens, out].
at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// Adds the gradients of weight and bias to weight_grad and bias_grad (an undefined one is not wanted) and returns the
/// gradient of x, [num_tokens, in]. With `overwrite`, both gradients are stored, not added.
at::Tensor linear_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& weight_grad,
                           const at::Tensor& bias_grad, bool overwrite = false);

}  // namespace headrace
