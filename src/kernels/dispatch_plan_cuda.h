// CUDA kernels that order (token, choice) pairs by expert: a counting sort by prefix sums, stable, without atomics in the row
// order. Tensor side and meaning: layers/dispatch.h.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int kMaxPlanExperts = 512;

/// Ints of scratch memory that dispatch_plan_cuda needs.
int64_t dispatch_plan_scratch(int64_t pairs, int num_experts);

/// expert_ids [pairs] in [0, num_experts), num_experts at most kMaxPlanExperts. Writes row_of_pair [pairs], its inverse
/// pair_of_row [pairs] and ends [num_experts]. Three small launches; about 40 bytes of traffic a pair.
void dispatch_plan_cuda(const int64_t* expert_ids, int64_t pairs, int num_experts, int64_t* row_of_pair, int64_t* pair_of_row,
                        int32_t* ends, int32_t* scratch, void* stream);

}  // namespace headrace
