#include "layers/moe.h"

#include <ATen/TensorOperators.h>

#include "layers/grouped_linear.h"
#include "layers/swiglu.h"

namespace headrace {

MoeForward moe_forward(const at::Tensor& x, const MoeConfig& config, const MoeTensors& weights) {
  MoeSaved routed;
  routed.routing = router_forward(x, weights.router, config.router);
  routed.plan = make_dispatch_plan(routed.routing.expert_ids, config.router.num_experts);
  return moe_forward_routed(x, std::move(routed), weights);
}

MoeForward moe_forward_routed(const at::Tensor& x, MoeSaved saved, const MoeTensors& weights) {
  saved.gate_up = grouped_linear_forward(dispatch(x, saved.plan), weights.gate_up, saved.plan);
  const at::Tensor rows = grouped_linear_forward(swiglu_forward(saved.gate_up), weights.down, saved.plan);
  at::Tensor y = combine(rows, saved.routing.weights, saved.plan);
  return {std::move(y), std::move(saved)};
}

at::Tensor moe_backward(const at::Tensor& dy, const at::Tensor& balance_grad, const at::Tensor& x, MoeSaved saved,
                        const MoeConfig& config, const MoeTensors& weights, const MoeTensors& grads, bool overwrite_experts) {
  const DispatchPlan& plan = saved.plan;
  // Of the three wide row tensors (dispatched x, dispatched dy, the rows of dx) only one lives at a time.
  if (!saved.gate_up.defined()) saved.gate_up = grouped_linear_forward(dispatch(x, plan), weights.gate_up, plan);
  at::Tensor dout = dispatch(dy, plan);  // gradient of y, not yet weighted
  // The routing weight's gradient is <dy, expert output> = <dA', A>: no expert output needed.
  WeightedSwigluBackward inner = swiglu_backward_weighted(grouped_linear_input_backward(dout, weights.down, plan),
                                                          std::move(saved.gate_up), saved.routing.weights, plan);
  if (grads.down.defined()) grouped_linear_weight_backward(dout, inner.scaled_activation, grads.down, plan, overwrite_experts);
  dout.reset(), inner.scaled_activation.reset();
  if (grads.gate_up.defined())
    grouped_linear_weight_backward(inner.dgate_up, dispatch(x, plan), grads.gate_up, plan, overwrite_experts);
  const at::Tensor dx_rows = grouped_linear_input_backward(inner.dgate_up, weights.gate_up, plan);
  inner.dgate_up.reset();
  const at::Tensor dx_router =
      router_backward(inner.dweights, balance_grad, x, saved.routing, weights.router, grads.router, config.router);
  return combine(dx_rows, {}, plan, dx_router);
}

}  // namespace headrace
