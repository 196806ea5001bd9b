// Dense feed-forward block (SwiGLU): down(silu(gate x) * (up x)).
// Reference: transformers LlamaMLP.
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

/// Weights or their gradients; biases undefined where the model has none.
struct MlpTensors {
  at::Tensor gate_up;       // [2 * intermediate_size, hidden_size]: gate_proj rows, then up_proj rows
  at::Tensor gate_up_bias;  // [2 * intermediate_size]
  at::Tensor down;          // [hidden_size, intermediate_size]
  at::Tensor down_bias;     // [hidden_size]
};

/// Kept: the pre-activation, 2 * intermediate_size elements a token. The activation is recomputed.
struct MlpSaved {
  at::Tensor gate_up;  // [num_tokens, 2 * intermediate_size]
};

struct MlpForward {
  at::Tensor y;
  MlpSaved saved;
};

/// x [num_tokens, hidden_size], already normed.
MlpForward mlp_forward(const at::Tensor& x, const MlpTensors& weights);

/// Adds to grads and returns dx.
at::Tensor mlp_backward(const at::Tensor& dy, const at::Tensor& x, const MlpSaved& saved, const MlpTensors& weights,
                        const MlpTensors& grads);

}  // namespace headrace
