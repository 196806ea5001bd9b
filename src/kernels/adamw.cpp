// The CPU form of AdamW, and the reference of adamw.cu.
#include "kernels/adamw.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <bit>
#include <cmath>

namespace headrace {
namespace {

// bfloat16 is the upper half of a float: adding 16 random bits below and cutting rounds up with the right probability.
c10::BFloat16 round_stochastically(float value, uint32_t random16) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7F800000U) == 0x7F800000U) return value;  // infinity and NaN stay
  return {static_cast<uint16_t>((bits + random16) >> 16), c10::BFloat16::from_bits()};
}

template <typename T>
void update(T* weights, const T* gradients, T* first, T* second, int64_t begin, int64_t end, int64_t first_index,
            float gradient_scale, const AdamWStep& step) {
  const float decay = 1.0F - step.lr * step.weight_decay, rate = step.lr / step.bias_correction1;
  for (int64_t i = begin; i < end; ++i) {
    const float g = static_cast<float>(gradients[i]) * gradient_scale;
    const float m0 = static_cast<float>(first[i]), v0 = static_cast<float>(second[i]);
    const float m = m0 + (g - m0) * (1.0F - step.beta1);
    const float v = v0 * step.beta2 + g * g * (1.0F - step.beta2);
    const float w = static_cast<float>(weights[i]) * decay - rate * m / (std::sqrt(v) / step.bias_correction2_sqrt + step.eps);
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      if (step.stochastic_rounding) {
        const uint64_t random = random_bits(step.random_key, static_cast<uint64_t>(first_index + i));
        weights[i] = round_stochastically(w, random & 0xFFFF);
        first[i] = round_stochastically(m, (random >> 16) & 0xFFFF);
        second[i] = round_stochastically(v, (random >> 32) & 0xFFFF);
        continue;
      }
    }
    weights[i] = w, first[i] = m, second[i] = v;
  }
}

template <typename T>
void update_parallel(void* weights, const void* gradients, void* first, void* second, int64_t count, int64_t first_index,
                     float gradient_scale, const AdamWStep& step) {
  constexpr int64_t kGrain = 1 << 16;  // elements: enough work to pay for a task
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    update(static_cast<T*>(weights), static_cast<const T*>(gradients), static_cast<T*>(first), static_cast<T*>(second), begin,
           end, first_index, gradient_scale, step);
  });
}

}  // namespace

void adamw_cpu(AdamWType type, void* weights, const void* gradients, void* first_moments, void* second_moments, int64_t count,
               int64_t first_index, const float* gradient_scale, const AdamWStep& step) {
  if (type == AdamWType::float32) {
    update_parallel<float>(weights, gradients, first_moments, second_moments, count, first_index, *gradient_scale, step);
  } else {
    update_parallel<c10::BFloat16>(weights, gradients, first_moments, second_moments, count, first_index, *gradient_scale,
                                   step);
  }
}

}  // namespace headrace
