// One warp a (token, head): lane l holds components l * kPairs .. of both halves, so that a rotation needs no exchange.
#include "kernels/device.cuh"
#include "kernels/qk_norm_rope_cuda.h"

namespace headrace {
namespace {

constexpr int kWarps = 8;  // a block: 8 heads at a time

template <int kPairs>
struct alignas(2 * kPairs) Half {
  bf16 at[kPairs];
};

// The two halves of a head as a lane sees them, in float.
template <int kPairs>
struct Lane {
  float first[kPairs], second[kPairs];

  __device__ static Lane load(const bf16* head, int lane) {
    using H = Half<kPairs>;
    const H a = reinterpret_cast<const H*>(head)[lane], b = reinterpret_cast<const H*>(head + 32 * kPairs)[lane];
    Lane out;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) out.first[i] = __bfloat162float(a.at[i]), out.second[i] = __bfloat162float(b.at[i]);
    return out;
  }
  __device__ void store(bf16* head, int lane) const {
    using H = Half<kPairs>;
    H a, b;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) a.at[i] = __float2bfloat16_rn(first[i]), b.at[i] = __float2bfloat16_rn(second[i]);
    reinterpret_cast<H*>(head)[lane] = a;
    reinterpret_cast<H*>(head + 32 * kPairs)[lane] = b;
  }
  // direction +1 rotates, -1 rotates back.
  __device__ Lane rotated(const bf16* cos, const bf16* sin, int lane, float direction) const {
    using H = Half<kPairs>;
    const H c = reinterpret_cast<const H*>(cos)[lane], s = reinterpret_cast<const H*>(sin)[lane];
    Lane out;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float ci = __bfloat162float(c.at[i]), si = direction * __bfloat162float(s.at[i]);
      out.first[i] = first[i] * ci - second[i] * si;
      out.second[i] = second[i] * ci + first[i] * si;
    }
    return out;
  }
};

template <int kPairs>
__device__ float inverse_rms(const Lane<kPairs>& x, float eps) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) squares += x.first[i] * x.first[i] + x.second[i] * x.second[i];
  return rsqrtf(warp_sum(squares) / static_cast<float>(64 * kPairs) + eps);
}

template <int kPairs>
__global__ void forward_kernel(QkShape shape, const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const bf16* cos,
                               const bf16* sin, bf16* q, bf16* k) {
  constexpr int kHeadDim = 64 * kPairs;
  const int lane = threadIdx.x % 32;
  const int heads = shape.num_heads + shape.num_key_value_heads;
  const int64_t total = shape.num_tokens * heads, stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < total; item += stride) {
    const int64_t token = item / heads;
    const int head = static_cast<int>(item % heads);
    const bool is_query = head < shape.num_heads;
    auto x = Lane<kPairs>::load(qkv + (token * (heads + shape.num_key_value_heads) + head) * kHeadDim, lane);
    if (q_weight != nullptr) {
      const float rstd = inverse_rms(x, shape.eps);
      const auto w = Lane<kPairs>::load(is_query ? q_weight : k_weight, lane);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        // Rounded where the reference rounds: after the norm and after the weight.
        const float a = __bfloat162float(__float2bfloat16_rn(x.first[i] * rstd));
        const float b = __bfloat162float(__float2bfloat16_rn(x.second[i] * rstd));
        x.first[i] = __bfloat162float(__float2bfloat16_rn(a * w.first[i]));
        x.second[i] = __bfloat162float(__float2bfloat16_rn(b * w.second[i]));
      }
    }
    bf16* out = is_query ? q + (token * shape.num_heads + head) * kHeadDim
                         : k + (token * shape.num_key_value_heads + head - shape.num_heads) * kHeadDim;
    const int64_t table = token * (kHeadDim / 2);
    x.rotated(cos + table, sin + table, lane, 1.0F).store(out, lane);
  }
}

