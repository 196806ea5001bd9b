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

// The master weight behind a bfloat16 weight and its remainder, and back: rounded to nearest, ties away from zero, so that the
// remainder fits 16 signed bits.
float master_of(c10::BFloat16 weight, int16_t remainder) {
  return std::bit_cast<float>((static_cast<uint32_t>(weight.x) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}
void store_master(float master, c10::BFloat16& weight, int16_t& remainder) {
  const auto bits = std::bit_cast<uint32_t>(master);
  const uint32_t upper = (bits + 0x8000U) >> 16;
  weight.x = static_cast<uint16_t>(upper);
  remainder = static_cast<int16_t>(bits - (upper << 16));
}

template <typename T>
void update(const AdamWBuffers& buffers, int64_t begin, int64_t end, float gradient_scale, const AdamWStep& step) {
  auto* weights = static_cast<T*>(buffers.weights);
  const auto* gradients = static_cast<const T*>(buffers.gradients);
  auto *first = static_cast<T*>(buffers.first_moments), *second = static_cast<T*>(buffers.second_moments);
  const float decay = 1.0F - step.lr * step.weight_decay, rate = step.lr / step.bias_correction1;
  for (int64_t i = begin; i < end; ++i) {
    const float g = static_cast<float>(gradients[i]) * gradient_scale;
    const float m0 = static_cast<float>(first[i]), v0 = static_cast<float>(second[i]);
    const float m = m0 + (g - m0) * (1.0F - step.beta1);
    const float v = v0 * step.beta2 + g * g * (1.0F - step.beta2);
    const float change = rate * m / (std::sqrt(v) / step.bias_correction2_sqrt + step.eps);
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const bool master = buffers.remainders != nullptr;
      if (master) {
        store_master(master_of(weights[i], buffers.remainders[i]) * decay - change, weights[i], buffers.remainders[i]);
      }
      if (step.stochastic_rounding) {
        const uint64_t random = random_bits(step.random_key, static_cast<uint64_t>(buffers.first_index + i));
        if (!master) weights[i] = round_stochastically(static_cast<float>(weights[i]) * decay - change, random & 0xFFFF);
        first[i] = round_stochastically(m, (random >> 16) & 0xFFFF);
        second[i] = round_stochastically(v, (random >> 32) & 0xFFFF);
        continue;
      }
      first[i] = m, second[i] = v;
      if (!master) weights[i] = static_cast<float>(weights[i]) * decay - change;
    } else {
      weights[i] = weights[i] * decay - change, first[i] = m, second[i] = v;
    }
  }
}

}  // namespace

void adamw_cpu(const AdamWBuffers& buffers, const float* gradient_scale, const AdamWStep& step) {
  if (std::isnan(*gradient_scale)) return;
  constexpr int64_t kGrain = 1 << 16;  // elements: enough work to pay for a task
  at::parallel_for(0, buffers.count, kGrain, [&](int64_t begin, int64_t end) {
    if (buffers.type == AdamWType::float32) {
      update<float>(buffers, begin, end, *gradient_scale, step);
    } else {
      update<c10::BFloat16>(buffers, begin, end, *gradient_scale, step);
    }
  });
}

}  // namespace headrace
