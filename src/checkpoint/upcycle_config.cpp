// See upcycle_config.h. Reference: the configuration classes of transformers 5.17.
#include "checkpoint/upcycle_config.h"

#include <algorithm>

#include "headrace/error.h"

namespace headrace {
namespace {

// Class defaults of the dense families where the MoE class has another one or the value is needed here: a key that config.json
// leaves out means these values to the dense class and other ones to the MoE class.
Json class_defaults(const std::string& family) {
  if (family == "llama") {
    return {{"vocab_size", 32000},       {"hidden_size", 4096},  {"intermediate_size", 11008},      {"num_hidden_layers", 32},
            {"num_attention_heads", 32}, {"rms_norm_eps", 1e-6}, {"max_position_embeddings", 2048}, {"hidden_act", "silu"},
            {"bos_token_id", 1},         {"eos_token_id", 2},    {"tie_word_embeddings", false}};
  }
  if (family == "mistral") {
    return {{"vocab_size", 32000},
            {"hidden_size", 4096},
            {"intermediate_size", 14336},
            {"num_hidden_layers", 32},
            {"num_attention_heads", 32},
            {"num_key_value_heads", 8},
            {"max_position_embeddings", 131072},
            {"hidden_act", "silu"},
            {"rms_norm_eps", 1e-6},
            {"bos_token_id", 1},
            {"eos_token_id", 2},
            {"tie_word_embeddings", false},
            {"sliding_window", 4096}};
  }
  return {{"vocab_size", 151936},
          {"hidden_size", 4096},
          {"intermediate_size", 22016},
          {"num_hidden_layers", 32},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 32},
          {"max_position_embeddings", 32768},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-6},
          {"tie_word_embeddings", false},
          {"head_dim", 128},
          {"attention_bias", false},
          {"sliding_window", 4096},
          {"use_sliding_window", false},
          {"max_window_layers", 28}};
}

// config.json with the class defaults of the keys it leaves out. A key that is there as null stays null (sliding_window null:
// none).
ModelConfig with_defaults(const ModelConfig& config) {
  Json raw = config.raw();
  const Json defaults = class_defaults(config.model_type());
  for (const auto& item : defaults.items()) {
    if (!raw.contains(item.key())) raw[item.key()] = item.value();
  }
  return {std::move(raw), config.origin()};
}

// The one window of all layers of a qwen3, 0 for none. qwen3_moe has a single window for all its layers.
int64_t qwen3_window(const ModelConfig& full, int64_t num_layers) {
  const bool used = full.get_bool("use_sliding_window", false);
  const int64_t window = used ? full.get_int("sliding_window", 0) : 0;
  int64_t sliding_layers = 0;
  if (full.has("layer_types")) {
    const Json& types = full.raw().at("layer_types");
    require(types.is_array() && types.size() == static_cast<std::size_t>(num_layers), "{}: layer_types must list {} layers",
            full.origin(), num_layers);
    sliding_layers = std::count(types.begin(), types.end(), Json("sliding_attention"));
  } else if (window > 0) {
    sliding_layers = std::max<int64_t>(0, num_layers - full.get_int("max_window_layers", 28));
  }
  require(sliding_layers == 0 || (sliding_layers == num_layers && window > 0),
          "{}: {} of {} layers have a sliding window, but a qwen3_moe has one on all layers or on none; set use_sliding_window "
          "to false if the "
          "sequences are shorter than the window",
          full.origin(), sliding_layers, num_layers);
  return sliding_layers == 0 ? 0 : window;
}

// Makes sure that rope_theta is written, in the dict that is used or at the top level: its default differs between the classes.
void write_rope_theta(Json& out, double theta) {
  const auto is_dict = [&](const char* key) { return out.contains(key) && out.at(key).is_object() && !out.at(key).empty(); };
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!is_dict(key)) continue;
    if (out.at(key).contains("rope_theta")) return;  // the dict that is used says it
    break;
  }
  if (!out.contains("rope_theta") || out.at("rope_theta").is_null()) out["rope_theta"] = theta;
}

}  // namespace

