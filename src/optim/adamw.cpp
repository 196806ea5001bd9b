#include "optim/adamw.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

#ifdef HEADRACE_HAS_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "headrace/error.h"
#include "kernels/adamw.h"

namespace headrace {

AdamW::AdamW(const at::Tensor& flat_weights, std::vector<DecaySegment> segments, const OptimizerSection& settings,
             uint64_t seed)
    : segments_(std::move(segments)),
      settings_(settings),
      seed_(seed),
      stochastic_rounding_(settings.stochastic_rounding == "auto" ? flat_weights.scalar_type() == at::kBFloat16
                                                                  : settings.stochastic_rounding == "true"),
      first_moments_(at::zeros_like(flat_weights)),
      second_moments_(at::zeros_like(flat_weights)) {
  check_argument(flat_weights.scalar_type() == at::kFloat || flat_weights.scalar_type() == at::kBFloat16,
                 "AdamW takes float32 or bfloat16 weights, not {}", c10::toString(flat_weights.scalar_type()));
  for (const DecaySegment& segment : segments_) {
    check_argument(segment.begin % 8 == 0, "AdamW: a segment begins at element {}, not at a multiple of 8", segment.begin);
  }
  if (settings.master_weights && flat_weights.scalar_type() == at::kBFloat16) {
    master_remainders_ = at::zeros(flat_weights.sizes(), flat_weights.options().dtype(at::kShort));
  }
}

at::Tensor AdamW::gradient_norm(at::TensorList gradients) const {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& part : gradients) {
    norms.push_back(at::linalg_vector_norm(part, 2, std::nullopt, /*keepdim=*/false, at::kFloat));
  }
  return norms.size() == 1 ? norms[0] : at::linalg_vector_norm(at::stack(norms), 2);
}

at::Tensor AdamW::gradient_scale(const at::Tensor& norm) const {
  const at::Tensor nan_unless_finite = norm * 0.0;  // infinity * 0 is NaN too
  if (settings_.max_grad_norm <= 0) return nan_unless_finite + 1.0;
  return norm.add(1e-6).reciprocal_().mul_(settings_.max_grad_norm).clamp_max_(1.0).add_(nan_unless_finite);
}

void AdamW::begin_step(double lr) {
  ++steps_done_;
  lr_ = lr;
}

void AdamW::update(const at::Tensor& flat_weights, const at::Tensor& gradients, int64_t first,
                   const at::Tensor& gradient_scale) {
  check_argument(first % 8 == 0, "AdamW: gradients begin at element {}, not at a multiple of 8", first);
  AdamWStep step;
  step.lr = static_cast<float>(lr_);
  step.beta1 = static_cast<float>(settings_.beta1);
  step.beta2 = static_cast<float>(settings_.beta2);
  step.eps = static_cast<float>(settings_.eps);
  const auto t = static_cast<double>(steps_done_);
  step.bias_correction1 = static_cast<float>(1.0 - std::pow(settings_.beta1, t));
  step.bias_correction2_sqrt = static_cast<float>(std::sqrt(1.0 - std::pow(settings_.beta2, t)));
  step.stochastic_rounding = stochastic_rounding_;
  step.random_key = random_bits(seed_, static_cast<uint64_t>(steps_done_));

  const auto at_offset = [](const at::Tensor& tensor, int64_t offset) {
    return static_cast<void*>(static_cast<char*>(tensor.data_ptr()) + offset * static_cast<int64_t>(tensor.element_size()));
  };
  for (const DecaySegment& segment : segments_) {
    const int64_t begin = std::max(segment.begin, first), end = std::min(segment.end, first + gradients.numel());
    if (begin >= end) continue;
    step.weight_decay = segment.decay ? static_cast<float>(settings_.weight_decay) : 0.0F;
    AdamWBuffers buffers;
    buffers.type = flat_weights.scalar_type() == at::kFloat ? AdamWType::float32 : AdamWType::bfloat16;
    buffers.weights = at_offset(flat_weights, begin);
    buffers.gradients = at_offset(gradients, begin - first);
    buffers.first_moments = at_offset(first_moments_, begin);
    buffers.second_moments = at_offset(second_moments_, begin);
    if (master_remainders_.defined()) buffers.remainders = master_remainders_.data_ptr<int16_t>() + begin;
    buffers.count = end - begin;
    buffers.first_index = begin;
    if (flat_weights.is_cpu()) {
      adamw_cpu(buffers, gradient_scale.const_data_ptr<float>(), step);
    } else {
#ifdef HEADRACE_HAS_CUDA
      adamw_cuda(buffers, gradient_scale.const_data_ptr<float>(), step, c10::cuda::getCurrentCUDAStream().stream());
#else
      throw std::invalid_argument("AdamW: this build has no CUDA code");
#endif
    }
  }
}

void AdamW::step(const at::Tensor& flat_weights, const at::Tensor& flat_gradients, const at::Tensor& norm, double lr) {
  begin_step(lr);
  update(flat_weights, flat_gradients, 0, gradient_scale(norm));
}

}  // namespace headrace
