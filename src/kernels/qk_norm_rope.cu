// A group of head_dim / 16 lanes a (token, head): each lane holds 8 components of both halves, so that a rotation needs no
// exchange and every access is 16 bytes wide.
#include "kernels/device.cuh"
#include "kernels/qk_norm_rope_cuda.h"

namespace headrace {
namespace {

constexpr int kThreads = 256;

// The two halves of a head as a lane sees them, in float.
template <int kLanes>
struct Lane {
  float first[8], second[8];

  __device__ static Lane load(const bf16* head, int lane) {
    const Pack8 a = load_pack(head + lane * 8), b = load_pack(head + (kLanes + lane) * 8);
    Lane out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.first[i] = __bfloat162float(a.at[i]), out.second[i] = __bfloat162float(b.at[i]);
    return out;
  }
  __device__ void store(bf16* head, int lane) const {
    Pack8 a, b;
#pragma unroll
    for (int i = 0; i < 8; ++i) a.at[i] = __float2bfloat16_rn(first[i]), b.at[i] = __float2bfloat16_rn(second[i]);
    store_pack(head + lane * 8, a);
    store_pack(head + (kLanes + lane) * 8, b);
  }
  // direction +1 rotates, -1 rotates back.
  __device__ void rotate(const bf16* cos, const bf16* sin, int lane, float direction) {
    const Pack8 c = load_pack(cos + lane * 8), s = load_pack(sin + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float ci = __bfloat162float(c.at[i]), si = direction * __bfloat162float(s.at[i]);
      const float a = first[i], b = second[i];
      first[i] = a * ci - b * si;
      second[i] = b * ci + a * si;
    }
  }
};

// All lanes of the warp take part.
template <int kLanes>
__device__ float group_sum(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, offset);
  return x;
}

template <int kLanes>
__device__ float inverse_rms(const Lane<kLanes>& x, float eps) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += x.first[i] * x.first[i] + x.second[i] * x.second[i];
  return rsqrtf(group_sum<kLanes>(squares) / static_cast<float>(16 * kLanes) + eps);
}

// Calls body(item, active) for every item of this group; a warp's groups stay together, the last ones perhaps inactive.
template <int kLanes, typename Body>
__device__ void for_each_item(unsigned total, const Body& body) {
  constexpr unsigned kGroups = kThreads / kLanes, kGroupsOfWarp = 32 / kLanes;
  const unsigned in_warp = (threadIdx.x % 32) / kLanes, warp = threadIdx.x / 32;
  for (unsigned first = blockIdx.x * kGroups + warp * kGroupsOfWarp; first < total; first += gridDim.x * kGroups) {
    body(first + in_warp, first + in_warp < total);
  }
}

template <int kLanes>
__global__ void forward_kernel(QkShape shape, const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const bf16* cos,
                               const bf16* sin, bf16* q, bf16* k) {
  constexpr int kHeadDim = 16 * kLanes;
  const int lane = threadIdx.x % kLanes;
  const unsigned num_heads = shape.num_heads, kv = shape.num_key_value_heads, heads = num_heads + kv;
  for_each_item<kLanes>(static_cast<unsigned>(shape.num_tokens) * heads, [&](unsigned item, bool active) {
    const unsigned token = item / heads, head = item % heads;
    const bool is_query = head < num_heads;
    Lane<kLanes> x = {};
    if (active) x = Lane<kLanes>::load(qkv + (static_cast<int64_t>(token) * (heads + kv) + head) * kHeadDim, lane);
    if (q_weight != nullptr) {
      const float rstd = inverse_rms(x, shape.eps);
      const auto w = Lane<kLanes>::load(is_query ? q_weight : k_weight, lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Rounded where the reference rounds: after the norm and after the weight.
        const float a = __bfloat162float(__float2bfloat16_rn(x.first[i] * rstd));
        const float b = __bfloat162float(__float2bfloat16_rn(x.second[i] * rstd));
        x.first[i] = __bfloat162float(__float2bfloat16_rn(a * w.first[i]));
        x.second[i] = __bfloat162float(__float2bfloat16_rn(b * w.second[i]));
      }
    }
    if (!active) return;
    bf16* out = is_query ? q + (static_cast<int64_t>(token) * num_heads + head) * kHeadDim
                         : k + (static_cast<int64_t>(token) * kv + head - num_heads) * kHeadDim;
    const int64_t table = static_cast<int64_t>(token) * (kHeadDim / 2);
    x.rotate(cos + table, sin + table, lane, 1.0F);
    x.store(out, lane);
  });
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(QkShape shape, const bf16* dq, const bf16* dk, const bf16* dv, const bf16* qkv, const bf16* q_weight,
                    const bf16* k_weight, const bf16* cos, const bf16* sin, bf16* dqkv, float* partial) {
  constexpr int kHeadDim = 16 * kLanes, kGroups = kThreads / kLanes;
  __shared__ float sums[kGroups][kHeadDim];
  const int lane = threadIdx.x % kLanes;
  const unsigned num_heads = shape.num_heads, kv = shape.num_key_value_heads, all = num_heads + 2 * kv;
  Lane<kLanes> q_sum = {}, k_sum = {};
  for_each_item<kLanes>(static_cast<unsigned>(shape.num_tokens) * all, [&](unsigned item, bool active) {
    const int64_t token = item / all;
    const unsigned head = item % all;
    const bool is_query = head < num_heads, is_value = head >= num_heads + kv;
    const bf16* in = is_query ? dq + (token * num_heads + head) * kHeadDim
                              : (is_value ? dv + (token * kv + head - num_heads - kv) * kHeadDim
                                          : dk + (token * kv + head - num_heads) * kHeadDim);
    Lane<kLanes> grad = {};
    if (active) grad = Lane<kLanes>::load(in, lane);
    if (active && !is_value) {
      const int64_t table = token * (kHeadDim / 2);
      grad.rotate(cos + table, sin + table, lane, -1.0F);
    }
    if (q_weight != nullptr) {
      Lane<kLanes> x = {};
      if (active && !is_value) x = Lane<kLanes>::load(qkv + static_cast<int64_t>(item) * kHeadDim, lane);
      const auto w = Lane<kLanes>::load(is_query ? q_weight : k_weight, lane);
      const float rstd = inverse_rms(x, shape.eps);
      const float to_q = is_query ? rstd : 0.0F, to_k = is_query ? 0.0F : rstd;  // no indexing: the sums stay in registers
      float dot = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        q_sum.first[i] += grad.first[i] * x.first[i] * to_q;
        q_sum.second[i] += grad.second[i] * x.second[i] * to_q;
        k_sum.first[i] += grad.first[i] * x.first[i] * to_k;
        k_sum.second[i] += grad.second[i] * x.second[i] * to_k;
        dot += grad.first[i] * w.first[i] * x.first[i] + grad.second[i] * w.second[i] * x.second[i];
      }
      dot = group_sum<kLanes>(dot) * rstd / static_cast<float>(kHeadDim);
      if (!is_value) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          grad.first[i] = (grad.first[i] * w.first[i] - x.first[i] * rstd * dot) * rstd;
          grad.second[i] = (grad.second[i] * w.second[i] - x.second[i] * rstd * dot) * rstd;
        }
      }
    }
    if (active) grad.store(dqkv + static_cast<int64_t>(item) * kHeadDim, lane);
  });
  if (q_weight == nullptr) return;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[threadIdx.x / kLanes][lane * 8 + i] = which == 0 ? q_sum.first[i] : k_sum.first[i];
      sums[threadIdx.x / kLanes][(kLanes + lane) * 8 + i] = which == 0 ? q_sum.second[i] : k_sum.second[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kHeadDim; i += kThreads) {
      float total_i = 0;
      for (int group = 0; group < kGroups; ++group) total_i += sums[group][i];
      partial[(static_cast<int64_t>(blockIdx.x) * 2 + which) * kHeadDim + i] = total_i;
    }
  }
}

