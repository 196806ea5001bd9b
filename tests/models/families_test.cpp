// Families: config.json to spec, names and coverage of the weight map; what must be refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "models/tiny_models.h"

namespace headrace {
namespace {

using testing_models::refusal;
using testing_models::spec_of;
using testing_models::tiny_config;

class EveryFamily : public testing::TestWithParam<std::tuple<std::string, bool>> {};

// Every element of every parameter is written by exactly one hub tensor, and by at most one in-memory tensor.
TEST_P(EveryFamily, WeightMapCoversEachParameterOnce) {
  const auto& [type, tied] = GetParam();
  const ModelConfig config(tiny_config(type, tied), "config.json");
  const Family& family = find_family(config);
  const DecoderSpec spec = family.spec(config);
  const ParameterLayout layout = decoder_layout(spec);
  const WeightMap map = family.weight_map(spec);
  EXPECT_EQ(layout.contains("lm_head.weight"), !tied);
  std::set<std::string> names;
  std::map<std::string, std::vector<int>> written;
  for (const ParameterInfo& info : layout.entries()) written[info.name].assign(static_cast<std::size_t>(info.numel()), 0);
  for (const WeightPiece& piece : map.hub) {
    EXPECT_TRUE(names.insert(piece.hub_name).second) << piece.hub_name;
    int64_t count = 1;
    for (const int64_t size : piece.hub_shape) count *= size;
    std::vector<int>& target = written.at(piece.parameter);
    for (int64_t i = piece.offset; i < piece.offset + count; ++i) ++target.at(static_cast<std::size_t>(i));
  }
  for (const auto& [name, counts] : written) {
    EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; })) << name;
  }
  for (const WeightPiece& piece : map.in_memory)
    EXPECT_EQ(piece.hub_shape, layout.find(piece.parameter).shape) << piece.hub_name;
}

