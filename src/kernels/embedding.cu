// A block for each position of the sorted ids; only the first one of an id works, through all tokens of that id.
#include "kernels/device.cuh"
#include "kernels/embedding_cuda.h"

namespace headrace {
namespace {

__global__ void embedding_backward_kernel(const bf16* dy, const int64_t* sorted_ids, const int64_t* positions,
                                          int64_t num_tokens, int64_t size, int64_t padding_idx, bf16* weight_grad) {
  const int64_t begin = blockIdx.x, id = sorted_ids[begin];
  if (id == padding_idx || (begin > 0 && sorted_ids[begin - 1] == id)) return;
  constexpr int kUnroll = 8;  // rows in flight: a frequent token has thousands, read by this one block
  for (int64_t i = threadIdx.x * 8; i < size; i += blockDim.x * 8) {
    float sum[8] = {};
    for (int64_t t = begin; t < num_tokens && sorted_ids[t] == id; t += kUnroll) {
      Pack8 rows[kUnroll];
      bool present[kUnroll];
#pragma unroll
      for (int r = 0; r < kUnroll; ++r) {
        present[r] = t + r < num_tokens && sorted_ids[t + r] == id;
        if (present[r]) rows[r] = load_pack(dy + positions[t + r] * size + i);
      }
#pragma unroll
      for (int r = 0; r < kUnroll; ++r) {
        if (!present[r]) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += __bfloat162float(rows[r].at[j]);
      }
    }
    bf16* target = weight_grad + id * size + i;
    Pack8 grad = load_pack(target);
#pragma unroll
    for (int j = 0; j < 8; ++j) grad.at[j] = __float2bfloat16_rn(__bfloat162float(grad.at[j]) + sum[j]);
    store_pack(target, grad);
  }
}

}  // namespace

void embedding_backward_cuda(const void* dy, const int64_t* sorted_ids, const int64_t* positions, int64_t num_tokens,
                             int64_t size, int64_t padding_idx, void* weight_grad, void* stream) {
  embedding_backward_kernel<<<static_cast<unsigned>(num_tokens), threads_for_row(size), 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const bf16*>(dy), sorted_ids, positions, num_tokens, size, padding_idx, static_cast<bf16*>(weight_grad));
  check_launch("embedding_backward");
}

}  // namespace headrace
