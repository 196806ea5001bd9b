#include "layers/dispatch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

namespace headrace {

DispatchPlan make_dispatch_plan(const at::Tensor& expert_ids, int64_t num_experts) {
  DispatchPlan plan;
  plan.num_experts = num_experts;
  plan.top_k = expert_ids.size(1);
  const auto [sorted_ids, pairs] = at::sort(expert_ids.reshape({-1}), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  plan.pair_of_row = pairs;
  plan.token_of_row = pairs.div(plan.top_k, "floor");
  plan.row_of_pair =
      at::empty_like(pairs).scatter_(0, pairs, at::arange(pairs.size(0), pairs.options())).view(expert_ids.sizes());
  plan.ends = at::searchsorted(sorted_ids, at::arange(num_experts, pairs.options()), /*out_int32=*/true, /*right=*/true);
  if (plan.ends.is_cpu()) {
    const int32_t* ends = plan.ends.const_data_ptr<int32_t>();
    plan.host_ends.assign(ends, ends + num_experts);
  }
  return plan;
}

at::Tensor dispatch(const at::Tensor& x, const DispatchPlan& plan) { return x.index_select(0, plan.token_of_row); }

at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const DispatchPlan& plan) {
  at::Tensor sum = at::zeros({plan.row_of_pair.size(0), rows.size(1)}, rows.options().dtype(at::kFloat));
  for (int64_t choice = 0; choice < plan.top_k; ++choice) {
    const at::Tensor term = rows.index_select(0, plan.row_of_pair.select(1, choice));
    if (weights.defined()) {
      sum.addcmul_(term.to(at::kFloat), weights.narrow(1, choice, 1));
    } else {
      sum.add_(term);
    }
  }
  return sum.to(rows.scalar_type());
}

}  // namespace headrace