TEST_P(EveryFamily, StagesAreTheWholeLayoutAndCutNoParameter) {
  const auto& [type, tied] = GetParam();
  const DecoderSpec spec = spec_of(tiny_config(type, tied));
  const ParameterLayout layout = decoder_layout(spec);
  const DecoderStages stages = decoder_stages(spec, layout);
  std::vector<FlatRange> ranges = {stages.embedding};
  ranges.insert(ranges.end(), stages.layers.begin(), stages.layers.end());
  ranges.push_back(stages.head);
  ASSERT_EQ(ranges.size(), spec.layers.size() + 2);
  int64_t end = 0;
  for (const FlatRange& range : ranges) EXPECT_EQ(range.begin, std::exchange(end, range.end));
  EXPECT_EQ(end, layout.size());
  for (const ParameterInfo& info : layout.entries()) {
    std::size_t stage = info.name == "model.embed_tokens.weight" ? 0 : ranges.size() - 1;
    if (info.name.starts_with("model.layers.")) stage = 1 + static_cast<std::size_t>(std::stoi(info.name.substr(13)));
    EXPECT_GE(info.offset, ranges[stage].begin) << info.name;
    EXPECT_LE(info.offset + info.numel(), ranges[stage].end) << info.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, EveryFamily,
                         testing::Combine(testing::Values("llama", "qwen3", "mixtral", "qwen3_moe"), testing::Bool()));

TEST(Families, HubNamesOfExperts) {
  const auto hub_names = [](const std::string& type) {
    const ModelConfig config(tiny_config(type), "config.json");
    const Family& family = find_family(config);
    std::map<std::string, WeightPiece> names;
    for (const WeightPiece& piece : family.weight_map(family.spec(config)).hub) names.emplace(piece.hub_name, piece);
    return names;
  };
  // up_proj of expert 3 in gate_up_proj [4, 2 * 12, 16] and w3 of expert 3 in [4, 2 * 24, 16].
  const auto qwen = hub_names("qwen3_moe");
  EXPECT_EQ(qwen.at("model.layers.1.mlp.experts.3.up_proj.weight").offset, (3 * 2 * 12 + 12) * 16);
  EXPECT_TRUE(qwen.contains("model.layers.0.mlp.gate.weight"));
  const auto mixtral = hub_names("mixtral");
  EXPECT_EQ(mixtral.at("model.layers.1.block_sparse_moe.experts.3.w3.weight").offset, (3 * 2 * 24 + 24) * 16);
  EXPECT_EQ(mixtral.at("model.layers.1.block_sparse_moe.experts.3.w1.weight").offset, 3 * 2 * 24 * 16);
  EXPECT_EQ(mixtral.at("model.layers.1.block_sparse_moe.experts.3.w2.weight").parameter,
            "model.layers.1.mlp.experts.down_proj");
}

TEST(Families, BothNamesOfTheNumberOfExperts) {
  Json config = tiny_config("qwen3_moe");
  config.erase("num_experts");
  config["num_local_experts"] = 6;
  EXPECT_EQ(spec_of(config).num_experts(), 6);
  EXPECT_EQ(spec_of(tiny_config("qwen3_moe")).num_experts(), 4);
  EXPECT_EQ(spec_of(tiny_config("llama")).num_experts(), 0);
}

TEST(Families, SparseAndDenseLayersOfQwen3Moe) {
  Json config = tiny_config("qwen3_moe");
  config.update({{"num_hidden_layers", 6}, {"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}});
  const DecoderSpec spec = spec_of(config);
  std::vector<bool> sparse;
  for (const LayerSpec& layer : spec.layers) sparse.push_back(layer.is_moe());
  EXPECT_EQ(sparse, (std::vector<bool>{false, true, false, false, false, true}));
  EXPECT_EQ(spec.layers[0].mlp().intermediate_size, 24);
  EXPECT_EQ(spec.layers[1].moe().moe_intermediate_size, 12);
}

TEST(Families, RefusalsNameKeyAndValue) {
  const auto message = [](const std::string& type, const Json& change) {
    Json config = tiny_config(type);
    config.update(change);
    return refusal([&] { spec_of(config); });
  };
  const std::vector<std::tuple<std::string, Json, std::string>> cases = {
      {"llama", {{"model_type", "gpt2"}}, "gpt2"},
      {"llama", {{"hidden_act", "gelu"}}, "gelu"},
      {"llama", {{"num_hidden_layers", 0}}, "num_hidden_layers"},
      {"llama", {{"num_key_value_heads", 3}}, "num_key_value_heads"},
      {"llama", {{"num_attention_heads", 0}}, "num_attention_heads"},
      {"llama", {{"pad_token_id", 1000}}, "pad_token_id"},
      {"llama", {{"vocab_size", "many"}}, "vocab_size"},
      {"llama", {{"attention_dropout", 0.5}}, "attention_dropout"},
      {"llama", {{"quantization_config", {{"quant_method", "fp8"}}}}, "quantization_config"},
      {"qwen3", {{"layer_types", {"full_attention"}}}, "layer_types"},
      {"mixtral", {{"router_jitter_noise", 0.1}}, "router_jitter_noise"},
      {"mixtral", {{"num_experts_per_tok", 5}}, "num_experts_per_tok"},
      {"mixtral", {{"num_experts_per_tok", 0}}, "num_experts_per_tok"},
      {"qwen3_moe", {{"num_experts_per_tok", 5}}, "num_experts_per_tok"},
      {"qwen3_moe", {{"decoder_sparse_step", 0}}, "decoder_sparse_step"},
      {"qwen3_moe", {{"mlp_only_layers", "all"}}, "mlp_only_layers"},
  };
  for (const auto& [type, change, word] : cases) {
    EXPECT_NE(message(type, change).find(word), std::string::npos) << change.dump() << ": \"" << message(type, change) << "\"";
  }
}

}  // namespace
}  // namespace headrace
