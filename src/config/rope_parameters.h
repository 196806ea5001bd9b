// RoPE parameters in one form, whatever form config.json used, and the inverse frequencies they give.
// Flow: ModelConfig -> [rope_parameters] -> [rope_frequencies] -> cos and sin tables (layers/attention).
// Reference: transformers 5.17 modeling_rope_utils.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace headrace {

class ModelConfig;

/// rope_scaling wins over rope_parameters; `type` is an old name of rope_type; rope_theta and partial_rotary_factor inside the
/// dict win over the top-level ones.
struct RopeParameters {
  std::string rope_type = "default";  // default | linear | dynamic | yarn | llama3 | longrope
  double rope_theta = 10000.0;
  double partial_rotary_factor = 1.0;
  std::optional<double> factor;  // required by linear, dynamic and llama3; yarn and longrope fall back to the ratio of lengths
  std::optional<double> attention_factor, mscale, mscale_all_dim, beta_fast, beta_slow, low_freq_factor, high_freq_factor;
  bool truncate = true;
  int64_t original_max_position_embeddings = 0;  // resolved: top level, else dict, else max_position_embeddings
  int64_t max_position_embeddings = 0;
  std::vector<double> short_factor, long_factor;
};

/// Throws UserError for an unknown rope_type (with the known ones), for a missing key that the type needs, for a value out of
/// range, and for a dict per layer type (Gemma 3 style).
RopeParameters rope_parameters(const ModelConfig& config, double default_theta, int64_t default_max_position_embeddings,
                               double default_partial_rotary_factor = 1.0);

/// Inverse frequencies [int(head_dim * partial_rotary_factor) / 2 rounded up], float32 arithmetic in transformers' order and
/// with ATen's functions, so that the bits are the same as there; and the factor that cos and sin are multiplied with.
/// `sequence_length` matters for dynamic (from max_position_embeddings on) and longrope (above
/// original_max_position_embeddings).
struct RopeFrequencies {
  std::vector<float> inverse_frequencies;
  float attention_factor = 1.0F;
};
/// Throws UserError when short_factor or long_factor has another length than the frequencies.
RopeFrequencies rope_frequencies(const RopeParameters& rope, int64_t head_dim, int64_t sequence_length);

}  // namespace headrace
