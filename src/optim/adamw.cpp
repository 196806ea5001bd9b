#include "optim/adamw.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

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
}

at::Tensor AdamW::gradient_norm(const at::Tensor& flat_gradients) const {
  return at::linalg_vector_norm(flat_gradients, 2, std::nullopt, /*keepdim=*/false, at::kFloat);
}

void AdamW::step(const at::Tensor& flat_weights, const at::Tensor& flat_gradients, const at::Tensor& norm, double lr) {
  ++steps_done_;
  const at::Tensor scale = settings_.max_grad_norm > 0
                               ? norm.add(1e-6).reciprocal_().mul_(settings_.max_grad_norm).clamp_max_(1.0)
                               : at::ones({}, norm.options());
  AdamWStep step;
  step.lr = static_cast<float>(lr);
  step.beta1 = static_cast<float>(settings_.beta1);
  step.beta2 = static_cast<float>(settings_.beta2);
  step.eps = static_cast<float>(settings_.eps);
  const auto t = static_cast<double>(steps_done_);
  step.bias_correction1 = static_cast<float>(1.0 - std::pow(settings_.beta1, t));
  step.bias_correction2_sqrt = static_cast<float>(std::sqrt(1.0 - std::pow(settings_.beta2, t)));
  step.stochastic_rounding = stochastic_rounding_;
  step.random_key = random_bits(seed_, static_cast<uint64_t>(steps_done_));

  const AdamWType type = flat_weights.scalar_type() == at::kFloat ? AdamWType::float32 : AdamWType::bfloat16;
  const auto at_offset = [](const at::Tensor& t, int64_t offset) {
    return static_cast<void*>(static_cast<char*>(t.data_ptr()) + offset * static_cast<int64_t>(t.element_size()));
  };
  for (const DecaySegment& segment : segments_) {
    step.weight_decay = segment.decay ? static_cast<float>(settings_.weight_decay) : 0.0F;
    const auto update = [&](auto function, auto... stream) {
      function(type, at_offset(flat_weights, segment.begin), at_offset(flat_gradients, segment.begin),
               at_offset(first_moments_, segment.begin), at_offset(second_moments_, segment.begin), segment.end - segment.begin,
               segment.begin, scale.const_data_ptr<float>(), step, stream...);
    };
    if (flat_weights.is_cpu()) {
      update(adamw_cpu);
    } else {
#ifdef HEADRACE_HAS_CUDA
      update(adamw_cuda, static_cast<void*>(c10::cuda::getCurrentCUDAStream().stream()));
#else
      throw std::invalid_argument("AdamW: this build has no CUDA code");
#endif
    }
  }
}

}  // namespace headrace
