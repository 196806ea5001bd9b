// TokenBatch: what one micro-batch is to the model. There is no padding: the documents of all rows lie one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace headrace {

struct TokenBatch {
  at::Tensor input_ids;     // [num_tokens] int64
  at::Tensor targets;       // [num_tokens] int64: the token to predict at each position (already shifted), -100 = not trained
  at::Tensor position_ids;  // [num_tokens] int64, restart at 0 in every document
  at::Tensor cu_seqlens;    // [num_documents + 1] int32, cumulative document lengths, same device as input_ids
  std::vector<int64_t> document_bounds;  // the same bounds on the host
  int64_t max_document_length = 0;       // tokens
  int64_t num_trained_tokens = 0;        // targets that are not -100
  int64_t num_tokens() const { return input_ids.defined() ? input_ids.size(0) : 0; }
};

}  // namespace headrace
