#include "layers/dispatch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include "kernels/cuda_launch.h"
#include "kernels/dispatch_plan_cuda.h"
#include "kernels/moe_rows_cuda.h"

namespace headrace {

namespace {

#ifdef HEADRACE_HAS_CUDA
DispatchPlan cuda_plan(const at::Tensor& expert_ids, int64_t num_experts) {
  const at::TensorOptions ints = expert_ids.options().dtype(at::kInt);
  const int64_t pairs = expert_ids.numel();
  DispatchPlan plan{num_experts,
                    expert_ids.size(1),
                    at::empty({pairs}, expert_ids.options()),
                    at::empty_like(expert_ids),
                    at::empty({num_experts}, ints),
                    {}};
  const at::Tensor scratch = at::empty({dispatch_plan_scratch(pairs, static_cast<int>(num_experts))}, ints);
  dispatch_plan_cuda(expert_ids.const_data_ptr<int64_t>(), pairs, static_cast<int>(num_experts),
                     plan.row_of_pair.data_ptr<int64_t>(), plan.pair_of_row.data_ptr<int64_t>(), plan.ends.data_ptr<int32_t>(),
                     scratch.data_ptr<int32_t>(), current_stream(expert_ids));
  return plan;
}
#endif

}  // namespace

DispatchPlan make_dispatch_plan(const at::Tensor& expert_ids, int64_t num_experts) {
#ifdef HEADRACE_HAS_CUDA
  if (expert_ids.is_cuda() && expert_ids.numel() > 0 && expert_ids.is_contiguous() && num_experts <= kMaxPlanExperts) {
    return cuda_plan(expert_ids, num_experts);
  }
#endif
  DispatchPlan plan;
  plan.num_experts = num_experts;
  plan.top_k = expert_ids.size(1);
  const auto [sorted_ids, pairs] = at::sort(expert_ids.reshape({-1}), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  plan.pair_of_row = pairs;
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
    at::Tensor rows = at::empty({plan.pair_of_row.size(0), x.size(1)}, x.options());
    dispatch_rows_cuda(x.const_data_ptr(), plan.row_of_pair.const_data_ptr<int64_t>(), x.size(0), plan.top_k, x.size(1),
                       rows.data_ptr(), current_stream(x));
    return rows;
  }
#endif
  return x.index_select(0, plan.pair_of_row.div(plan.top_k, "floor"));
}

at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const DispatchPlan& plan, const at::Tensor& addend) {
  const int64_t num_tokens = plan.row_of_pair.size(0);
#ifdef HEADRACE_HAS_CUDA
  if (fits_bf16_kernels(rows) && (!addend.defined() || fits_bf16_kernels(addend))) {
    at::Tensor out = at::empty({num_tokens, rows.size(1)}, rows.options());
    combine_rows_cuda(rows.const_data_ptr(), weights.defined() ? weights.const_data_ptr<float>() : nullptr,
                      plan.row_of_pair.const_data_ptr<int64_t>(), addend.defined() ? addend.const_data_ptr() : nullptr,
                      num_tokens, plan.top_k, rows.size(1), out.data_ptr(), current_stream(rows));
    return out;
  }
#endif
  at::Tensor sum = at::zeros({num_tokens, rows.size(1)}, rows.options().dtype(at::kFloat));
  if (addend.defined()) sum.add_(addend);
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
