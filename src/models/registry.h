// The families this engine knows: one visible list. A family is one file in families/.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/weight_map.h"
#include "config/model_config.h"
#include "models/decoder_spec.h"

namespace headrace {

struct Family {
  const char* model_type;                          // of config.json
  const char* architecture;                        // transformers class
  DecoderSpec (*spec)(const ModelConfig& config);  // throws UserError for what the engine does not do
  WeightMap (*weight_map)(const DecoderSpec& spec);
};

const std::vector<Family>& families();

/// Throws UserError naming the known ones.
const Family& find_family(const ModelConfig& config);

// families/<family>.cpp
DecoderSpec llama_spec(const ModelConfig& config);
DecoderSpec qwen3_spec(const ModelConfig& config);
DecoderSpec mixtral_spec(const ModelConfig& config);
DecoderSpec qwen3_moe_spec(const ModelConfig& config);
WeightMap dense_weight_map(const DecoderSpec& spec);
WeightMap mixtral_weight_map(const DecoderSpec& spec);
WeightMap qwen3_moe_weight_map(const DecoderSpec& spec);

}  // namespace headrace
