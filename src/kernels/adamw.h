// AdamW over flat buffers, weights and states of one dtype (float32, or bfloat16 with stochastic rounding).
// Flow: gradients -> norm and clip coefficient -> [adamw] -> weights. CPU: adamw.cpp; CUDA: adamw.cu (raw pointers and a
// stream). Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the form of
// torch.optim.AdamW.
#pragma once

#include <cstdint>

namespace headrace {

struct AdamWStep {
  float lr = 0, beta1 = 0.9F, beta2 = 0.999F, eps = 1e-8F, weight_decay = 0;
  float bias_correction1 = 1, bias_correction2_sqrt = 1;  // 1 - beta1^t, sqrt(1 - beta2^t) with t counted from 1
  bool stochastic_rounding = false;                       // bfloat16 only: round up with the probability of the cut-off part
  uint64_t random_key = 0;                                // of this step; element i draws from (random_key, i)
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

/// Updates `count` elements in place. The pointers are `first_index` elements into their buffers (random numbers are drawn by
/// the index in the whole buffer). gradient_scale: one float where the data is (device memory for CUDA) that multiplies every
/// gradient; clipping needs no host synchronisation this way. 14 bytes of memory traffic an element in bfloat16, 28 in float32.
void adamw_cpu(AdamWType type, void* weights, const void* gradients, void* first_moments, void* second_moments, int64_t count,
               int64_t first_index, const float* gradient_scale, const AdamWStep& step);

/// The same on `stream` (a cudaStream_t). Throws std::runtime_error with CUDA's text when the launch fails.
void adamw_cuda(AdamWType type, void* weights, const void* gradients, void* first_moments, void* second_moments, int64_t count,
                int64_t first_index, const float* gradient_scale, const AdamWStep& step, void* stream);

}  // namespace headrace
