// The CUDA form of AdamW: one pass, 8 elements of bfloat16 or 4 of float32 a thread (16-byte loads), float32 arithmetic.
// Reference: adamw.cpp, the same formulas and the same random numbers.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/adamw.h"

namespace headrace {
namespace {

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T round_to(float x);
template <>
__device__ float round_to<float>(float x) {
  return x;
}
template <>
__device__ __nv_bfloat16 round_to<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ __nv_bfloat16 round_stochastically(float value, unsigned random16) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7F800000U) == 0x7F800000U) return __float2bfloat16_rn(value);
  return __ushort_as_bfloat16(static_cast<unsigned short>((bits + random16) >> 16));
}

// bfloat16 keeps 8 bits: the hardware's approximations (2 units in the last place of a float) change nothing there and save two
// thirds of the arithmetic. float32 takes the exact forms.
template <typename T>
__device__ float divide(float a, float b) {
  return sizeof(T) == 2 ? __fdividef(a, b) : a / b;
}
template <typename T>
__device__ float square_root(float x) {
  if constexpr (sizeof(T) == 4) return sqrtf(x);
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

template <typename T>
__device__ void update_one(T& weight, T gradient, T& first, T& second, float scale, const AdamWStep& step, int64_t index) {
  const float g = to_float(gradient) * scale;
  const float m0 = to_float(first), v0 = to_float(second);
  const float m = m0 + (g - m0) * (1.0F - step.beta1);
  const float v = v0 * step.beta2 + g * g * (1.0F - step.beta2);
  const float decay = 1.0F - step.lr * step.weight_decay, rate = step.lr / step.bias_correction1;
  const float w =
      to_float(weight) * decay - divide<T>(rate * m, divide<T>(square_root<T>(v), step.bias_correction2_sqrt) + step.eps);
  if constexpr (sizeof(T) == 2) {
    if (step.stochastic_rounding) {
      const uint64_t random = random_bits(step.random_key, static_cast<uint64_t>(index));
      weight = round_stochastically(w, random & 0xFFFF);
      first = round_stochastically(m, (random >> 16) & 0xFFFF);
      second = round_stochastically(v, (random >> 32) & 0xFFFF);
      return;
    }
  }
  weight = round_to<T>(w), first = round_to<T>(m), second = round_to<T>(v);
}

template <typename T>
__global__ void adamw_kernel(T* weights, const T* gradients, T* first, T* second, int64_t count, int64_t first_index,
                             const float* gradient_scale, AdamWStep step) {
  constexpr int kSize = Pack<T>::kSize;
  const float scale = *gradient_scale;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t packs = count / kSize;
  for (int64_t p = thread; p < packs; p += stride) {
    Pack<T> w = reinterpret_cast<Pack<T>*>(weights)[p], m = reinterpret_cast<Pack<T>*>(first)[p],
            v = reinterpret_cast<Pack<T>*>(second)[p];
    const Pack<T> g = reinterpret_cast<const Pack<T>*>(gradients)[p];
#pragma unroll
    for (int i = 0; i < kSize; ++i) update_one(w.at[i], g.at[i], m.at[i], v.at[i], scale, step, first_index + p * kSize + i);
    reinterpret_cast<Pack<T>*>(weights)[p] = w;
    reinterpret_cast<Pack<T>*>(first)[p] = m;
    reinterpret_cast<Pack<T>*>(second)[p] = v;
  }
  for (int64_t i = packs * kSize + thread; i < count; i += stride) {
    update_one(weights[i], gradients[i], first[i], second[i], scale, step, first_index + i);
  }
}

template <typename T>
void launch(void* weights, const void* gradients, void* first, void* second, int64_t count, int64_t first_index,
            const float* gradient_scale, const AdamWStep& step, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int64_t packs = count / Pack<T>::kSize + 1;
  // A few waves of blocks over any current GPU; the loop in the kernel takes the rest.
  const int64_t blocks = packs / kThreads + 1 < 132 * 16 ? packs / kThreads + 1 : 132 * 16;
  adamw_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<T*>(weights), static_cast<const T*>(gradients), static_cast<T*>(first), static_cast<T*>(second), count,
      first_index, gradient_scale, step);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("adamw: ") + cudaGetErrorString(error));
}

}  // namespace

void adamw_cuda(AdamWType type, void* weights, const void* gradients, void* first_moments, void* second_moments, int64_t count,
                int64_t first_index, const float* gradient_scale, const AdamWStep& step, void* stream) {
  if (count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (type == AdamWType::float32) {
    launch<float>(weights, gradients, first_moments, second_moments, count, first_index, gradient_scale, step, cuda_stream);
  } else {
    launch<__nv_bfloat16>(weights, gradients, first_moments, second_moments, count, first_index, gradient_scale, step,
                          cuda_stream);
  }
}

}  // namespace headrace
