// Rotary position embedding: tables from positions, rotation of query and key heads, and its inverse for the backward.
// Reference: transformers modeling_rope_utils.py and apply_rotary_pos_emb ("half split": component i pairs with i + D/2).
#pragma once

#include <ATen/core/Tensor.h>

#include "config/rope_parameters.h"

namespace headrace {

/// cos and sin [num_tokens, 1, D/2] in the activation dtype, D = number of rotated components (<= head_dim).
struct RopeTables {
  at::Tensor cos, sin;
};

/// position_ids [num_tokens] int64. Angles and tables are computed in float32, scaled by the attention factor, then cast.
RopeTables rope_tables(const RopeFrequencies& frequencies, const at::Tensor& position_ids, at::ScalarType dtype);

/// Rotates the first D components of every head of x [num_tokens, heads, head_dim]; the rest passes through. New tensor.
at::Tensor rope_forward(const at::Tensor& x, const RopeTables& tables);

/// Gradient of rope_forward: the transposed rotation.
at::Tensor rope_backward(const at::Tensor& dy, const RopeTables& tables);

}  // namespace headrace
