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

/// 64 random bits for (key, index): two rounds of splitmix64's finaliser. The same on the host and the device.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline uint64_t
    random_bits(uint64_t key, uint64_t index) {
  uint64_t z = key + index * 0x9E3779B97F4A7C15ULL;
  for (int round = 0; round < 2; ++round) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
  }
  return z;
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
