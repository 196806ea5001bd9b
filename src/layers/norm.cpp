#include "layers/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/cuda_launch.h"
#include "kernels/rms_norm_cuda.h"

namespace headrace {
namespace {

[[maybe_unused]] bool takes_kernel(const at::Tensor& x, const at::Tensor& weight) {
  return fits_bf16_kernels(x) && fits_bf16_kernels(weight) && x.size(-1) <= kMaxNormSize;
}

[[maybe_unused]] at::Tensor empty_rstd(const at::Tensor& x) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = 1;
  return at::empty(shape, x.options().dtype(at::kFloat));
}

#ifdef HEADRACE_HAS_CUDA
const void* pointer_or_null(const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
#endif

}  // namespace

NormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& weight, double eps) {
  AddNormForward result = add_rms_norm_forward(x, {}, weight, eps);
  return {std::move(result.y), std::move(result.saved)};
}

AddNormForward add_rms_norm_forward(const at::Tensor& residual, const at::Tensor& delta, const at::Tensor& weight, double eps) {
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(residual, weight) && (!delta.defined() || fits_bf16_kernels(delta))) {
    const int64_t size = residual.size(-1);
    AddNormForward result{
        delta.defined() ? at::empty_like(residual) : residual, at::empty_like(residual), {empty_rstd(residual)}};
    add_rms_norm_cuda(residual.const_data_ptr(), pointer_or_null(delta), weight.const_data_ptr(), static_cast<float>(eps),
                      residual.numel() / size, size, result.sum.data_ptr(), result.y.data_ptr(),
                      result.saved.rstd.data_ptr<float>(), current_stream(residual));
    return result;
  }
#endif
  at::Tensor sum = delta.defined() ? residual + delta : residual;
  const at::Tensor u = sum.to(at::kFloat);
  NormSaved saved{u.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_()};
  at::Tensor y = (u * saved.rstd).to(sum.scalar_type()) * weight;
  return {std::move(sum), std::move(y), std::move(saved)};
}

at::Tensor rms_norm_apply(const at::Tensor& x, const at::Tensor& weight, const NormSaved& saved) {
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(x, weight)) {
    at::Tensor y = at::empty_like(x);
    rms_norm_apply_cuda(x.const_data_ptr(), weight.const_data_ptr(), saved.rstd.const_data_ptr<float>(), x.numel() / x.size(-1),
                        x.size(-1), y.data_ptr(), current_stream(x));
    return y;
  }
#endif
  return (x.to(at::kFloat) * saved.rstd).to(x.scalar_type()) * weight;
}

at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const NormSaved& saved,
                             const at::Tensor& weight_grad, const at::Tensor& dresidual) {
  const int64_t size = x.size(-1);
#ifdef HEADRACE_HAS_CUDA
  if (takes_kernel(x, weight) && fits_bf16_kernels(dy) && (!dresidual.defined() || fits_bf16_kernels(dresidual))) {
    const int64_t rows = x.numel() / size;
    at::Tensor dx = at::empty_like(x);
    const at::Tensor partial = at::empty({rms_norm_backward_partials(rows), size}, x.options().dtype(at::kFloat));
    rms_norm_backward_cuda(dy.const_data_ptr(), x.const_data_ptr(), weight.const_data_ptr(), saved.rstd.const_data_ptr<float>(),
                           pointer_or_null(dresidual), rows, size, dx.data_ptr(), partial.data_ptr<float>(), current_stream(x));
    if (weight_grad.defined()) weight_grad.add_(partial.sum(0));
    return dx;
  }
#endif
  const at::Tensor normed = x.to(at::kFloat) * saved.rstd;
  if (weight_grad.defined()) weight_grad.add_((dy.to(at::kFloat) * normed).reshape({-1, size}).sum(0));
  const at::Tensor g = (dy * weight).to(at::kFloat);
  const at::Tensor dot = (g * normed).mean(-1, /*keepdim=*/true);
  const at::Tensor dx = (g - normed * dot).mul_(saved.rstd).to(x.scalar_type());
  return dresidual.defined() ? dresidual + dx : dx;
}

}  // namespace headrace
