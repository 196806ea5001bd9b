// Decoder: the stack of blocks, run forward and backward by hand; no autograd graph exists.
// Flow: TokenBatch -> embedding -> layers -> final norm -> linear + cross-entropy, and back. Next: layers/attention.h,
// layers/moe.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "headrace/token_batch.h"
#include "layers/attention.h"
#include "layers/mlp.h"
#include "layers/moe.h"
#include "layers/norm.h"
#include "models/decoder_spec.h"
#include "models/parameters.h"

namespace headrace {

/// What a layer keeps between its forward and its backward (x_in and x_mid: the residual stream before each block).
///   none       x_in, x_mid, q|k|v, attention out, pre-activation, routing
///   selective  without the feed-forward pre-activation, which is recomputed by one GEMM
///   full       x_in and the routing only; the layer runs forward again
enum class Recompute { none, selective, full };

/// Weights (or gradients) of one layer as views of the flat buffer.
struct LayerTensors {
  at::Tensor input_norm, post_attention_norm;  // [hidden_size]
  AttentionTensors attention;
  std::variant<MlpTensors, MoeTensors> feed_forward;
};

struct DecoderTensors {
  at::Tensor embedding;   // [vocab_size, hidden_size]
  at::Tensor final_norm;  // [hidden_size]
  at::Tensor lm_head;     // [vocab_size, hidden_size]; the embedding itself when tied
  std::vector<LayerTensors> layers;
};

/// The parameters of a spec under their transformers names, in layer order. Adjacent: q, k, v; gate, up.
ParameterLayout decoder_layout(const DecoderSpec& spec);

/// Stretches of the layout whose gradients become final together, the head first, then the layers from last to first, the
/// embedding last. Together they are the whole layout.
struct DecoderStages {
  FlatRange embedding;
  std::vector<FlatRange> layers;
  FlatRange head;  // final norm, and the output head unless tied
};
DecoderStages decoder_stages(const DecoderSpec& spec, const ParameterLayout& layout);

/// Layer n's views of `buffer`, which holds at least that layer; all undefined when the buffer is.
LayerTensors layer_tensors(const DecoderSpec& spec, std::size_t n, const Parameters& parameters, const FlatBuffer& buffer);
DecoderTensors decoder_weights(const DecoderSpec& spec, const Parameters& parameters);

/// Normal(0, initializer_range) for matrices, 1 for norms, 0 for biases and the padding row; drawn on the parameters' device
/// from `generator` (undefined: the device's default one).
void initialize_parameters(const DecoderSpec& spec, const Parameters& parameters,
                           const std::optional<at::Generator>& generator = {});

struct StepLoss {
  at::Tensor loss_sum;      // float32 scalar on the device: sum over trained tokens
  at::Tensor balance_loss;  // float32 scalar; undefined when the spec does not ask for it. Not scaled by its coefficient.
};

struct DecoderRun {
  Recompute recompute = Recompute::none;
  double grad_scale = 1.0;     // gradients are those of grad_scale * loss_sum + balance_scale * coefficient * balance_loss
  double balance_scale = 1.0;  // this micro-batch's share of the step
  /// When set, each stage's gradients go to this function as soon as they are final and are released then, so that a full set
  /// never exists. The function may change the weights of that stage. Not with gradients of an earlier micro-batch.
  std::function<void(const FlatBuffer& gradients)> apply_gradients;
  std::function<void()> after_forward = [] {};  // called between forward (loss head included) and backward; for measurements
};

class Decoder {
 public:
  Decoder(DecoderSpec spec, at::ScalarType dtype, at::Device device);

  const DecoderSpec& spec() const { return spec_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }
  at::Device device() const { return parameters_.flat().device(); }
  at::ScalarType dtype() const { return parameters_.flat().scalar_type(); }

  /// Forward and backward of one micro-batch; gradients are added to the open ones of parameters(), or go to
  /// run.apply_gradients. The batch is on this device.
  StepLoss forward_backward(const TokenBatch& batch, const DecoderRun& run);
  /// Losses alone.
  StepLoss evaluate(const TokenBatch& batch) const;
  /// Logits [num_tokens, vocab_size] in the model's dtype, for tests and tools: the training path never builds them.
  at::Tensor logits(const TokenBatch& batch, std::vector<at::Tensor>* router_logits = nullptr) const;

 private:
  DecoderSpec spec_;
  Parameters parameters_;
  DecoderTensors weights_;
  DecoderStages stages_;
};

}  // namespace headrace
