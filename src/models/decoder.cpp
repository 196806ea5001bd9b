#include "models/decoder.h"

#include <ATen/TensorOperators.h>

#include <algorithm>

#include "headrace/error.h"
#include "layers/embedding.h"
#include "layers/linear.h"
#include "layers/linear_cross_entropy.h"

namespace headrace {
namespace {

// What all layers of one micro-batch share.
struct Context {
  const DecoderSpec& spec;
  const TokenBatch& batch;
  RopeTables rope;
};

Context make_context(const DecoderSpec& spec, const TokenBatch& batch, at::ScalarType dtype) {
  const RopeFrequencies frequencies = rope_frequencies(spec.rope, spec.head_dim(), batch.max_document_length);
  return {spec, batch, rope_tables(frequencies, batch.position_ids, dtype)};
}

struct LayerSaved {
  at::Tensor x_in;  // residual stream before attention
  NormSaved input_norm;
  std::optional<AttentionSaved> attention;  // absent: recompute
  at::Tensor x_mid;                         // residual stream before the feed-forward; undefined: recompute
  NormSaved post_attention_norm;
  MlpSaved mlp;  // gate_up undefined: recompute
  MoeSaved moe;
};

// A layer's forward returns the residual stream and the feed-forward's output apart: the next norm adds them.
struct LayerForward {
  at::Tensor x_mid, delta;
  LayerSaved saved;
};

struct Attended {
  AddNormForward post;
  AttentionSaved attention;
};

// From the normed input to the normed input of the feed-forward.
Attended attend(const Context& context, const LayerSpec& layer, const LayerTensors& weights, const at::Tensor& x_in,
                const at::Tensor& normed) {
  AttentionForward attention = attention_forward(normed, layer.attention, weights.attention, context.rope, context.batch);
  return {add_rms_norm_forward(x_in, attention.y, weights.post_attention_norm, context.spec.rms_norm_eps),
          std::move(attention.saved)};
}

LayerForward layer_forward(const Context& context, const LayerSpec& layer, const LayerTensors& weights,
                           const at::Tensor& residual, const at::Tensor& delta) {
  LayerForward result;
  LayerSaved& saved = result.saved;
  AddNormForward input = add_rms_norm_forward(residual, delta, weights.input_norm, context.spec.rms_norm_eps);
  saved.x_in = std::move(input.sum);
  saved.input_norm = std::move(input.saved);
  Attended attended = attend(context, layer, weights, saved.x_in, input.y);
  saved.attention = std::move(attended.attention);
  saved.x_mid = attended.post.sum;
  saved.post_attention_norm = std::move(attended.post.saved);
  result.x_mid = std::move(attended.post.sum);
  if (layer.is_moe()) {
    MoeForward forward = moe_forward(attended.post.y, layer.moe(), std::get<MoeTensors>(weights.feed_forward));
    result.delta = std::move(forward.y);
    saved.moe = std::move(forward.saved);
  } else {
    MlpForward forward = mlp_forward(attended.post.y, std::get<MlpTensors>(weights.feed_forward));
    result.delta = std::move(forward.y);
    saved.mlp = std::move(forward.saved);
  }
  return result;
}

void drop_recomputable(LayerSaved& saved, Recompute recompute) {
  if (recompute == Recompute::none) return;
  saved.mlp.gate_up.reset();
  saved.moe.gate_up.reset();
  if (recompute == Recompute::full) {
    saved.attention.reset();
    saved.x_mid.reset();
  }
}

// dy: gradient of the residual stream after the layer (it reaches both x_mid and the feed-forward's output). Returns that of
// x_in. Norms of saved rows are computed where they are used and let go: a row-wise pass costs less than memory at the peak.
at::Tensor layer_backward(const Context& context, const LayerSpec& layer, const LayerTensors& weights,
                          const LayerTensors& grads, LayerSaved saved, at::Tensor dy, const at::Tensor& balance_grad,
                          bool overwrite_experts) {
  const auto attention_input = [&] { return rms_norm_apply(saved.x_in, weights.input_norm, saved.input_norm); };
  if (!saved.attention.has_value()) {
    Attended attended = attend(context, layer, weights, saved.x_in, attention_input());
    saved.attention = std::move(attended.attention);
    saved.x_mid = std::move(attended.post.sum);
  }
  at::Tensor x = rms_norm_apply(saved.x_mid, weights.post_attention_norm, saved.post_attention_norm), dx;
  if (layer.is_moe()) {
    dx = moe_backward(dy, balance_grad, x, std::move(saved.moe), layer.moe(), std::get<MoeTensors>(weights.feed_forward),
                      std::get<MoeTensors>(grads.feed_forward), overwrite_experts);
  } else {
    const auto& mlp = std::get<MlpTensors>(weights.feed_forward);
    if (!saved.mlp.gate_up.defined()) saved.mlp.gate_up = linear_forward(x, mlp.gate_up, mlp.gate_up_bias);
    dx = mlp_backward(dy, x, saved.mlp, mlp, std::get<MlpTensors>(grads.feed_forward));
  }
  const at::Tensor dx_mid = rms_norm_backward(dx, saved.x_mid, weights.post_attention_norm, saved.post_attention_norm,
                                              grads.post_attention_norm, /*dresidual=*/dy);
  x.reset(), dx.reset(), dy.reset(), saved.x_mid.reset(), saved.mlp.gate_up.reset();
  const at::Tensor dnormed = attention_backward(dx_mid, attention_input(), *saved.attention, layer.attention, weights.attention,
                                                grads.attention, context.rope, context.batch);
  return rms_norm_backward(dnormed, saved.x_in, weights.input_norm, saved.input_norm, grads.input_norm, /*dresidual=*/dx_mid);
}

// The forward without a backward: calls `each(layer, saved)` and forgets the saved sets. Returns the final hidden states.
template <typename Each>
at::Tensor forward_only(const Context& context, const DecoderTensors& weights, const Each& each) {
  at::Tensor residual = embedding_forward(context.batch.input_ids, weights.embedding), delta;
  for (std::size_t n = 0; n < weights.layers.size(); ++n) {
    LayerForward forward = layer_forward(context, context.spec.layers[n], weights.layers[n], residual, delta);
    each(context.spec.layers[n], forward.saved);
    residual = std::move(forward.x_mid);
    delta = std::move(forward.delta);
  }
  return add_rms_norm_forward(residual, delta, weights.final_norm, context.spec.rms_norm_eps).y;
}

}  // namespace

Decoder::Decoder(DecoderSpec spec, at::ScalarType dtype, at::Device device)
    : spec_(std::move(spec)),
      parameters_(decoder_layout(spec_), dtype, device),
      weights_(decoder_weights(spec_, parameters_)),
      stages_(decoder_stages(spec_, parameters_.layout())) {}

StepLoss Decoder::forward_backward(const TokenBatch& batch, const DecoderRun& run) {
  check_argument(!run.apply_gradients || parameters_.gradients().empty(),
                 "gradients of several micro-batches cannot be applied one by one");
  const auto finished = [&](const FlatBuffer& gradients) {
    if (!run.apply_gradients) return;
    run.apply_gradients(gradients);
    parameters_.release_gradients(gradients.range());
  };
  const Context context = make_context(spec_, batch, dtype());
  BalanceLoss balance(spec_.num_experts());
  std::vector<LayerSaved> saved(spec_.layers.size());

  at::Tensor residual = embedding_forward(batch.input_ids, weights_.embedding), delta;
  for (std::size_t n = 0; n < saved.size(); ++n) {
    LayerForward forward = layer_forward(context, spec_.layers[n], weights_.layers[n], residual, delta);
    if (spec_.output_router_logits && spec_.layers[n].is_moe()) balance.add(forward.saved.moe.routing);
    residual = std::move(forward.x_mid);
    delta = std::move(forward.delta);
    saved[n] = std::move(forward.saved);
    drop_recomputable(saved[n], run.recompute);
  }
  AddNormForward last = add_rms_norm_forward(residual, delta, weights_.final_norm, spec_.rms_norm_eps);
  residual.reset(), delta.reset();
  const auto head_grads = parameters_.open_gradients(stages_.head);
  // A tied output head is the embedding: the look-ups' part of its gradient comes last.
  const bool tied = spec_.tie_word_embeddings;
  const auto lm_head_grads = tied ? parameters_.open_gradients(stages_.embedding) : head_grads;
  LinearCrossEntropy head = linear_cross_entropy_forward_backward(
      last.y, weights_.lm_head, batch.targets, batch.num_trained_tokens, run.grad_scale,
      parameters_.view(lm_head_grads.buffer, tied ? "model.embed_tokens.weight" : "lm_head.weight"),
      /*overwrite=*/lm_head_grads.is_new);
  StepLoss loss{head.loss_sum, {}};
  at::Tensor balance_grad;
  if (spec_.output_router_logits) {
    loss.balance_loss = balance.value();
    balance_grad = balance.grad(run.balance_scale * spec_.router_aux_loss_coef);
  }

  run.after_forward();

  at::Tensor dx = rms_norm_backward(head.dh, last.sum, weights_.final_norm, last.saved,
                                    parameters_.view(head_grads.buffer, "model.norm.weight"));
  head.dh.reset(), last = {};
  finished(head_grads.buffer);
  for (std::size_t n = saved.size(); n-- > 0;) {
    const auto [grads, is_new] = parameters_.open_gradients(stages_.layers[n]);
    dx = layer_backward(context, spec_.layers[n], weights_.layers[n], layer_tensors(spec_, n, parameters_, grads),
                        std::move(saved[n]), std::move(dx), balance_grad, /*overwrite_experts=*/is_new);
    finished(grads);
  }
  const FlatBuffer embedding_grads = parameters_.open_gradients(stages_.embedding).buffer;
  embedding_backward(dx, batch.input_ids, parameters_.view(embedding_grads, "model.embed_tokens.weight"), spec_.padding_idx);
  finished(embedding_grads);
  return loss;
}

StepLoss Decoder::evaluate(const TokenBatch& batch) const {
  const Context context = make_context(spec_, batch, dtype());
  BalanceLoss balance(spec_.num_experts());
  const at::Tensor h = forward_only(context, weights_, [&](const LayerSpec& layer, const LayerSaved& saved) {
    if (spec_.output_router_logits && layer.is_moe()) balance.add(saved.moe.routing);
  });
  StepLoss loss{linear_cross_entropy_forward(h, weights_.lm_head, batch.targets, batch.num_trained_tokens).loss_sum, {}};
  if (spec_.output_router_logits) loss.balance_loss = balance.value();
  return loss;
}

at::Tensor Decoder::logits(const TokenBatch& batch, std::vector<at::Tensor>* router_logits) const {
  const Context context = make_context(spec_, batch, dtype());
  const at::Tensor h = forward_only(context, weights_, [&](const LayerSpec& layer, const LayerSaved& saved) {
    if (router_logits != nullptr && layer.is_moe()) router_logits->push_back(saved.moe.routing.logits);
  });
  return linear_forward(h, weights_.lm_head, {});
}

}  // namespace headrace
