// The CUDA form of AdamW: one pass, 8 elements of bfloat16 or 4 of float32 a thread (16-byte loads), float32 arithmetic.
// Reference: adamw.cpp, the same formulas and the same random numbers.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

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

__device__ float master_of(__nv_bfloat16 weight, int16_t remainder) {
  return __uint_as_float((static_cast<unsigned>(__bfloat16_as_ushort(weight)) << 16) + static_cast<unsigned>(int{remainder}));
}
__device__ void store_master(float master, __nv_bfloat16& weight, int16_t& remainder) {
  const unsigned bits = __float_as_uint(master), upper = (bits + 0x8000U) >> 16;
  weight = __ushort_as_bfloat16(static_cast<unsigned short>(upper));
  remainder = static_cast<int16_t>(bits - (upper << 16));
}

// `remainder` is read and written with kMaster alone.
template <typename T, bool kMaster>
__device__ void update_one(T& weight, T gradient, T& first, T& second, int16_t& remainder, float scale, const AdamWStep& step,
                           int64_t index) {
  const float g = to_float(gradient) * scale;
  const float m0 = to_float(first), v0 = to_float(second);
  const float m = m0 + (g - m0) * (1.0F - step.beta1);
  const float v = v0 * step.beta2 + g * g * (1.0F - step.beta2);
  const float decay = 1.0F - step.lr * step.weight_decay, rate = step.lr / step.bias_correction1;
  // Exact master weights take exact arithmetic.
  using Exactness = std::conditional_t<kMaster, float, T>;
  const float change =
      divide<Exactness>(rate * m, divide<Exactness>(square_root<Exactness>(v), step.bias_correction2_sqrt) + step.eps);
  if constexpr (sizeof(T) == 2) {
    if constexpr (kMaster) store_master(master_of(weight, remainder) * decay - change, weight, remainder);
    if (step.stochastic_rounding) {
      const uint64_t random = random_bits(step.random_key, static_cast<uint64_t>(index));
      if constexpr (!kMaster) weight = round_stochastically(to_float(weight) * decay - change, random & 0xFFFF);
      first = round_stochastically(m, (random >> 16) & 0xFFFF);
      second = round_stochastically(v, (random >> 32) & 0xFFFF);
      return;
    }
  }
  if constexpr (!kMaster) weight = round_to<T>(to_float(weight) * decay - change);
  first = round_to<T>(m), second = round_to<T>(v);
}

template <typename T, bool kMaster>
__global__ void adamw_kernel(AdamWBuffers buffers, const float* gradient_scale, AdamWStep step) {
  constexpr int kSize = Pack<T>::kSize;
  struct alignas(2 * kSize) Remainders {
    int16_t at[kSize];
  };
  const float scale = *gradient_scale;
  if (isnan(scale)) return;
  T *weights = static_cast<T*>(buffers.weights), *first = static_cast<T*>(buffers.first_moments),
    *second = static_cast<T*>(buffers.second_moments);
  const T* gradients = static_cast<const T*>(buffers.gradients);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t packs = buffers.count / kSize;
  for (int64_t p = thread; p < packs; p += stride) {
    Pack<T> w = reinterpret_cast<Pack<T>*>(weights)[p], m = reinterpret_cast<Pack<T>*>(first)[p],
            v = reinterpret_cast<Pack<T>*>(second)[p];
    const Pack<T> g = reinterpret_cast<const Pack<T>*>(gradients)[p];
    Remainders r = {};
    if constexpr (kMaster) r = reinterpret_cast<Remainders*>(buffers.remainders)[p];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      update_one<T, kMaster>(w.at[i], g.at[i], m.at[i], v.at[i], r.at[i], scale, step, buffers.first_index + p * kSize + i);
    }
    reinterpret_cast<Pack<T>*>(weights)[p] = w;
    reinterpret_cast<Pack<T>*>(first)[p] = m;
    reinterpret_cast<Pack<T>*>(second)[p] = v;
    if constexpr (kMaster) reinterpret_cast<Remainders*>(buffers.remainders)[p] = r;
  }
  for (int64_t i = packs * kSize + thread; i < buffers.count; i += stride) {
    int16_t none = 0;
    update_one<T, kMaster>(weights[i], gradients[i], first[i], second[i], kMaster ? buffers.remainders[i] : none, scale, step,
                           buffers.first_index + i);
  }
}

template <typename T, bool kMaster>
void launch(const AdamWBuffers& buffers, const float* gradient_scale, const AdamWStep& step, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int64_t blocks = (buffers.count / Pack<T>::kSize + 1) / kThreads + 1;
  // A few waves of blocks over any current GPU; the loop in the kernel takes the rest.
  const int64_t most = 132 * 16;
  adamw_kernel<T, kMaster>
      <<<static_cast<unsigned>(blocks < most ? blocks : most), kThreads, 0, stream>>>(buffers, gradient_scale, step);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("adamw: ") + cudaGetErrorString(error));
}

}  // namespace

void adamw_cuda(const AdamWBuffers& buffers, const float* gradient_scale, const AdamWStep& step, void* stream) {
  if (buffers.count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (buffers.type == AdamWType::float32) {
    launch<float, false>(buffers, gradient_scale, step, cuda_stream);
  } else if (buffers.remainders == nullptr) {
    launch<__nv_bfloat16, false>(buffers, gradient_scale, step, cuda_stream);
  } else {
    launch<__nv_bfloat16, true>(buffers, gradient_scale, step, cuda_stream);
  }
}

}  // namespace headrace
