// ModelConfig: a Hugging Face config.json, as read, with typed access that accepts the old (v4 hub) and new (v5) key forms.
// Flow: config.json -> [ModelConfig] -> DecoderSpec (models/families). Reference: transformers 5.17 PretrainedConfig.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace headrace {

class ModelConfig {
 public:
  /// Reads `folder`/config.json. Throws UserError: missing file, not JSON, no model_type.
  static ModelConfig read(const std::filesystem::path& folder);
  /// From a JSON object in memory; `origin` names it in errors.
  ModelConfig(Json raw, std::string origin);

  const std::string& model_type() const { return model_type_; }
  const std::string& origin() const { return origin_; }
  const Json& raw() const { return raw_; }

  /// True when the key is there and not null.
  bool has(const std::string& key) const;
  /// The first of `keys` that is present and not null, else nullopt. Throws UserError naming file, key, value and the type
  /// needed when it has another type (a float with an integral value is accepted as an integer, an integer as a float).
  std::optional<int64_t> find_int(const std::vector<std::string>& keys) const;
  std::optional<double> find_float(const std::vector<std::string>& keys) const;
  std::optional<bool> find_bool(const std::vector<std::string>& keys) const;
  std::optional<std::string> find_string(const std::vector<std::string>& keys) const;

  /// As above with a class default.
  int64_t get_int(const std::string& key, int64_t default_value) const;
  double get_float(const std::string& key, double default_value) const;
  bool get_bool(const std::string& key, bool default_value) const;
  std::string get_string(const std::string& key, const std::string& default_value) const;
  /// Throws UserError "config.json has no <key>" when absent or null.
  int64_t need_int(const std::string& key) const;

  /// "float32", "bfloat16", "float16" from dtype, else torch_dtype (a leading "torch." is dropped); nullopt when neither is there.
  std::optional<std::string> dtype() const;

  /// The JSON to write beside saved weights: the original keys unchanged, but dtype/torch_dtype (whichever was there; `dtype` is
  /// added when neither) set to `dtype`. Used by checkpoint/save.
  Json for_saving(const std::string& dtype) const;

 private:
  Json raw_;
  std::string origin_;
  std::string model_type_;
};

/// RoPE parameters in one form, whatever form the config used (spec: rope_scaling wins over rope_parameters; `type` is an old
/// name of rope_type; partial_rotary_factor inside the dict wins over the top-level one). Reference: transformers 5.17
/// modeling_rope_utils.py.
struct RopeParameters {
  std::string rope_type = "default";   // default | linear | dynamic | yarn | llama3 | longrope
  double rope_theta = 10000.0;
  double partial_rotary_factor = 1.0;
  double factor = 1.0;
  std::optional<double> attention_factor, mscale, mscale_all_dim, beta_fast, beta_slow, low_freq_factor, high_freq_factor;
  bool truncate = true;
  int64_t original_max_position_embeddings = 0;   // resolved: top level, else dict, else max_position_embeddings
  int64_t max_position_embeddings = 0;
  std::vector<double> short_factor, long_factor;
};

/// Throws UserError for an unknown rope_type (with the known ones) and for a missing key that the type needs.
RopeParameters rope_parameters(const ModelConfig& config, double default_theta, int64_t default_max_position_embeddings);

/// Inverse frequencies [head_dim * partial_rotary_factor / 2], float32 arithmetic as transformers does, and the factor that cos and
/// sin are multiplied with. `sequence_length` matters for dynamic and longrope only.
struct RopeFrequencies {
  std::vector<float> inverse_frequencies;
  float attention_factor = 1.0F;
};
RopeFrequencies rope_frequencies(const RopeParameters& rope, int64_t head_dim, int64_t sequence_length);

}  // namespace headrace
