// ModelConfig: a Hugging Face config.json, as read, with typed access that accepts the old (v4 hub) and new (v5) key forms.
// Flow: config.json -> [ModelConfig] -> DecoderSpec (models/families). Reference: transformers 5.17 PretrainedConfig.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "config/rope_parameters.h"

namespace headrace {

class ModelConfig {
 public:
  /// Reads `folder`/config.json; Python's bare Infinity, -Infinity and NaN are accepted. Throws UserError: missing file, not
  /// JSON, no model_type.
  static ModelConfig read(const std::filesystem::path& folder);
  /// From a JSON object in memory; `origin` names it in errors.
  ModelConfig(Json raw, std::string origin);

  const std::string& model_type() const { return model_type_; }
  const std::string& origin() const { return origin_; }
  const Json& raw() const { return raw_; }

  /// True when the key is there and not null.
  bool has(const std::string& key) const;
  /// The first of `keys` that is present and not null, else nullopt. Throws UserError naming file, key, value and the type
  /// needed when it has another type (a float with an integral value is accepted as an integer, an integer as a float, and
  /// {"__float__": "Infinity"} as v5 writes it).
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

  /// "float32", "bfloat16", "float16" from dtype, else torch_dtype (a leading "torch." is dropped); nullopt when neither is
  /// there or it is "auto". Throws UserError for another value.
  std::optional<std::string> dtype() const;

  /// The JSON to write beside saved weights: the original keys unchanged, but dtype/torch_dtype (whichever was there; `dtype`
  /// is added when neither) set to `dtype`. Used by checkpoint/save.
  Json for_saving(const std::string& dtype) const;

 private:
  Json raw_;
  std::string origin_;
  std::string model_type_;
};

}  // namespace headrace
