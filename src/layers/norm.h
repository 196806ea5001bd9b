// RMSNorm, alone and behind a residual add. Flow: residual stream -> [norm] -> attention or feed-forward.
// bfloat16 rows on a GPU go to one kernel each way (kernels/rms_norm.cu), all else to the ATen form.
// Reference: transformers Qwen3MoeRMSNorm: u = float32(x), u *= rsqrt(mean(u^2) + eps), y = weight * cast(u, dtype of x);
// the cast comes before the multiplication, so bfloat16 rounds twice.
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

/// What the backward needs beside x: one float per row. 4 bytes a token.
struct NormSaved {
  at::Tensor rstd;  // [..., 1] float32: rsqrt(mean(x^2) + eps)
};

struct NormForward {
  at::Tensor y;  // shape and dtype of x
  NormSaved saved;
};

/// Norm over the last dimension. x [..., n], weight [n] of the same dtype.
NormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& weight, double eps);

/// y again, from x and the saved rstd (bit-equal to the forward's y).
at::Tensor rms_norm_apply(const at::Tensor& x, const at::Tensor& weight, const NormSaved& saved);

/// Adds to weight_grad (undefined: not wanted) and returns dx, dtype of x. dresidual, where given, is added to dx: the gradient
/// that reaches x past the norm, on the residual stream.
at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const NormSaved& saved,
                             const at::Tensor& weight_grad, const at::Tensor& dresidual = {});

/// sum = residual + delta, y = rms_norm(sum): the pair between two blocks. `delta` undefined: sum is residual itself.
struct AddNormForward {
  at::Tensor sum, y;
  NormSaved saved;
};
AddNormForward add_rms_norm_forward(const at::Tensor& residual, const at::Tensor& delta, const at::Tensor& weight, double eps);

}  // namespace headrace
