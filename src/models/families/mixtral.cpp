// Mixtral. Reference: transformers 5.17 models/mixtral: every layer sparse, routing weights always renormalised and kept in
// float32, hub names block_sparse_moe.experts.M.{w1 (gate), w3 (up), w2 (down)}.
#include "headrace/error.h"
#include "models/families/common.h"
#include "models/registry.h"

namespace headrace {

DecoderSpec mixtral_spec(const ModelConfig& config) {
  FamilyDefaults defaults;
  defaults.intermediate_size = 14336;
  defaults.num_key_value_heads = 8;
  defaults.max_position_embeddings = 131072;
  defaults.rms_norm_eps = 1e-5;
  defaults.rope_theta = 1e6;
  DecoderSpec spec = base_spec(config, defaults);
  require(config.get_float("router_jitter_noise", 0.0) == 0.0,
          "{}: router_jitter_noise is {}, which the engine does not do. Set it to 0.0 in config.json.", config.origin(),
          config.get_float("router_jitter_noise", 0.0));
  spec.output_router_logits = config.get_bool("output_router_logits", false);
  spec.router_aux_loss_coef = config.get_float("router_aux_loss_coef", 0.001);

  MoeConfig moe;
  moe.hidden_size = spec.hidden_size;
  moe.moe_intermediate_size = spec.layers[0].mlp().intermediate_size;
  moe.router.num_experts = config.find_int({"num_local_experts", "num_experts"}).value_or(8);
  moe.router.top_k = config.get_int("num_experts_per_tok", 2);
  moe.router.norm_topk_prob = true;
  moe.router.weights_in_float32 = true;
  require(moe.router.top_k >= 1 && moe.router.top_k <= moe.router.num_experts,
          "{}: num_experts_per_tok is {}, but it must be between 1 and the {} experts", config.origin(), moe.router.top_k,
          moe.router.num_experts);
  for (LayerSpec& layer : spec.layers) {
    layer.attention.sliding_window = config.get_int("sliding_window", 0);
    layer.feed_forward = moe;
  }
  return spec;
}

WeightMap mixtral_weight_map(const DecoderSpec& spec) {
  WeightMap map = base_weight_map(spec);
  add_expert_pieces(
      map, spec,
      {"model.layers.{}.block_sparse_moe.gate.weight", "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
       "model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "model.layers.{}.block_sparse_moe.experts.{}.w2.weight"});
  return map;
}

}  // namespace headrace