DenseModel read_dense_model(const ModelConfig& config) {
  const std::string& family = config.model_type();
  require(family == "llama" || family == "mistral" || family == "qwen3",
          "{}: model_type {} cannot be upcycled; dense llama, mistral (both become mixtral) and qwen3 (becomes qwen3_moe) can",
          config.origin(), family);
  for (const char* key : {"num_local_experts", "num_experts", "n_routed_experts"}) {
    require(!config.has(key), "{} has {}, so it is a Mixture-of-Experts model already; a dense one is needed", config.origin(),
            key);
  }
  require(!config.has("quantization_config"), "{} has a quantization_config; dequantise the model first", config.origin());

  const ModelConfig full = with_defaults(config);
  DenseModel model;
  model.family = family;
  model.hidden_size = full.need_int("hidden_size");
  model.intermediate_size = full.need_int("intermediate_size");
  model.num_layers = full.need_int("num_hidden_layers");
  model.num_heads = full.need_int("num_attention_heads");
  model.num_key_value_heads = full.get_int("num_key_value_heads", model.num_heads);
  model.vocab_size = full.need_int("vocab_size");
  require(model.hidden_size > 0 && model.intermediate_size > 0 && model.num_layers > 0 && model.num_heads > 0 &&
              model.num_key_value_heads > 0 && model.vocab_size > 0,
          "{}: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads and vocab_size must "
          "be positive",
          config.origin());
  model.head_dim = full.get_int("head_dim", model.hidden_size / model.num_heads);
  model.tie_word_embeddings = full.get_bool("tie_word_embeddings", false);
  model.attention_bias = family != "mistral" && full.get_bool("attention_bias", false);

  const std::string activation = full.get_string("hidden_act", "silu");
  require(activation == "silu", "{}: hidden_act is {}, but experts need silu", config.origin(), activation);
  if (model.to_mixtral()) {
    for (const char* key : {"attention_bias", "mlp_bias"}) {
      require(family == "mistral" || !full.get_bool(key, false),
              "{}: {} is true, but a mixtral has no biases; this model cannot be upcycled", config.origin(), key);
    }
  }
  return model;
}

Json upcycled_config(const ModelConfig& config, const DenseModel& model, const UpcycleSettings& settings) {
  const ModelConfig full = with_defaults(config);
  const RopeParameters rope = rope_parameters(full, 10000.0, full.need_int("max_position_embeddings"));
  Json out = full.raw();
  for (const char* key : {"architectures", "auto_map", "pretraining_tp", "attention_bias", "mlp_bias", "layer_types",
                          "max_window_layers", "use_sliding_window", "sliding_window"}) {
    out.erase(key);
  }
  out["architectures"] = Json::array({model.to_mixtral() ? "MixtralForCausalLM" : "Qwen3MoeForCausalLM"});
  out["model_type"] = model.to_mixtral() ? "mixtral" : "qwen3_moe";
  out["num_key_value_heads"] = model.num_key_value_heads;
  out["head_dim"] = model.head_dim;
  out["num_experts_per_tok"] = settings.top_k;
  out["output_router_logits"] = false;
  out["router_aux_loss_coef"] = 0.001;  // used once output_router_logits is set
  write_rope_theta(out, rope.rope_theta);
  if (model.to_mixtral()) {
    out["num_local_experts"] = settings.num_experts;
    out["router_jitter_noise"] = 0.0;
    out["sliding_window"] = nullptr;
    if (model.family == "mistral" && full.has("sliding_window")) out["sliding_window"] = full.need_int("sliding_window");
    return out;
  }
  const int64_t window = qwen3_window(full, model.num_layers);
  out["num_experts"] = settings.num_experts;
  out["moe_intermediate_size"] = model.intermediate_size;
  out["norm_topk_prob"] = true;  // the chosen copies' weights sum to 1
  out["decoder_sparse_step"] = 1;
  out["mlp_only_layers"] = Json::array();
  out["attention_bias"] = model.attention_bias;
  out["use_sliding_window"] = window > 0;
  out["sliding_window"] = nullptr;
  if (window > 0) out["sliding_window"] = window;
  return out;
}

}  // namespace headrace
