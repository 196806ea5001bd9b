#include "models/families/common.h"

#include <fmt/format.h>

#include "headrace/error.h"
#include "models/decoder.h"

namespace headrace {

DecoderSpec base_spec(const ModelConfig& config, const FamilyDefaults& defaults) {
  require(!config.has("quantization_config"),
          "{}: the checkpoint is quantised (quantization_config); the engine trains float32 and bfloat16 weights. Take the "
          "unquantised "
          "checkpoint.",
          config.origin());
  const std::string act = config.get_string("hidden_act", "silu");
  require(act == "silu" || act == "swish", "{}: hidden_act is \"{}\", but this family is supported with \"silu\" only",
          config.origin(), act);
  require(config.get_float("attention_dropout", 0.0) == 0.0,
          "{}: attention_dropout is {}, but the engine trains without dropout. Set it to 0.0 in config.json.", config.origin(),
          config.get_float("attention_dropout", 0.0));

  DecoderSpec spec;
  spec.model_type = config.model_type();
  spec.vocab_size = config.get_int("vocab_size", defaults.vocab_size);
  spec.hidden_size = config.get_int("hidden_size", defaults.hidden_size);
  spec.rms_norm_eps = config.get_float("rms_norm_eps", defaults.rms_norm_eps);
  spec.tie_word_embeddings = config.get_bool("tie_word_embeddings", false);
  spec.padding_idx = config.find_int({"pad_token_id"}).value_or(-1);
  spec.initializer_range = config.get_float("initializer_range", 0.02);
  spec.rope = rope_parameters(config, defaults.rope_theta, defaults.max_position_embeddings);

  AttentionConfig attention;
  attention.hidden_size = spec.hidden_size;
  attention.num_heads = config.get_int("num_attention_heads", defaults.num_attention_heads);
  const int64_t default_kv = defaults.num_key_value_heads > 0 ? defaults.num_key_value_heads : attention.num_heads;
  attention.num_key_value_heads = config.get_int("num_key_value_heads", default_kv);
  require(
      attention.num_heads > 0 && attention.num_key_value_heads > 0 && attention.num_heads % attention.num_key_value_heads == 0,
      "{}: num_attention_heads {} is not a multiple of num_key_value_heads {}", config.origin(), attention.num_heads,
      attention.num_key_value_heads);
  const int64_t default_dim = defaults.head_dim > 0 ? defaults.head_dim : spec.hidden_size / attention.num_heads;
  attention.head_dim = config.get_int("head_dim", default_dim);
  attention.rms_norm_eps = spec.rms_norm_eps;

  LayerSpec layer;
  layer.attention = attention;
  layer.feed_forward = MlpConfig{spec.hidden_size, config.get_int("intermediate_size", defaults.intermediate_size), false};
  const int64_t num_layers = config.get_int("num_hidden_layers", defaults.num_hidden_layers);
  require(num_layers > 0 && spec.vocab_size > 0 && spec.hidden_size > 0 && attention.head_dim > 0,
          "{}: num_hidden_layers {}, vocab_size {}, hidden_size {} and head_dim {} must all be positive", config.origin(),
          num_layers, spec.vocab_size, spec.hidden_size, attention.head_dim);
  require(spec.padding_idx < spec.vocab_size, "{}: pad_token_id {} is outside the vocabulary of {}", config.origin(),
          spec.padding_idx, spec.vocab_size);
  spec.layers.assign(static_cast<std::size_t>(num_layers), layer);
  return spec;
}

int64_t qwen3_sliding_window(const ModelConfig& config) {
  if (!config.get_bool("use_sliding_window", false)) return 0;
  return config.find_int({"sliding_window"}).value_or(config.raw().contains("sliding_window") ? 0 : 4096);
}

WeightMap base_weight_map(const DecoderSpec& spec) {
  WeightMap map;
  const ParameterLayout layout = decoder_layout(spec);
  for (const ParameterInfo& info : layout.entries()) {
    const bool of_experts = info.name.find(".mlp.experts.") != std::string::npos || info.name.ends_with(".mlp.gate.weight");
    if (!of_experts) map.hub.push_back({info.name, info.shape, info.name, 0});
  }
  // Old checkpoints carry this buffer; transformers ignores it too.
  map.ignored.emplace_back(R"(.*rotary_emb\.inv_freq)");
  return map;
}

void add_expert_pieces(WeightMap& map, const DecoderSpec& spec, const ExpertNames& names) {
  for (std::size_t n = 0; n < spec.layers.size(); ++n) {
    if (!spec.layers[n].is_moe()) continue;
    const MoeConfig& moe = spec.layers[n].moe();
    const int64_t h = moe.hidden_size, i = moe.moe_intermediate_size, num_experts = moe.router.num_experts;
    const std::string prefix = fmt::format("model.layers.{}.mlp.", n);
    const std::string gate_up = prefix + "experts.gate_up_proj", down = prefix + "experts.down_proj";
    const auto hub_name = [&](const char* pattern, int64_t expert) { return fmt::format(fmt::runtime(pattern), n, expert); };
    const std::string router = prefix + "gate.weight", hub_router = fmt::format(fmt::runtime(names.router), n);
    map.hub.push_back({hub_router, {num_experts, h}, router, 0});
    for (int64_t e = 0; e < num_experts; ++e) {
      map.hub.push_back({hub_name(names.gate, e), {i, h}, gate_up, e * 2 * i * h});
      map.hub.push_back({hub_name(names.up, e), {i, h}, gate_up, (e * 2 * i + i) * h});
      map.hub.push_back({hub_name(names.down, e), {h, i}, down, e * h * i});
    }
    map.in_memory.push_back({gate_up, {num_experts, 2 * i, h}, gate_up, 0});
    map.in_memory.push_back({down, {num_experts, h, i}, down, 0});
    if (hub_router != router) map.in_memory.push_back({router, {num_experts, h}, router, 0});
  }
}

}  // namespace headrace
