// MoE block: router -> dispatch -> grouped gate_up -> SwiGLU -> grouped down -> combine, and its memory-lean backward.
// Reference: transformers Qwen3MoeSparseMoeBlock / MixtralSparseMoeBlock; the backward keeps no expert output, because
// <dO, Y> = <dA', A> gives the router's gradient from the recomputed activation (SonicMoE, arXiv 2512.14080).
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/dispatch.h"
#include "layers/router.h"

namespace headrace {

struct MoeConfig {
  int64_t hidden_size = 0, moe_intermediate_size = 0;
  RouterConfig router;
};

/// Weights, or their gradients.
struct MoeTensors {
  at::Tensor router;   // mlp.gate.weight [num_experts, hidden_size]
  at::Tensor gate_up;  // mlp.experts.gate_up_proj [num_experts, 2 * moe_intermediate_size, hidden_size]
  at::Tensor down;     // mlp.experts.down_proj [num_experts, hidden_size, moe_intermediate_size]
};

/// Kept: the experts' pre-activation (2 * moe_intermediate_size elements a token and choice), the routing and the row order
/// (about 36 bytes a token and choice and num_experts elements a token). Dropping `gate_up` (it is recomputed then) leaves the
/// small part.
struct MoeSaved {
  Routing routing;
  DispatchPlan plan;
  at::Tensor gate_up;  // [rows, 2 * moe_intermediate_size]; undefined: recompute it
};

struct MoeForward {
  at::Tensor y;  // [num_tokens, hidden_size]
  MoeSaved saved;
};

/// x [num_tokens, hidden_size], already normed. 0 tokens are fine.
MoeForward moe_forward(const at::Tensor& x, const MoeConfig& config, const MoeTensors& weights);

/// The same with the routing of an earlier forward, for recomputation.
MoeForward moe_forward_routed(const at::Tensor& x, MoeSaved routed, const MoeTensors& weights);

/// Adds to grads and returns dx. balance_grad: see router_backward. saved.gate_up's memory is used up. With
/// `overwrite_experts`, the gradients of gate_up and down are stored, not added.
at::Tensor moe_backward(const at::Tensor& dy, const at::Tensor& balance_grad, const at::Tensor& x, MoeSaved saved,
                        const MoeConfig& config, const MoeTensors& weights, const MoeTensors& grads,
                        bool overwrite_experts = false);

}  // namespace headrace
