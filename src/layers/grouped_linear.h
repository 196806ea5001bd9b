// Grouped linear: one GEMM per expert over rows grouped by expert. Used twice by the experts (gate_up, down).
// CUDA bfloat16: ATen's grouped GEMM with offsets on the device. CPU: a plain loop over experts.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/dispatch.h"

namespace headrace {

/// y[r] = x[r] weight[e]^T for the rows r of expert e. x [rows, in], weight [num_experts, out, in]; returns [rows, out].
at::Tensor grouped_linear_forward(const at::Tensor& x, const at::Tensor& weight, const DispatchPlan& plan);

/// Gradient of x: dx[r] = dy[r] weight[e]; [rows, in].
at::Tensor grouped_linear_input_backward(const at::Tensor& dy, const at::Tensor& weight, const DispatchPlan& plan);

/// weight_grad[e] += dy_e^T x_e; with `overwrite`, weight_grad[e] = dy_e^T x_e, which is 0 for an expert without rows, whatever
/// was there before. weight_grad [num_experts, out, in].
void grouped_linear_weight_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_grad,
                                    const DispatchPlan& plan, bool overwrite = false);

}  // namespace headrace
