// The config.json of an upcycled model. Flow: upcycle -> [upcycled_config] -> config.json.
#pragma once

#include <string>

#include "base/json.h"
#include "checkpoint/upcycle.h"
#include "config/model_config.h"

namespace headrace {

/// Sizes of the dense model, class defaults filled in.
struct DenseModel {
  std::string family;  // llama | mistral | qwen3
  int64_t hidden_size, intermediate_size, num_layers, num_heads, num_key_value_heads, head_dim, vocab_size;
  bool tie_word_embeddings, attention_bias;
  bool to_mixtral() const { return family != "qwen3"; }
};

/// Throws UserError for a family that cannot be upcycled and for features that the MoE class lacks.
DenseModel read_dense_model(const ModelConfig& config);

Json upcycled_config(const ModelConfig& config, const DenseModel& model, const UpcycleSettings& settings);

}  // namespace headrace
