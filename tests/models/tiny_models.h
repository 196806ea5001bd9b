// config.json of tiny models, one per family, and folders with random weights written by the engine's own tables.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <filesystem>
#include <string>

#include "base/file.h"
#include "headrace/error.h"
#include "models/load_model.h"
#include "tests/refusal.h"

namespace headrace::testing_models {

using test_support::refusal;

inline Json tiny_config(const std::string& model_type, bool tied = false) {
  Json config = {{"model_type", model_type},      {"vocab_size", 1000}, {"hidden_size", 16},          {"num_hidden_layers", 2},
                 {"num_attention_heads", 4},      {"head_dim", 4},      {"num_key_value_heads", 2},   {"intermediate_size", 24},
                 {"max_position_embeddings", 64}, {"dtype", "float32"}, {"tie_word_embeddings", tied}};
  if (model_type == "mixtral") config.update({{"num_local_experts", 4}, {"num_experts_per_tok", 2}});
  if (model_type == "qwen3_moe") {
    config.update({{"num_experts", 4}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 12}, {"norm_topk_prob", true}});
  }
  return config;
}

inline DecoderSpec spec_of(const Json& json) {
  const ModelConfig config(json, "config.json");
  return find_family(config).spec(config);
}

/// Writes config.json and random weights of `seed` in the hub layout.
inline void write_model(const std::filesystem::path& folder, const Json& json, at::ScalarType dtype = at::kFloat,
                        uint64_t seed = 5) {
  const ModelConfig config(json, "config.json");
  const Family& family = find_family(config);
  const Decoder decoder(family.spec(config), dtype, at::kCPU);
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU).clone();
  generator.set_current_seed(seed);
  initialize_parameters(decoder.spec(), decoder.parameters(), generator);
  SaveRequest request;
  request.folder = folder;
  request.parameters = named_parameters(decoder);
  request.pieces = family.weight_map(decoder.spec()).hub;
  request.config = config.for_saving(torch_dtype_of(dtype));
  save_checkpoint(request);
}

}  // namespace headrace::testing_models
