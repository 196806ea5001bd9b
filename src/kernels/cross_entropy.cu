// Online softmax over a row by one block: each thread keeps a running maximum and a sum scaled to it, merged at the end.
#include "kernels/cross_entropy_cuda.h"
#include "kernels/device.cuh"

namespace headrace {
namespace {

constexpr int kThreads = 1024;

struct MaxSum {
  float max, sum;  // sum of exp(x - max)
};

__device__ MaxSum merge(MaxSum a, MaxSum b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, 0.0F};
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

__device__ MaxSum warp_merge(MaxSum x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = merge(x, {__shfl_xor_sync(0xFFFFFFFFU, x.max, offset), __shfl_xor_sync(0xFFFFFFFFU, x.sum, offset)});
  }
  return x;
}

__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(bf16* logits, const int64_t* targets, int64_t vocab_size,
                                                                 float grad_scale, bool with_gradient, float* loss) {
  __shared__ MaxSum shared[kThreads / 32];
  bf16* row = logits + static_cast<int64_t>(blockIdx.x) * vocab_size;
  const int64_t target = targets[blockIdx.x];
  const float target_logit = __bfloat162float(row[target]);  // before any thread overwrites it: see the barrier below

  MaxSum mine = {-INFINITY, 0.0F};
  for (int64_t i = threadIdx.x * 8; i < vocab_size; i += kThreads * 8) {
    const Pack8 pack = load_pack(row + i);
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, __bfloat162float(pack.at[j]));
    MaxSum chunk = {largest, 0.0F};
    if (largest != -INFINITY) {
#pragma unroll
      for (int j = 0; j < 8; ++j) chunk.sum += __expf(__bfloat162float(pack.at[j]) - largest);
    }
    mine = merge(mine, chunk);
  }
  mine = warp_merge(mine);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = warp_merge(shared[threadIdx.x % 32]);
  const float log_sum_exp = mine.max + logf(mine.sum);
  if (threadIdx.x == 0) loss[blockIdx.x] = log_sum_exp - target_logit;
  if (!with_gradient) return;

  for (int64_t i = threadIdx.x * 8; i < vocab_size; i += kThreads * 8) {
    Pack8 pack = load_pack(row + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float p = __expf(__bfloat162float(pack.at[j]) - log_sum_exp);
      pack.at[j] = __float2bfloat16_rn((i + j == target ? p - 1.0F : p) * grad_scale);
    }
    store_pack(row + i, pack);
  }
}

}  // namespace

void cross_entropy_cuda(void* logits, const int64_t* targets, int64_t rows, int64_t vocab_size, float grad_scale,
                        bool with_gradient, float* loss, void* stream) {
  cross_entropy_kernel<<<static_cast<unsigned>(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<bf16*>(logits), targets, vocab_size, grad_scale, with_gradient, loss);
  check_launch("cross_entropy");
}

}  // namespace headrace
