// Llama and Qwen3 dense. Reference: transformers 5.17 models/llama, models/qwen3.
#include "headrace/error.h"
#include "models/families/common.h"
#include "models/registry.h"

namespace headrace {

DecoderSpec llama_spec(const ModelConfig& config) {
  DecoderSpec spec = base_spec(config, {});
  for (LayerSpec& layer : spec.layers) {
    layer.attention.qkv_bias = layer.attention.output_bias = config.get_bool("attention_bias", false);
    std::get<MlpConfig>(layer.feed_forward).bias = config.get_bool("mlp_bias", false);
  }
  return spec;
}

DecoderSpec qwen3_spec(const ModelConfig& config) {
  FamilyDefaults defaults;
  defaults.vocab_size = 151936;
  defaults.intermediate_size = 22016;
  defaults.num_key_value_heads = 32;
  defaults.head_dim = 128;
  defaults.max_position_embeddings = 32768;
  DecoderSpec spec = base_spec(config, defaults);

  // Without layer_types, the window applies from layer max_window_layers on; use_sliding_window false turns it off altogether.
  const int64_t window = qwen3_sliding_window(config);
  const int64_t first_windowed = config.get_int("max_window_layers", 28);
  const bool has_types = config.has("layer_types");
  require(!has_types || config.raw().at("layer_types").size() == spec.layers.size(),
          "{}: layer_types names {} layers, but num_hidden_layers is {}", config.origin(),
          has_types ? config.raw().at("layer_types").size() : 0, spec.layers.size());
  for (std::size_t n = 0; n < spec.layers.size(); ++n) {
    AttentionConfig& attention = spec.layers[n].attention;
    attention.qkv_bias = attention.output_bias = config.get_bool("attention_bias", false);
    attention.qk_norm = true;
    const bool sliding =
        has_types ? config.raw().at("layer_types")[n] == "sliding_attention" : static_cast<int64_t>(n) >= first_windowed;
    if (sliding) attention.sliding_window = window;
  }
  return spec;
}

WeightMap dense_weight_map(const DecoderSpec& spec) { return base_weight_map(spec); }

}  // namespace headrace
