// What the CUDA kernels share: 16-byte packs of bfloat16, reductions over a warp and a block, launch checks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace headrace {

using bf16 = __nv_bfloat16;

/// Eight bfloat16 in one 16-byte register pack.
struct alignas(16) Pack8 {
  bf16 at[8];
};

__device__ inline Pack8 load_pack(const bf16* p) { return *reinterpret_cast<const Pack8*>(p); }
__device__ inline void store_pack(bf16* p, const Pack8& pack) { *reinterpret_cast<Pack8*>(p) = pack; }
/// The same for memory that is not read soon: it leaves the L2 cache first.
__device__ inline void store_pack_streaming(bf16* p, const Pack8& pack) {
  __stcs(reinterpret_cast<int4*>(p), *reinterpret_cast<const int4*>(&pack));
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, offset);
  return x;
}

/// Sum over the block, given to every thread. `shared` holds 32 floats; the block is a multiple of 32 threads. Always in the
/// same order.
__device__ inline float block_sum(float x, float* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  __syncthreads();  // the last use of `shared` is over
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  float total = lane < warps ? shared[lane] : 0.0F;
  return warp_sum(total);
}

/// Threads of a block that works on one row of `size` elements, a pack each at a time.
inline int threads_for_row(int64_t size) {
  const int64_t packs = size / 8;
  return packs >= 256 ? 256 : static_cast<int>((packs + 31) / 32 * 32);
}

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(error));
}

}  // namespace headrace
