// One optimizer step: micro-batches forward and backward, the global norm, the refusal of non-finite values, the update.
// Nothing in it waits for the device but the reading of the results at its end. Flow: StepBatches -> [train_step] ->
// StepResult. The loop around it: trainer/train.cpp.
#pragma once

#include "data/batches.h"
#include "models/decoder.h"
#include "optim/adamw.h"

namespace headrace {

struct StepResult {
  double loss = 0;              // mean over the step's trained tokens, without the balancing loss
  double balance_loss = 0;      // unscaled; 0 when the model does not ask for it
  double grad_norm = 0;         // global, before clipping
  bool finite = true;           // false: nothing was updated,
  bool partly_updated = false;  // unless the gradients were applied layer by layer: some layers may have been
};

/// AdamW over all parameters of `decoder`, with weight decay where their layout asks for it.
AdamW make_optimizer(const Decoder& decoder, const OptimizerSection& settings, uint64_t seed);

/// The same batch with its tensors on `device`.
TokenBatch to_device(TokenBatch batch, at::Device device);

/// Gradients of the whole step are those of one batch however it is split: the token loss is divided by the trained tokens of
/// all micro-batches and ranks; the balancing loss of each micro-batch counts by its share of tokens. A step without a trained
/// token has loss 0 and changes no weight by its token loss; one without any token changes nothing. Gradients stay open until
/// the next step begins. When loss or norm is not finite, weights and states stay as they
/// are. With fused_backward in the optimizer's settings there is at most one micro-batch, and each layer is updated as soon as
/// its gradients are final; from the first gradient that is not finite on, no layer is.
StepResult train_step(Decoder& decoder, AdamW& optimizer, const StepBatches& batches, Recompute recompute, double lr);

/// Mean loss over the trained tokens of `batches`' one pass from its beginning, without the balancing loss.
struct EvalResult {
  double loss = 0;
  int64_t num_trained_tokens = 0;
};
EvalResult evaluate(const Decoder& decoder, Batches& batches);

}  // namespace headrace
