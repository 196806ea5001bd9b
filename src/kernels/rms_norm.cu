// RMSNorm kernels: a block per row, eight elements a thread and pack, float32 sums, one pass over memory.
#include "kernels/device.cuh"
#include "kernels/rms_norm_cuda.h"

namespace headrace {
namespace {

constexpr int kMaxPacks = 4;  // packs a thread holds: 8192 elements a row at 256 threads

template <int kPacks>
__global__ void add_rms_norm_kernel(const bf16* x, const bf16* delta, const bf16* weight, float eps, int64_t size, bf16* sum,
                                    bf16* y, float* rstd) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x * size;
  float values[kPacks][8];
  float squares = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = (static_cast<int64_t>(p) * blockDim.x + threadIdx.x) * 8;
    if (i >= size) continue;
    Pack8 a = load_pack(x + row + i);
    if (delta != nullptr) {
      const Pack8 b = load_pack(delta + row + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) a.at[j] = __float2bfloat16_rn(__bfloat162float(a.at[j]) + __bfloat162float(b.at[j]));
      store_pack(sum + row + i, a);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      values[p][j] = __bfloat162float(a.at[j]);
      squares += values[p][j] * values[p][j];
    }
  }
  const float scale = rsqrtf(block_sum(squares, shared) / static_cast<float>(size) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = (static_cast<int64_t>(p) * blockDim.x + threadIdx.x) * 8;
    if (i >= size) continue;
    const Pack8 w = load_pack(weight + i);
    Pack8 out;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float rounded = __bfloat162float(__float2bfloat16_rn(values[p][j] * scale));
      out.at[j] = __float2bfloat16_rn(rounded * __bfloat162float(w.at[j]));
    }
    store_pack(y + row + i, out);
  }
}

__global__ void apply_kernel(const bf16* x, const bf16* weight, const float* rstd, int64_t size, bf16* y) {
  const int64_t row = blockIdx.x * size;
  const float scale = rstd[blockIdx.x];
  for (int64_t i = threadIdx.x * 8; i < size; i += blockDim.x * 8) {
    const Pack8 a = load_pack(x + row + i), w = load_pack(weight + i);
    Pack8 out;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float rounded = __bfloat162float(__float2bfloat16_rn(__bfloat162float(a.at[j]) * scale));
      out.at[j] = __float2bfloat16_rn(rounded * __bfloat162float(w.at[j]));
    }
    store_pack(y + row + i, out);
  }
}

// A block takes rows blockIdx.x, blockIdx.x + gridDim.x, ...: its sums of weight gradients stay in registers.
template <int kPacks>
__global__ void backward_kernel(const bf16* dy, const bf16* x, const bf16* weight, const float* rstd, const bf16* dresidual,
                                int64_t rows, int64_t size, bf16* dx, float* partial) {
  __shared__ float shared[32];
  float weight_grad[kPacks][8] = {};
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const int64_t row = r * size;
    const float scale = rstd[r];
    float grad[kPacks][8], normed[kPacks][8];
    float dot = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t i = (static_cast<int64_t>(p) * blockDim.x + threadIdx.x) * 8;
      if (i >= size) continue;
      const Pack8 d = load_pack(dy + row + i), a = load_pack(x + row + i), w = load_pack(weight + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float dyj = __bfloat162float(d.at[j]);
        normed[p][j] = __bfloat162float(a.at[j]) * scale;
        weight_grad[p][j] += dyj * normed[p][j];
        grad[p][j] = dyj * __bfloat162float(w.at[j]);
        dot += grad[p][j] * normed[p][j];
      }
    }
    dot = block_sum(dot, shared) / static_cast<float>(size);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t i = (static_cast<int64_t>(p) * blockDim.x + threadIdx.x) * 8;
      if (i >= size) continue;
      Pack8 residual = {}, out;
      if (dresidual != nullptr) residual = load_pack(dresidual + row + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float through = (grad[p][j] - normed[p][j] * dot) * scale;
        out.at[j] = __float2bfloat16_rn(dresidual != nullptr ? through + __bfloat162float(residual.at[j]) : through);
      }
      store_pack(dx + row + i, out);
    }
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = (static_cast<int64_t>(p) * blockDim.x + threadIdx.x) * 8;
    if (i >= size) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) partial[blockIdx.x * size + i + j] = weight_grad[p][j];
  }
}

template <typename Launch>
void with_packs(int64_t size, int threads, const Launch& launch) {
  const int64_t packs = (size / 8 + threads - 1) / threads;
  if (packs <= 1) {
    launch(std::integral_constant<int, 1>());
  } else if (packs <= 2) {
    launch(std::integral_constant<int, 2>());
  } else {
    launch(std::integral_constant<int, kMaxPacks>());
  }
}

}  // namespace

void add_rms_norm_cuda(const void* x, const void* delta, const void* weight, float eps, int64_t rows, int64_t size, void* sum,
                       void* y, float* rstd, void* stream) {
  const int threads = threads_for_row(size);
  with_packs(size, threads, [&](auto packs) {
    add_rms_norm_kernel<packs.value><<<static_cast<unsigned>(rows), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const bf16*>(x), static_cast<const bf16*>(delta), static_cast<const bf16*>(weight), eps, size,
        static_cast<bf16*>(sum), static_cast<bf16*>(y), rstd);
  });
  check_launch("add_rms_norm");
}

void rms_norm_apply_cuda(const void* x, const void* weight, const float* rstd, int64_t rows, int64_t size, void* y,
                         void* stream) {
  apply_kernel<<<static_cast<unsigned>(rows), threads_for_row(size), 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const bf16*>(x), static_cast<const bf16*>(weight), rstd, size, static_cast<bf16*>(y));
  check_launch("rms_norm_apply");
}

int64_t rms_norm_backward_partials(int64_t rows) {
  constexpr int64_t kBlocks = 132 * 4;  // four blocks of 256 threads on each multiprocessor of an H100/H200
  return rows < kBlocks ? rows : kBlocks;
}

void rms_norm_backward_cuda(const void* dy, const void* x, const void* weight, const float* rstd, const void* dresidual,
                            int64_t rows, int64_t size, void* dx, float* partial_weight_grad, void* stream) {
  const int threads = threads_for_row(size);
  with_packs(size, threads, [&](auto packs) {
    backward_kernel<packs.value>
        <<<static_cast<unsigned>(rms_norm_backward_partials(rows)), threads, 0, static_cast<cudaStream_t>(stream)>>>(
            static_cast<const bf16*>(dy), static_cast<const bf16*>(x), static_cast<const bf16*>(weight), rstd,
            static_cast<const bf16*>(dresidual), rows, size, static_cast<bf16*>(dx), partial_weight_grad);
  });
  check_launch("rms_norm_backward");
}

}  // namespace headrace
