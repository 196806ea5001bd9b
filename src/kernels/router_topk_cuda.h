// CUDA kernel: softmax over the experts and the top_k choices of each token. Tensor side and meaning: layers/router.h.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int64_t kMaxRouterExperts = 512;

/// logits [num_tokens, num_experts] bfloat16; expert_ids [num_tokens, top_k] int64 by descending probability, ties to the lower
/// id; weights [num_tokens, top_k] float: the probabilities, divided by their sum when `normalize`, rounded through bfloat16
/// unless `keep_float32`. A warp a token, logits in registers; num_experts <= kMaxRouterExperts. A NaN logit gives NaN weights,
/// never a repeated id.
void router_topk_cuda(const void* logits, int64_t num_tokens, int num_experts, int top_k, bool normalize, bool keep_float32,
                      int64_t* expert_ids, float* weights, void* stream);

}  // namespace headrace
