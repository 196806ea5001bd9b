#include "layers/dispatch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include "kernels/cuda_launch.h"
#include "kernels/moe_rows_cuda.h"

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

at::Tensor dispatch(const at::Tensor& x, const DispatchPlan& plan) {
#ifdef HEADRACE_HAS_CUDA
  if (fits_bf16_kernels(x)) {
    at::Tensor rows = at::empty({plan.token_of_row.size(0), x.size(1)}, x.options());
    gather_rows_cuda(x.const_data_ptr(), plan.token_of_row.const_data_ptr<int64_t>(), rows.size(0), x.size(1), rows.data_ptr(),
                     current_stream(x));
    return rows;
  }
#endif
  return x.index_select(0, plan.token_of_row);
}

at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const DispatchPlan& plan) {
  const int64_t num_tokens = plan.row_of_pair.size(0);
#ifdef HEADRACE_HAS_CUDA
  if (fits_bf16_kernels(rows)) {
    at::Tensor out = at::empty({num_tokens, rows.size(1)}, rows.options());
    combine_rows_cuda(rows.const_data_ptr(), weights.defined() ? weights.const_data_ptr<float>() : nullptr,
                      plan.row_of_pair.const_data_ptr<int64_t>(), num_tokens, plan.top_k, rows.size(1), out.data_ptr(),
                      current_stream(rows));
    return out;
  }
#endif
  at::Tensor sum = at::zeros({num_tokens, rows.size(1)}, rows.options().dtype(at::kFloat));
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