template <int kPairs>
__global__ void backward_kernel(QkShape shape, const bf16* dq, const bf16* dk, const bf16* dv, const bf16* qkv,
                                const bf16* q_weight, const bf16* k_weight, const bf16* cos, const bf16* sin, bf16* dqkv,
                                float* partial) {
  constexpr int kHeadDim = 64 * kPairs;
  __shared__ float sums[kWarps][kHeadDim];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv = shape.num_key_value_heads, all = shape.num_heads + 2 * kv;
  const int64_t total = shape.num_tokens * all, stride = static_cast<int64_t>(gridDim.x) * kWarps;
  Lane<kPairs> q_sum = {}, k_sum = {};
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + warp; item < total; item += stride) {
    const int64_t token = item / all;
    const int head = static_cast<int>(item % all);
    bf16* out = dqkv + item * kHeadDim;
    if (head >= shape.num_heads + kv) {  // values pass through
      Lane<kPairs>::load(dv + (token * kv + head - shape.num_heads - kv) * kHeadDim, lane).store(out, lane);
      continue;
    }
    const bool is_query = head < shape.num_heads;
    const bf16* in =
        is_query ? dq + (token * shape.num_heads + head) * kHeadDim : dk + (token * kv + head - shape.num_heads) * kHeadDim;
    const int64_t table = token * (kHeadDim / 2);
    auto grad = Lane<kPairs>::load(in, lane).rotated(cos + table, sin + table, lane, -1.0F);
    if (q_weight != nullptr) {
      const auto x = Lane<kPairs>::load(qkv + item * kHeadDim, lane);
      const auto w = Lane<kPairs>::load(is_query ? q_weight : k_weight, lane);
      const float rstd = inverse_rms(x, shape.eps);
      const float to_q = is_query ? rstd : 0.0F, to_k = is_query ? 0.0F : rstd;  // no indexing: the sums stay in registers
      float dot = 0;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        q_sum.first[i] += grad.first[i] * x.first[i] * to_q;
        q_sum.second[i] += grad.second[i] * x.second[i] * to_q;
        k_sum.first[i] += grad.first[i] * x.first[i] * to_k;
        k_sum.second[i] += grad.second[i] * x.second[i] * to_k;
        grad.first[i] *= w.first[i], grad.second[i] *= w.second[i];
        dot += grad.first[i] * x.first[i] + grad.second[i] * x.second[i];
      }
      dot = warp_sum(dot) * rstd / static_cast<float>(kHeadDim);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        grad.first[i] = (grad.first[i] - x.first[i] * rstd * dot) * rstd;
        grad.second[i] = (grad.second[i] - x.second[i] * rstd * dot) * rstd;
      }
    }
    grad.store(out, lane);
  }
  if (q_weight == nullptr) return;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      sums[warp][lane * kPairs + i] = which == 0 ? q_sum.first[i] : k_sum.first[i];
      sums[warp][32 * kPairs + lane * kPairs + i] = which == 0 ? q_sum.second[i] : k_sum.second[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kHeadDim; i += blockDim.x) {
      float total_i = 0;
      for (int other = 0; other < kWarps; ++other) total_i += sums[other][i];
      partial[(static_cast<int64_t>(blockIdx.x) * 2 + which) * kHeadDim + i] = total_i;
    }
  }
}

unsigned blocks_for(int64_t items) {
  constexpr int64_t kBlocks = 132 * 8;  // 64 warps on each multiprocessor
  const int64_t needed = (items + kWarps - 1) / kWarps;
  return static_cast<unsigned>(needed < kBlocks ? needed : kBlocks);
}

template <typename Launch>
void with_pairs(int head_dim, const Launch& launch) {
  switch (head_dim) {
    case 64: return launch(std::integral_constant<int, 1>());
    case 128: return launch(std::integral_constant<int, 2>());
    case 256: return launch(std::integral_constant<int, 4>());
    default: throw std::invalid_argument("qk_norm_rope: head_dim " + std::to_string(head_dim) + " is not 64, 128 or 256");
  }
}

}  // namespace

void qk_norm_rope_cuda(const QkShape& shape, const void* qkv, const void* q_weight, const void* k_weight, const void* cos,
                       const void* sin, void* q, void* k, void* stream) {
  const unsigned blocks = blocks_for(shape.num_tokens * (shape.num_heads + shape.num_key_value_heads));
  with_pairs(shape.head_dim, [&](auto pairs) {
    forward_kernel<pairs.value><<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(
        shape, static_cast<const bf16*>(qkv), static_cast<const bf16*>(q_weight), static_cast<const bf16*>(k_weight),
        static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), static_cast<bf16*>(q), static_cast<bf16*>(k));
  });
  check_launch("qk_norm_rope");
}

int64_t qk_norm_rope_partials(const QkShape& shape) {
  return blocks_for(shape.num_tokens * (shape.num_heads + 2 * shape.num_key_value_heads));
}

void qk_norm_rope_backward_cuda(const QkShape& shape, const void* dq, const void* dk, const void* dv, const void* qkv,
                                const void* q_weight, const void* k_weight, const void* cos, const void* sin, void* dqkv,
                                float* partial, void* stream) {
  const auto blocks = static_cast<unsigned>(qk_norm_rope_partials(shape));
  with_pairs(shape.head_dim, [&](auto pairs) {
    backward_kernel<pairs.value><<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(
        shape, static_cast<const bf16*>(dq), static_cast<const bf16*>(dk), static_cast<const bf16*>(dv),
        static_cast<const bf16*>(qkv), static_cast<const bf16*>(q_weight), static_cast<const bf16*>(k_weight),
        static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), static_cast<bf16*>(dqkv), partial);
  });
  check_launch("qk_norm_rope_backward");
}

}  // namespace headrace