unsigned blocks_for(const QkShape& shape, int64_t heads) {
  constexpr int64_t kBlocks = 132 * 8;  // a few waves of blocks; the loop in the kernel takes the rest
  const int64_t items = shape.num_tokens * heads, groups = kThreads * 16 / shape.head_dim;
  if (items >= int64_t{1} << 31) throw std::invalid_argument("qk_norm_rope: more than 2^31 heads in one batch");
  const int64_t needed = (items + groups - 1) / groups;
  return static_cast<unsigned>(needed < kBlocks ? needed : kBlocks);
}

template <typename Launch>
void with_lanes(int head_dim, const Launch& launch) {
  switch (head_dim) {
    case 64: return launch(std::integral_constant<int, 4>());
    case 128: return launch(std::integral_constant<int, 8>());
    case 256: return launch(std::integral_constant<int, 16>());
    default: throw std::invalid_argument("qk_norm_rope: head_dim " + std::to_string(head_dim) + " is not 64, 128 or 256");
  }
}

}  // namespace

void qk_norm_rope_cuda(const QkShape& shape, const void* qkv, const void* q_weight, const void* k_weight, const void* cos,
                       const void* sin, void* q, void* k, void* stream) {
  const unsigned blocks = blocks_for(shape, shape.num_heads + shape.num_key_value_heads);
  with_lanes(shape.head_dim, [&](auto lanes) {
    forward_kernel<lanes.value><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        shape, static_cast<const bf16*>(qkv), static_cast<const bf16*>(q_weight), static_cast<const bf16*>(k_weight),
        static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), static_cast<bf16*>(q), static_cast<bf16*>(k));
  });
  check_launch("qk_norm_rope");
}

int64_t qk_norm_rope_partials(const QkShape& shape) {
  return blocks_for(shape, shape.num_heads + 2 * shape.num_key_value_heads);
}

void qk_norm_rope_backward_cuda(const QkShape& shape, const void* dq, const void* dk, const void* dv, const void* qkv,
                                const void* q_weight, const void* k_weight, const void* cos, const void* sin, void* dqkv,
                                float* partial, void* stream) {
  const auto blocks = static_cast<unsigned>(qk_norm_rope_partials(shape));
  with_lanes(shape.head_dim, [&](auto lanes) {
    backward_kernel<lanes.value><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        shape, static_cast<const bf16*>(dq), static_cast<const bf16*>(dk), static_cast<const bf16*>(dv),
        static_cast<const bf16*>(qkv), static_cast<const bf16*>(q_weight), static_cast<const bf16*>(k_weight),
        static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), static_cast<bf16*>(dqkv), partial);
  });
  check_launch("qk_norm_rope_backward");
}

}  // namespace headrace
