// Output head and loss in one: logits = h W^T and their cross-entropy, a chunk of tokens at a time, so that the logits
// [num_tokens, vocab_size] never exist whole. Positions that are not trained are skipped altogether.
// Flow: final norm -> [linear cross-entropy] -> loss. Reference: transformers ForCausalLMLoss (logits in the model's dtype,
// loss in float32).
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

struct LinearCrossEntropySettings {
  // Tokens whose logits exist at a time: chunk_size * vocab_size * element size bytes (on the plain path another 4 each). Each
  // chunk costs one pass over weight_grad, so a chunk should be many times the hidden size's share of a GEMM's cost.
  // 0: 4096 for 16-bit types, else 2048.
  int64_t chunk_size = 0;
};

struct LinearCrossEntropy {
  at::Tensor loss_sum;  // float32 scalar: sum of the losses of trained positions (0 when there are none)
  at::Tensor dh;        // [num_tokens, hidden_size]; undefined without gradients
};

/// The loss alone. h [num_tokens, hidden_size], weight [vocab_size, hidden_size], targets [num_tokens] int64 with -100 = not
/// trained, num_trained = how many targets are not -100 (the caller knows it without asking the device).
LinearCrossEntropy linear_cross_entropy_forward(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& targets,
                                                int64_t num_trained, const LinearCrossEntropySettings& settings = {});

/// Loss and gradients of grad_scale * loss_sum in one pass: each chunk's logits are overwritten by their gradient, which goes
/// into dh and, added, into weight_grad (undefined: not wanted). With `overwrite`, weight_grad is stored, whatever was there
/// before (0 when nothing is trained). The loss is the last thing a forward does, so its gradient scale (1 / trained tokens of
/// the whole step) is known by then and the logits need not be computed twice.
LinearCrossEntropy linear_cross_entropy_forward_backward(const at::Tensor& h, const at::Tensor& weight,
                                                         const at::Tensor& targets, int64_t num_trained, double grad_scale,
                                                         const at::Tensor& weight_grad, bool overwrite = false,
                                                         const LinearCrossEntropySettings& settings = {});

}  // namespace headrace
