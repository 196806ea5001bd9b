// Lane l of a token's warp holds experts l, l + 32, l + 64, ...; each of top_k rounds takes the largest that is left.
#include "kernels/device.cuh"
#include "kernels/router_topk_cuda.h"

namespace headrace {
namespace {

constexpr int kWarps = 4;

struct Choice {
  float value;
  int expert;
};

// The larger value; of equal ones the lower expert.
__device__ Choice better(Choice a, Choice b) {
  return b.value > a.value || (b.value == a.value && b.expert < a.expert) ? b : a;
}

template <int kPerLane>
__global__ void router_topk_kernel(const bf16* logits, int64_t num_tokens, int num_experts, int top_k, bool normalize,
                                   bool keep_float32, int64_t* expert_ids, float* weights) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= num_tokens) return;
  float x[kPerLane];
  bool taken[kPerLane];
  float largest = -INFINITY;
  bool broken = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * 32 + lane;
    taken[i] = expert >= num_experts;
    x[i] = taken[i] ? -INFINITY : __bfloat162float(logits[token * num_experts + expert]);
    broken = broken || isnan(x[i]);
    largest = fmaxf(largest, x[i]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, offset));
  broken = __any_sync(0xFFFFFFFFU, broken);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += taken[i] ? 0.0F : expf(x[i] - largest);
  sum = warp_sum(sum);

  float chosen_sum = 0, mine = 0;  // lane j keeps the weight of choice j: top_k is at most 32
  for (int j = 0; j < top_k; ++j) {
    Choice best = {-INFINITY, 1 << 30};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      // A NaN counts as the lowest value, so that every id is chosen at most once whatever the logits are.
      if (!taken[i]) best = better(best, {isnan(x[i]) ? -INFINITY : x[i], i * 32 + lane});
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      best =
          better(best, {__shfl_xor_sync(0xFFFFFFFFU, best.value, offset), __shfl_xor_sync(0xFFFFFFFFU, best.expert, offset)});
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) taken[i] = taken[i] || i * 32 + lane == best.expert;
    const float probability = broken ? NAN : expf(best.value - largest) / sum;
    chosen_sum += probability;
    if (lane == j) mine = probability;
    if (lane == 0) expert_ids[token * top_k + j] = best.expert;
  }
  if (lane < top_k) {
    float weight = normalize ? mine / chosen_sum : mine;
    if (!keep_float32) weight = __bfloat162float(__float2bfloat16_rn(weight));
    weights[token * top_k + lane] = weight;
  }
}

}  // namespace

void router_topk_cuda(const void* logits, int64_t num_tokens, int num_experts, int top_k, bool normalize, bool keep_float32,
                      int64_t* expert_ids, float* weights, void* stream) {
  if (num_experts > kMaxRouterExperts || top_k > 32)
    throw std::invalid_argument("router_topk: at most 512 experts and top_k 32");
  const auto blocks = static_cast<unsigned>((num_tokens + kWarps - 1) / kWarps);
  const auto launch = [&](auto per_lane) {
    router_topk_kernel<per_lane.value><<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const bf16*>(logits), num_tokens, num_experts, top_k, normalize, keep_float32, expert_ids, weights);
  };
  if (num_experts <= 32) {
    launch(std::integral_constant<int, 1>());
  } else if (num_experts <= 128) {
    launch(std::integral_constant<int, 4>());
  } else {
    launch(std::integral_constant<int, 16>());
  }
  check_launch("router_topk");
}

}  // namespace headrace
