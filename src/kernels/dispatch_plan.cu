// A block orders kBlockPairs pairs. 1. Each block counts its pairs of every expert. 2. For each expert, an exclusive prefix sum
// of these counts over the blocks. 3. A pair's row = rows of the experts before + rows of its expert in the blocks before + in
// the warps before + in the lanes before.
#include "kernels/device.cuh"
#include "kernels/dispatch_plan_cuda.h"

namespace headrace {
namespace {

constexpr int kBlockPairs = 1024, kWarps = kBlockPairs / 32;
constexpr int kScanThreads = 256;

__device__ int warp_inclusive_sum(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(0xFFFFFFFFU, x, offset);
    if (lane >= offset) x += below;
  }
  return x;
}

// Exclusive prefix sum over the block and the block's total; `shared` holds 32 ints.
__device__ int block_exclusive_sum(int x, int* shared, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int inclusive = warp_inclusive_sum(x);
  __syncthreads();  // the last use of `shared` is over
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  const int warp_sums = warp_inclusive_sum(lane < warps ? shared[lane] : 0);
  const int before = __shfl_sync(0xFFFFFFFFU, warp_sums, warp == 0 ? 0 : warp - 1);
  *total = __shfl_sync(0xFFFFFFFFU, warp_sums, 31);
  return inclusive - x + (warp == 0 ? 0 : before);
}

__global__ void count_kernel(const int64_t* expert_ids, int64_t pairs, int num_experts, int32_t* counts) {
  __shared__ int block_counts[kMaxPlanExperts];
  for (int e = threadIdx.x; e < num_experts; e += kBlockPairs) block_counts[e] = 0;
  __syncthreads();
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kBlockPairs + threadIdx.x;
  if (pair < pairs) atomicAdd(&block_counts[expert_ids[pair]], 1);  // counts do not depend on the order
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kBlockPairs) {
    counts[static_cast<int64_t>(blockIdx.x) * num_experts + e] = block_counts[e];
  }
}

// One block an expert: counts [blocks, num_experts] become exclusive sums over the blocks, totals [num_experts] their totals.
__global__ void scan_kernel(int32_t* counts, int blocks, int num_experts, int32_t* totals) {
  __shared__ int shared[32];
  int carry = 0;
  for (int begin = 0; begin < blocks; begin += kScanThreads) {
    const int block = begin + static_cast<int>(threadIdx.x);
    int32_t* count = counts + static_cast<int64_t>(block) * num_experts + blockIdx.x;
    int total = 0;
    const int before = block_exclusive_sum(block < blocks ? *count : 0, shared, &total);
    if (block < blocks) *count = carry + before;
    carry += total;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = carry;
}

__global__ void place_kernel(const int64_t* expert_ids, int64_t pairs, int num_experts, const int32_t* before_block,
                             const int32_t* totals, int64_t* row_of_pair, int64_t* pair_of_row, int32_t* ends) {
  __shared__ int shared[32], first_row[kMaxPlanExperts];
  __shared__ uint16_t in_warp[kWarps][kMaxPlanExperts];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int mine = static_cast<int>(threadIdx.x) < num_experts ? totals[threadIdx.x] : 0;
  int total = 0;
  const int expert_begin = block_exclusive_sum(mine, shared, &total);
  if (static_cast<int>(threadIdx.x) < num_experts) {
    first_row[threadIdx.x] = expert_begin + before_block[static_cast<int64_t>(blockIdx.x) * num_experts + threadIdx.x];
    if (blockIdx.x == 0) ends[threadIdx.x] = expert_begin + mine;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) in_warp[w][threadIdx.x] = 0;
  }
  __syncthreads();

  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kBlockPairs + threadIdx.x;
  const int expert = pair < pairs ? static_cast<int>(expert_ids[pair]) : num_experts;
  const unsigned same = __match_any_sync(0xFFFFFFFFU, expert);
  const int rank = __popc(same & ((1U << lane) - 1));
  if (rank == 0 && expert < num_experts) in_warp[warp][expert] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < num_experts) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int count = in_warp[w][threadIdx.x];
      in_warp[w][threadIdx.x] = static_cast<uint16_t>(sum);
      sum += count;
    }
  }
  __syncthreads();
  if (expert == num_experts) return;
  const int64_t row = first_row[expert] + in_warp[warp][expert] + rank;
  row_of_pair[pair] = row;
  pair_of_row[row] = pair;
}

int64_t blocks_for(int64_t pairs) { return (pairs + kBlockPairs - 1) / kBlockPairs; }

}  // namespace

int64_t dispatch_plan_scratch(int64_t pairs, int num_experts) { return (blocks_for(pairs) + 1) * num_experts; }

void dispatch_plan_cuda(const int64_t* expert_ids, int64_t pairs, int num_experts, int64_t* row_of_pair, int64_t* pair_of_row,
                        int32_t* ends, int32_t* scratch, void* stream) {
  if (num_experts > kMaxPlanExperts) throw std::invalid_argument("dispatch_plan: at most 512 experts");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>(blocks_for(pairs));
  int32_t *totals = scratch, *counts = scratch + num_experts;
  count_kernel<<<blocks, kBlockPairs, 0, cuda_stream>>>(expert_ids, pairs, num_experts, counts);
  scan_kernel<<<num_experts, kScanThreads, 0, cuda_stream>>>(counts, static_cast<int>(blocks), num_experts, totals);
  place_kernel<<<blocks, kBlockPairs, 0, cuda_stream>>>(expert_ids, pairs, num_experts, counts, totals, row_of_pair,
                                                        pair_of_row, ends);
  check_launch("dispatch_plan");
}

}  // namespace headrace
