// Names, shapes and views of a decoder's parameters (transformers v5 in memory), and their random initialisation.
#include "headrace/error.h"
#include "models/decoder.h"

namespace headrace {
namespace {

std::string layer_prefix(std::size_t n) { return fmt::format("model.layers.{}.", n); }

// Parameters of one decoder in the order of the layout. `decay` is off for norms and biases.
struct LayoutBuilder {
  ParameterLayout layout;
  void matrix(const std::string& name, std::vector<int64_t> shape) { layout.add_group({{name, std::move(shape), true}}); }
  void vector(const std::string& name, int64_t size) { layout.add_group({{name, {size}, false}}); }
  void group(std::vector<ParameterInfo> infos) { layout.add_group(std::move(infos)); }
};

void add_attention(LayoutBuilder& builder, const std::string& prefix, const AttentionConfig& config) {
  const int64_t q = config.num_heads * config.head_dim, kv = config.num_key_value_heads * config.head_dim,
                h = config.hidden_size;
  builder.group({{prefix + "q_proj.weight", {q, h}}, {prefix + "k_proj.weight", {kv, h}}, {prefix + "v_proj.weight", {kv, h}}});
  if (config.qkv_bias) {
    builder.group(
        {{prefix + "q_proj.bias", {q}, false}, {prefix + "k_proj.bias", {kv}, false}, {prefix + "v_proj.bias", {kv}, false}});
  }
  if (config.qk_norm) {
    builder.vector(prefix + "q_norm.weight", config.head_dim);
    builder.vector(prefix + "k_norm.weight", config.head_dim);
  }
  builder.matrix(prefix + "o_proj.weight", {h, q});
  if (config.output_bias) builder.vector(prefix + "o_proj.bias", h);
}

void add_mlp(LayoutBuilder& builder, const std::string& prefix, const MlpConfig& config) {
  const int64_t h = config.hidden_size, i = config.intermediate_size;
  builder.group({{prefix + "gate_proj.weight", {i, h}}, {prefix + "up_proj.weight", {i, h}}});
  if (config.bias) builder.group({{prefix + "gate_proj.bias", {i}, false}, {prefix + "up_proj.bias", {i}, false}});
  builder.matrix(prefix + "down_proj.weight", {h, i});
  if (config.bias) builder.vector(prefix + "down_proj.bias", h);
}

void add_moe(LayoutBuilder& builder, const std::string& prefix, const MoeConfig& config) {
  const int64_t h = config.hidden_size, i = config.moe_intermediate_size, e = config.router.num_experts;
  builder.matrix(prefix + "gate.weight", {e, h});
  for (const auto& [name, shape] : {std::pair<std::string, std::vector<int64_t>>{"experts.gate_up_proj", {e, 2 * i, h}},
                                    {"experts.down_proj", {e, h, i}}}) {
    builder.group({{prefix + name, shape, /*decay=*/true, /*expert=*/true, /*stored_first=*/true}});
  }
}

}  // namespace

int64_t DecoderSpec::num_experts() const {
  for (const LayerSpec& layer : layers) {
    if (layer.is_moe()) return layer.moe().router.num_experts;
  }
  return 0;
}

ParameterLayout decoder_layout(const DecoderSpec& spec) {
  LayoutBuilder builder;
  // The output head's gradient is the first of a backward; a tied embedding's look-ups are added to it last.
  builder.group({{"model.embed_tokens.weight",
                  {spec.vocab_size, spec.hidden_size},
                  /*decay=*/true,
                  /*expert=*/false,
                  /*stored_first=*/spec.tie_word_embeddings}});
  for (std::size_t n = 0; n < spec.layers.size(); ++n) {
    const LayerSpec& layer = spec.layers[n];
    const std::string prefix = layer_prefix(n);
    builder.vector(prefix + "input_layernorm.weight", spec.hidden_size);
    add_attention(builder, prefix + "self_attn.", layer.attention);
    builder.vector(prefix + "post_attention_layernorm.weight", spec.hidden_size);
    if (layer.is_moe()) {
      add_moe(builder, prefix + "mlp.", layer.moe());
    } else {
      add_mlp(builder, prefix + "mlp.", layer.mlp());
    }
  }
  builder.vector("model.norm.weight", spec.hidden_size);
  if (!spec.tie_word_embeddings) {
    builder.group({{"lm_head.weight", {spec.vocab_size, spec.hidden_size}, true, /*expert=*/false, /*stored_first=*/true}});
  }
  return std::move(builder.layout);
}

DecoderStages decoder_stages(const DecoderSpec& spec, const ParameterLayout& layout) {
  DecoderStages stages;
  int64_t begin = 0;
  const auto until = [&](int64_t end) { return FlatRange{std::exchange(begin, end), end}; };
  for (std::size_t n = 0; n < spec.layers.size(); ++n) {
    const FlatRange before = until(layout.find(layer_prefix(n) + "input_layernorm.weight").offset);
    (n == 0 ? stages.embedding : stages.layers.emplace_back()) = before;
  }
  stages.layers.push_back(until(layout.find("model.norm.weight").offset));
  stages.head = until(layout.size());
  return stages;
}

LayerTensors layer_tensors(const DecoderSpec& spec, std::size_t n, const Parameters& parameters, const FlatBuffer& buffer) {
  const auto one = [&](const std::string& name) { return parameters.view(buffer, name); };
  const auto optional = [&](bool present, const std::string& name) { return present ? one(name) : at::Tensor(); };
  const auto joined = [&](const std::vector<std::string>& names) { return parameters.joined(buffer, names); };
  const LayerSpec& layer = spec.layers[n];
  const std::string prefix = layer_prefix(n), attn = prefix + "self_attn.", mlp = prefix + "mlp.";
  LayerTensors t;
  t.input_norm = one(prefix + "input_layernorm.weight");
  t.post_attention_norm = one(prefix + "post_attention_layernorm.weight");
  t.attention.qkv = joined({attn + "q_proj.weight", attn + "k_proj.weight", attn + "v_proj.weight"});
  if (layer.attention.qkv_bias)
    t.attention.qkv_bias = joined({attn + "q_proj.bias", attn + "k_proj.bias", attn + "v_proj.bias"});
  t.attention.q_norm = optional(layer.attention.qk_norm, attn + "q_norm.weight");
  t.attention.k_norm = optional(layer.attention.qk_norm, attn + "k_norm.weight");
  t.attention.output = one(attn + "o_proj.weight");
  t.attention.output_bias = optional(layer.attention.output_bias, attn + "o_proj.bias");
  if (layer.is_moe()) {
    t.feed_forward = MoeTensors{one(mlp + "gate.weight"), one(mlp + "experts.gate_up_proj"), one(mlp + "experts.down_proj")};
  } else {
    const bool bias = layer.mlp().bias;
    MlpTensors m;
    m.gate_up = joined({mlp + "gate_proj.weight", mlp + "up_proj.weight"});
    if (bias) m.gate_up_bias = joined({mlp + "gate_proj.bias", mlp + "up_proj.bias"});
    m.down = one(mlp + "down_proj.weight");
    m.down_bias = optional(bias, mlp + "down_proj.bias");
    t.feed_forward = std::move(m);
  }
  return t;
}

DecoderTensors decoder_weights(const DecoderSpec& spec, const Parameters& parameters) {
  DecoderTensors tensors;
  tensors.embedding = parameters.weight("model.embed_tokens.weight");
  tensors.final_norm = parameters.weight("model.norm.weight");
  tensors.lm_head = spec.tie_word_embeddings ? tensors.embedding : parameters.weight("lm_head.weight");
  for (std::size_t n = 0; n < spec.layers.size(); ++n) {
    tensors.layers.push_back(layer_tensors(spec, n, parameters, parameters.flat()));
  }
  return tensors;
}

void initialize_parameters(const DecoderSpec& spec, const Parameters& parameters,
                           const std::optional<at::Generator>& generator) {
  for (const ParameterInfo& info : parameters.layout().entries()) {
    const at::Tensor weight = parameters.weight(info.name);
    if (info.decay) {
      weight.normal_(0.0, spec.initializer_range, generator);
    } else {
      weight.fill_(info.name.ends_with(".bias") ? 0.0 : 1.0);
    }
  }
  if (spec.padding_idx >= 0) parameters.weight("model.embed_tokens.weight")[spec.padding_idx].zero_();
}

}  // namespace headrace
