#include "layers/norm.h"

#include <ATen/TensorOperators.h>

#include <vector>

namespace headrace {

NormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor u = x.to(at::kFloat);
  NormSaved saved{u.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_()};
  return {(u * saved.rstd).to(x.scalar_type()) * weight, std::move(saved)};
}

at::Tensor rms_norm_apply(const at::Tensor& x, const at::Tensor& weight, const NormSaved& saved) {
  return (x.to(at::kFloat) * saved.rstd).to(x.scalar_type()) * weight;
}

at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const NormSaved& saved,
                             const at::Tensor& weight_grad) {
  const at::Tensor normed = x.to(at::kFloat) * saved.rstd;
  if (weight_grad.defined()) {
    const int64_t n = x.size(-1);
    const at::Tensor product = dy.to(at::kFloat) * normed;
    weight_grad.add_(product.reshape({-1, n}).sum(0));
  }
  const at::Tensor g = (dy * weight).to(at::kFloat);
  const at::Tensor dot = (g * normed).mean(-1, /*keepdim=*/true);
  return (g - normed * dot).mul_(saved.rstd).to(x.scalar_type());
}

AddNormForward add_rms_norm_forward(const at::Tensor& residual, const at::Tensor& delta, const at::Tensor& weight, double eps) {
  at::Tensor sum = delta.defined() ? residual + delta : residual;
  NormForward normed = rms_norm_forward(sum, weight, eps);
  return {std::move(sum), std::move(normed.y), std::move(normed.saved)};
}

}  // namespace headrace
