// Qwen3 MoE. Reference: transformers 5.17 models/qwen3_moe. The config key num_experts becomes num_local_experts in files that
// transformers v5 wrote; both are read.
#include <set>

#include "headrace/error.h"
#include "models/families/common.h"
#include "models/registry.h"

namespace headrace {

DecoderSpec qwen3_moe_spec(const ModelConfig& config) {
  FamilyDefaults defaults;
  defaults.vocab_size = 151936;
  defaults.hidden_size = 2048;
  defaults.intermediate_size = 6144;
  defaults.num_hidden_layers = 24;
  defaults.num_key_value_heads = 4;
  defaults.max_position_embeddings = 32768;
  DecoderSpec spec = base_spec(config, defaults);
  spec.output_router_logits = config.get_bool("output_router_logits", false);
  spec.router_aux_loss_coef = config.get_float("router_aux_loss_coef", 0.001);

  MoeConfig moe;
  moe.hidden_size = spec.hidden_size;
  moe.moe_intermediate_size = config.get_int("moe_intermediate_size", 768);
  moe.router.num_experts = config.find_int({"num_local_experts", "num_experts"}).value_or(128);
  moe.router.top_k = config.get_int("num_experts_per_tok", 8);
  moe.router.norm_topk_prob = config.get_bool("norm_topk_prob", false);
  require(moe.router.num_experts == 0 || (moe.router.top_k >= 1 && moe.router.top_k <= moe.router.num_experts),
          "{}: num_experts_per_tok is {}, but it must be between 1 and the {} experts", config.origin(), moe.router.top_k,
          moe.router.num_experts);

  const int64_t sparse_step = config.get_int("decoder_sparse_step", 1);
  require(sparse_step >= 1, "{}: decoder_sparse_step is {}, but it must be at least 1", config.origin(), sparse_step);
  std::set<int64_t> dense_layers;
  const bool has_list = config.has("mlp_only_layers") && config.raw().at("mlp_only_layers").is_array();
  require(has_list || !config.has("mlp_only_layers"), "{}: mlp_only_layers must be a list of layer numbers", config.origin());
  if (has_list) dense_layers = config.raw().at("mlp_only_layers").get<std::set<int64_t>>();
  const int64_t window = qwen3_sliding_window(config);
  for (std::size_t n = 0; n < spec.layers.size(); ++n) {
    LayerSpec& layer = spec.layers[n];
    const auto index = static_cast<int64_t>(n);
    layer.attention.qkv_bias = layer.attention.output_bias = config.get_bool("attention_bias", false);
    layer.attention.qk_norm = true;
    layer.attention.sliding_window = window;
    const bool sparse = !dense_layers.contains(index) && moe.router.num_experts > 0 && (index + 1) % sparse_step == 0;
    if (sparse) layer.feed_forward = moe;
  }
  return spec;
}

WeightMap qwen3_moe_weight_map(const DecoderSpec& spec) {
  WeightMap map = base_weight_map(spec);
  add_expert_pieces(map, spec,
                    {"model.layers.{}.mlp.gate.weight", "model.layers.{}.mlp.experts.{}.gate_proj.weight",
                     "model.layers.{}.mlp.experts.{}.up_proj.weight", "model.layers.{}.mlp.experts.{}.down_proj.weight"});
  return map;
}

}  // namespace headrace
