// A model from a Hugging Face folder: config.json and weights -> a Decoder with its family and what saving needs.
// Flow: recipe.model -> [load_model] -> train. Next: models/decoder.h.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "config/model_config.h"
#include "models/decoder.h"
#include "models/registry.h"

namespace headrace {

struct LoadSettings {
  std::string torch_dtype = "auto";          // auto: config.json's, else that of the first floating tensor; float32 | bfloat16
  std::optional<bool> output_router_logits;  // override config.json
  std::optional<double> router_aux_loss_coef;
  bool deterministic = false;  // AttentionConfig::deterministic
};

struct LoadedModel {
  std::filesystem::path path;
  ModelConfig config;
  const Family* family;
  Decoder decoder;
  LoadedWeights weights;  // how the folder named them, so that a save writes the same form
};

/// Throws UserError for everything wrong with the folder. A tied config whose file holds a different lm_head is loaded untied,
/// with a warning, as transformers does.
LoadedModel load_model(const std::filesystem::path& folder, const LoadSettings& settings, at::Device device);

/// The parameters by name, for loading and saving.
std::vector<NamedTensor> named_parameters(const Decoder& decoder);

/// What save_checkpoint needs to write `model` to `folder`.
SaveRequest save_request(const LoadedModel& model, const std::filesystem::path& folder);

/// "float32", "bfloat16", "float16" and back. Throws UserError for another name; `origin` says where it stood.
at::ScalarType scalar_type_of(const std::string& torch_dtype, const std::string& origin);
std::string torch_dtype_of(at::ScalarType type);

}  // namespace headrace
