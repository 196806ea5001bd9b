#include "layers/grouped_linear.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#ifdef HEADRACE_HAS_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/native/cuda/GroupMM.h>
#endif

namespace headrace {
namespace {

// The rows of each expert on the host. On a GPU this synchronises; only the float32 path there comes through here.
std::vector<int64_t> ends_on_host(const DispatchPlan& plan) {
  if (!plan.host_ends.empty()) return plan.host_ends;
  const at::Tensor ends = plan.ends.cpu();
  const int32_t* data = ends.const_data_ptr<int32_t>();
  return {data, data + ends.size(0)};
}

template <typename Body>
void for_each_expert(const DispatchPlan& plan, const Body& body) {
  int64_t begin = 0;
  const std::vector<int64_t> ends = ends_on_host(plan);
  for (int64_t expert = 0; expert < plan.num_experts; ++expert) {
    const int64_t rows = ends[expert] - begin;
    if (rows > 0) body(expert, begin, rows);
    begin = ends[expert];
  }
}

// ATen's grouped GEMM wants rows of 16-byte multiples.
bool takes_grouped_mm(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && x.size(0) > 0 && weight.size(1) % 8 == 0 && weight.size(2) % 8 == 0;
}

#ifdef HEADRACE_HAS_CUDA
// at::_grouped_mm has no form that writes into given memory; what it calls on Hopper has.
bool writes_grouped_mm_in_place() { return at::cuda::getCurrentDeviceProperties()->major == 9; }
void grouped_mm_into(at::Tensor out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends) {
  at::cuda::detail::bf16bf16_grouped_mm(a, b, ends, std::nullopt, out);
}
#else
bool writes_grouped_mm_in_place() { return false; }
void grouped_mm_into(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {}
#endif

}  // namespace

at::Tensor grouped_linear_forward(const at::Tensor& x, const at::Tensor& weight, const DispatchPlan& plan) {
  if (takes_grouped_mm(x, weight)) return at::_grouped_mm(x, weight.transpose(1, 2), plan.ends);
  at::Tensor y = at::empty({x.size(0), weight.size(1)}, x.options());
  for_each_expert(plan, [&](int64_t expert, int64_t begin, int64_t rows) {
    at::Tensor out = y.narrow(0, begin, rows);
    at::mm_out(out, x.narrow(0, begin, rows), weight[expert].t());
  });
  return y;
}

at::Tensor grouped_linear_input_backward(const at::Tensor& dy, const at::Tensor& weight, const DispatchPlan& plan) {
  if (takes_grouped_mm(dy, weight)) return at::_grouped_mm(dy, weight, plan.ends);
  at::Tensor dx = at::empty({dy.size(0), weight.size(2)}, dy.options());
  for_each_expert(plan, [&](int64_t expert, int64_t begin, int64_t rows) {
    at::Tensor out = dx.narrow(0, begin, rows);
    at::mm_out(out, dy.narrow(0, begin, rows), weight[expert]);
  });
  return dx;
}

void grouped_linear_weight_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_grad,
                                    const DispatchPlan& plan, bool overwrite) {
  if (takes_grouped_mm(dy, weight_grad)) {
    if (!overwrite) {
      weight_grad.add_(at::_grouped_mm(dy.t(), x, plan.ends));
    } else if (writes_grouped_mm_in_place()) {
      grouped_mm_into(weight_grad, dy.t(), x, plan.ends);
    } else {
      weight_grad.copy_(at::_grouped_mm(dy.t(), x, plan.ends));
    }
    return;
  }
  if (overwrite) weight_grad.zero_();
  for_each_expert(plan, [&](int64_t expert, int64_t begin, int64_t rows) {
    weight_grad[expert].addmm_(dy.narrow(0, begin, rows).t(), x.narrow(0, begin, rows));
  });
}

}  // namespace headrace
