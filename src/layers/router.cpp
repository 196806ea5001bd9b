#include "layers/router.h"

#include <ATen/TensorOperators.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "kernels/cuda_launch.h"
#include "kernels/router_topk_cuda.h"
#include "layers/linear.h"

namespace headrace {

Routing router_forward(const at::Tensor& x, const at::Tensor& weight, const RouterConfig& config) {
  Routing routing;
  routing.logits = linear_forward(x, weight, {});
#ifdef HEADRACE_HAS_CUDA
  if (fits_bf16_kernels(routing.logits) && config.num_experts <= kMaxRouterExperts && config.top_k <= 32) {
    const at::TensorOptions options = x.options();
    routing.expert_ids = at::empty({x.size(0), config.top_k}, options.dtype(at::kLong));
    routing.weights = at::empty({x.size(0), config.top_k}, options.dtype(at::kFloat));
    router_topk_cuda(routing.logits.const_data_ptr(), x.size(0), static_cast<int>(config.num_experts),
                     static_cast<int>(config.top_k), config.norm_topk_prob, config.weights_in_float32,
                     routing.expert_ids.data_ptr<int64_t>(), routing.weights.data_ptr<float>(), current_stream(x));
    return routing;
  }
#endif
  const at::Tensor probabilities = routing.logits.to(at::kFloat).softmax(-1);
  // A stable sort, not topk: on ties topk's order is not defined.
  const auto [sorted, ids] = at::sort(probabilities, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
  routing.expert_ids = ids.narrow(-1, 0, config.top_k).contiguous();
  at::Tensor weights = sorted.narrow(-1, 0, config.top_k).contiguous();
  if (config.norm_topk_prob) weights = weights / weights.sum(-1, /*keepdim=*/true);
  routing.weights = config.weights_in_float32 ? weights : weights.to(routing.logits.scalar_type()).to(at::kFloat);
  return routing;
}

at::Tensor router_backward(const at::Tensor& dweights, const at::Tensor& balance_grad, const at::Tensor& x,
                           const Routing& routing, const at::Tensor& weight, const at::Tensor& weight_grad,
                           const RouterConfig& config) {
  const at::Tensor probabilities = routing.logits.to(at::kFloat).softmax(-1);
  at::Tensor dlogits;
  if (config.norm_topk_prob) {
    // Softmax over all, then division by the chosen sum, is a softmax over the chosen alone.
    const at::Tensor chosen = probabilities.gather(-1, routing.expert_ids);
    const at::Tensor w = chosen / chosen.sum(-1, /*keepdim=*/true);
    const at::Tensor dchosen = w * (dweights - (w * dweights).sum(-1, /*keepdim=*/true));
    dlogits = at::zeros_like(probabilities).scatter_(-1, routing.expert_ids, dchosen);
  } else {
    const at::Tensor dp = at::zeros_like(probabilities).scatter_(-1, routing.expert_ids, dweights);
    dlogits = probabilities * (dp - (dp * probabilities).sum(-1, /*keepdim=*/true));
  }
  if (balance_grad.defined()) {
    const at::Tensor p = routing.logits.softmax(-1).to(at::kFloat);
    dlogits = dlogits + p * (balance_grad - p.mv(balance_grad).unsqueeze(-1));
  }
  return linear_backward(dlogits.to(x.scalar_type()), x, weight, weight_grad, {});
}

void BalanceLoss::add(const Routing& routing) {
  if (!picks_.defined()) {
    picks_ = at::zeros({num_experts_}, routing.weights.options());
    probabilities_ = at::zeros({num_experts_}, routing.weights.options());
  }
  // Comparing with every expert id needs no host synchronisation, unlike bincount, and adds in a fixed order.
  const at::Tensor ids = at::arange(num_experts_, routing.expert_ids.options());
  for (int64_t choice = 0; choice < routing.expert_ids.size(1); ++choice) {
    picks_.add_(routing.expert_ids.select(1, choice).unsqueeze(1).eq(ids).sum(0));
  }
  probabilities_.add_(routing.logits.softmax(-1).to(at::kFloat).sum(0));
  rows_ += routing.expert_ids.size(0);
}

at::Tensor BalanceLoss::value() const {
  if (rows_ == 0) return at::zeros({}, at::kFloat);
  const auto rows = static_cast<double>(rows_);
  return (picks_ / rows * (probabilities_ / rows)).sum() * static_cast<double>(num_experts_);
}

at::Tensor BalanceLoss::grad(double scale) const {
  if (rows_ == 0) return {};
  const auto rows = static_cast<double>(rows_);
  return picks_ * (scale * static_cast<double>(num_experts_) / (rows * rows));
}

}  // namespace headrace
