// Dispatch: brings each token to its experts and their outputs back.
// Flow: router -> [dispatch] -> experts -> [combine]. This file is the `local` way (ep_size 1): all experts are on this rank,
// so dispatch is a permutation of rows. The order is stable (within an expert tokens keep their order) and comes from a sort or
// prefix sums, never from atomics, so results repeat from run to run.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace headrace {

/// Where every (token, choice) pair's row lies when rows are grouped by expert. Pair p belongs to token p / top_k.
struct DispatchPlan {
  int64_t num_experts = 0, top_k = 0;
  at::Tensor pair_of_row;          // [rows] int64: the pair that row r serves
  at::Tensor row_of_pair;          // [num_tokens, top_k] int64, inverse of pair_of_row
  at::Tensor ends;                 // [num_experts] int32 on the device: one past the last row of each expert
  std::vector<int64_t> host_ends;  // the same on the host; filled for CPU tensors only (on a GPU it would synchronise)
};

/// expert_ids [num_tokens, top_k] int64 in [0, num_experts).
DispatchPlan make_dispatch_plan(const at::Tensor& expert_ids, int64_t num_experts);

/// Rows of x [num_tokens, n] grouped by expert: [num_tokens * top_k, n].
at::Tensor dispatch(const at::Tensor& x, const DispatchPlan& plan);

/// y[t] = addend[t] + sum over choices of weights[t, j] * rows[row_of_pair[t, j]], summed in float32, rounded once to rows'
/// dtype. weights [num_tokens, top_k] float32; undefined: all ones (the gradient of dispatch). addend [num_tokens, n] or
/// undefined.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const DispatchPlan& plan, const at::Tensor& addend = {});

}  // namespace headrace
