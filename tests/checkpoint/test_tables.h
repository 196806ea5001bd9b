// Weight tables of small qwen3_moe and mixtral models for the tests of this folder (the real ones are in models/families).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <limits>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "config/model_config.h"

namespace headrace {

struct TestTable {
  WeightMap map;
  std::vector<std::pair<std::string, std::vector<int64_t>>> parameters;  // name in memory, shape

  void whole(const std::string& hub_name, std::vector<int64_t> shape, const std::string& parameter) {
    map.hub.push_back({hub_name, shape, parameter, 0});
    parameters.emplace_back(parameter, std::move(shape));
  }

  // Parameters of `type`, filled with NaN so that an element that nothing writes shows.
  std::vector<NamedTensor> tensors(at::ScalarType type) const {
    std::vector<NamedTensor> out;
    for (const auto& [name, shape] : parameters) {
      out.push_back({name, at::full(shape, std::numeric_limits<double>::quiet_NaN(), at::TensorOptions().dtype(type))});
    }
    return out;
  }
};

inline TestTable test_table(const ModelConfig& config) {
  const bool mixtral = config.model_type() == "mixtral";
  const int64_t hidden = config.need_int("hidden_size"), heads = config.need_int("num_attention_heads");
  const int64_t head_dim = config.get_int("head_dim", hidden / heads), kv = config.need_int("num_key_value_heads");
  const int64_t experts = config.find_int({"num_local_experts", "num_experts"}).value();
  const int64_t width = config.need_int(mixtral ? "intermediate_size" : "moe_intermediate_size"),
                vocab = config.need_int("vocab_size");
  TestTable table;
  table.map.ignored = {R"(.*rotary_emb\.inv_freq)"};
  table.whole("model.embed_tokens.weight", {vocab, hidden}, "model.embed_tokens.weight");
  for (int64_t n = 0; n < config.need_int("num_hidden_layers"); ++n) {
    const std::string layer = "model.layers." + std::to_string(n) + ".";
    const auto same = [&](const std::string& name, std::vector<int64_t> shape) {
      table.whole(layer + name, std::move(shape), layer + name);
    };
    same("self_attn.q_proj.weight", {heads * head_dim, hidden});
    same("self_attn.k_proj.weight", {kv * head_dim, hidden});
    same("self_attn.v_proj.weight", {kv * head_dim, hidden});
    same("self_attn.o_proj.weight", {hidden, heads * head_dim});
    if (!mixtral) same("self_attn.q_norm.weight", {head_dim});
    if (!mixtral) same("self_attn.k_norm.weight", {head_dim});
    same("input_layernorm.weight", {hidden});
    same("post_attention_layernorm.weight", {hidden});
    const std::string moe = layer + (mixtral ? "block_sparse_moe." : "mlp.");
    table.whole(moe + "gate.weight", {experts, hidden}, layer + "mlp.gate.weight");
    const std::string gate_up = layer + "mlp.experts.gate_up_proj", down = layer + "mlp.experts.down_proj";
    for (int64_t e = 0; e < experts; ++e) {
      const std::string expert = moe + "experts." + std::to_string(e) + ".";
      table.map.hub.push_back(
          {expert + (mixtral ? "w1" : "gate_proj") + ".weight", {width, hidden}, gate_up, e * 2 * width * hidden});
      table.map.hub.push_back(
          {expert + (mixtral ? "w3" : "up_proj") + ".weight", {width, hidden}, gate_up, (e * 2 + 1) * width * hidden});
      table.map.hub.push_back({expert + (mixtral ? "w2" : "down_proj") + ".weight", {hidden, width}, down, e * hidden * width});
    }
    table.parameters.emplace_back(gate_up, std::vector<int64_t>{experts, 2 * width, hidden});
    table.parameters.emplace_back(down, std::vector<int64_t>{experts, hidden, width});
    table.map.in_memory.push_back({gate_up, {experts, 2 * width, hidden}, gate_up, 0});
    table.map.in_memory.push_back({down, {experts, hidden, width}, down, 0});
    if (mixtral) table.map.in_memory.push_back({layer + "mlp.gate.weight", {experts, hidden}, layer + "mlp.gate.weight", 0});
  }
  table.whole("model.norm.weight", {hidden}, "model.norm.weight");
  if (!config.get_bool("tie_word_embeddings", false)) table.whole("lm_head.weight", {vocab, hidden}, "lm_head.weight");
  return table;
}

}  // namespace headrace
