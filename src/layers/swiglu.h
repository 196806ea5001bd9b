// SwiGLU: the elementwise part of every feed-forward, dense or expert, and its backward.
// bfloat16 on a GPU goes to one kernel (kernels/moe_rows.cu), all else to the ATen form beside it.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/dispatch.h"

namespace headrace {

/// a = silu(gate) * up for gate_up [rows, 2 * width] = gate columns, then up columns. Returns [rows, width].
at::Tensor swiglu_forward(const at::Tensor& gate_up);

/// Gradient of gate_up for the gradient da [rows, width] of a.
at::Tensor swiglu_backward(const at::Tensor& da, const at::Tensor& gate_up);

/// The experts' backward in one pass; dactivation and gate_up are used up (their memory may hold the results). Row r serves the
/// pair plan.pair_of_row[r] with routing weight s; dactivation [rows, width] is the gradient of the activation a before the
/// weight: the block's output gradient times the down projection.
struct WeightedSwigluBackward {
  at::Tensor dgate_up;           // [rows, 2 * width], gradient for s * dactivation
  at::Tensor scaled_activation;  // [rows, width] = s * a, for the down projection's weight gradient
  at::Tensor dweights;           // [num_tokens, top_k] float32 = <dactivation, a>, gradient of the routing weights
};
/// weights [num_tokens, top_k] float32.
WeightedSwigluBackward swiglu_backward_weighted(at::Tensor dactivation, at::Tensor gate_up, const at::Tensor& weights,
                                                const DispatchPlan& plan);

}  // namespace headrace
