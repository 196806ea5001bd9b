// AdamW over flat buffers, weights and states of one dtype: float32, or bfloat16 with stochastic rounding or with exact float32
// master weights, kept as the bfloat16 weight and a 16-bit remainder.
// Flow: gradients -> norm and clip coefficient -> [adamw] -> weights. CPU: adamw.cpp; CUDA: adamw.cu (raw pointers and a
// stream). Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the form of
// torch.optim.AdamW.
#pragma once

#include <cstdint>

namespace headrace {

struct AdamWStep {
  float lr = 0, beta1 = 0.9F, beta2 = 0.999F, eps = 1e-8F, weight_decay = 0;
  float bias_correction1 = 1, bias_correction2_sqrt = 1;  // 1 - beta1^t, sqrt(1 - beta2^t) with t counted from 1
  // bfloat16 only: round up with the probability of the cut-off part; with remainders the moments alone, for the weights are
  // exact then.
  bool stochastic_rounding = false;
  uint64_t random_key = 0;  // of this step; element i draws from (random_key, i)
};

/// 32 random bits from 32: a bijection whose every output bit depends on every input bit (MurmurHash3's finaliser, public
/// domain).
#ifdef __CUDACC__
__host__ __device__
#endif
    inline uint32_t
    mix_bits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  return x ^ (x >> 16);
}

/// 64 random bits for (key, index), the same on the host and the device. 32-bit arithmetic: the optimizer draws them for every
/// element and 64-bit multiplications would cost a GPU more time than the memory traffic.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline uint64_t
    random_bits(uint64_t key, uint64_t index) {
  const auto key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  const uint32_t first =
      mix_bits(mix_bits(static_cast<uint32_t>(index) ^ key_low) + static_cast<uint32_t>(index >> 32) + key_high);
  return (static_cast<uint64_t>(mix_bits(first + 0x9E3779B9U)) << 32) | first;
}

enum class AdamWType { float32, bfloat16 };

/// `count` elements, all pointers at the same place of their buffers, which is element `first_index` of the whole (random
/// numbers are drawn by the index in the whole).
struct AdamWBuffers {
  AdamWType type = AdamWType::float32;
  void* weights = nullptr;
  const void* gradients = nullptr;
  void *first_moments = nullptr, *second_moments = nullptr;
  // bfloat16 only, or null: the master weight's bits are (weight's bits << 16) + remainder, the weight being the master rounded
  // to nearest.
  int16_t* remainders = nullptr;
  int64_t count = 0, first_index = 0;
};

/// Updates the elements in place. gradient_scale: one float where the data is (device memory for CUDA) that multiplies every
/// gradient, so that clipping needs no host synchronisation; when it is NaN, nothing is changed. Memory traffic an element:
/// 14 bytes in bfloat16, 18 with remainders, 28 in float32.
void adamw_cpu(const AdamWBuffers& buffers, const float* gradient_scale, const AdamWStep& step);

/// The same on `stream` (a cudaStream_t); pointers are 16-byte aligned. Throws std::runtime_error with CUDA's text when the
/// launch fails.
void adamw_cuda(const AdamWBuffers& buffers, const float* gradient_scale, const AdamWStep& step, void* stream);

}  // namespace headrace
