// RoPE parameters and inverse frequencies; see rope_parameters.h. The arithmetic follows transformers line by line: an inverse
// frequency that is one unit in the last place off turns the angle at position 40,000 by some thousandths.
#include "config/rope_parameters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <fmt/ranges.h>

#include <cmath>
#include <numbers>

#include "base/names.h"
#include "config/model_config.h"
#include "headrace/error.h"

namespace headrace {
namespace {

const std::vector<std::string>& known_types() {
  static const std::vector<std::string> types = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"};
  return types;
}

// The dict that holds the parameters (rope_scaling if it is there and not empty, else rope_parameters) as a reader with
// ModelConfig's type checks, and its name for errors.
struct Dict {
  std::string name;
  ModelConfig values;
};

Dict parameter_dict(const ModelConfig& config) {
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(name)) continue;
    Json dict = config.raw().at(name);
    require(dict.is_object(), "{}: {} is {}, but it must be an object", config.origin(), name, dict.dump());
    if (dict.empty()) continue;
    for (const auto& item : dict.items()) {
      require(!item.value().is_object() || item.value().contains("__float__"),
              "{}: {} holds one set of RoPE parameters per layer type ({}); one set for all layers is needed", config.origin(),
              name, item.key());
    }
    dict["model_type"] = config.model_type();
    return {name, ModelConfig(std::move(dict), config.origin() + ": " + name)};
  }
  return {"rope_parameters", ModelConfig(Json{{"model_type", config.model_type()}}, config.origin())};
}

std::vector<double> find_numbers(const ModelConfig& dict, const std::string& key) {
  if (!dict.has(key)) return {};
  const Json& list = dict.raw().at(key);
  require(list.is_array(), "{}: {} must be a list of numbers", dict.origin(), key);
  std::vector<double> numbers;
  for (const Json& value : list) {
    require(value.is_number(), "{}: {} holds {}, but it must be a list of numbers", dict.origin(), key, value.dump());
    numbers.push_back(value.get<double>());
  }
  return numbers;
}

void need(bool there, const RopeParameters& rope, const ModelConfig& dict, const char* key) {
  require(there, "{}: rope_type {} needs the key {}, which is missing", dict.origin(), rope.rope_type, key);
}

std::vector<float> to_vector(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

at::Tensor to_tensor(const std::vector<double>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kFloat);
  for (std::size_t i = 0; i < values.size(); ++i) tensor.mutable_data_ptr<float>()[i] = static_cast<float>(values[i]);
  return tensor;
}

// Python's `number / tensor`.
at::Tensor divide(double number, const at::Tensor& tensor) { return tensor.reciprocal().mul(number); }

// 2i / D as float32, for i = 0 .. D/2 - 1.
at::Tensor exponents(int64_t dim) { return at::arange(0, dim, 2, at::kLong).to(at::kFloat).div(dim); }

at::Tensor default_frequencies(double base, int64_t dim) { return divide(1.0, at::pow(at::Scalar(base), exponents(dim))); }

at::Tensor dynamic_frequencies(const RopeParameters& rope, int64_t dim, int64_t sequence_length) {
  const double factor = *rope.factor;
  const int64_t longest = rope.max_position_embeddings;
  const double exponent = static_cast<double>(dim) / static_cast<double>(dim - 2);
  // transformers computes the base in double precision when the model is made, and in float32 when a longer sequence comes
  // along.
  if (sequence_length <= longest) {
    const double stretch = factor * static_cast<double>(longest) / static_cast<double>(longest) - (factor - 1);
    return default_frequencies(rope.rope_theta * std::pow(stretch, exponent), dim);
  }
  const at::Tensor length = at::scalar_tensor(sequence_length, at::kLong);
  const at::Tensor base = length.mul(factor).div(longest).sub(factor - 1).pow(exponent).mul(rope.rope_theta);
  return divide(1.0, at::pow(base, exponents(dim)));
}

double yarn_mscale(double scale, double mscale) { return scale <= 1 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0; }

at::Tensor yarn_frequencies(const RopeParameters& rope, double factor, int64_t dim) {
  const double base = rope.rope_theta;
  const auto correction = [&](double rotations) {
    return static_cast<double>(dim) *
           std::log(static_cast<double>(rope.original_max_position_embeddings) / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(base));
  };
  const auto or_default = [](const std::optional<double>& value, double fallback) {
    return value.value_or(0.0) == 0.0 ? fallback : *value;
  };
  double low = correction(or_default(rope.beta_fast, 32));
  double high = correction(or_default(rope.beta_slow, 1));
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  const at::Tensor ramp = at::arange(dim / 2, at::kFloat).sub(low).div(high - low).clamp(0, 1);
  const at::Tensor extrapolation_share = ramp.neg().add(1);
  const at::Tensor powers = at::pow(at::Scalar(base), exponents(dim));
  const at::Tensor extrapolation = divide(1.0, powers);
  const at::Tensor interpolation = divide(1.0, powers.mul(factor));
  return interpolation.mul(extrapolation_share.neg().add(1)).add(extrapolation.mul(extrapolation_share));
}

at::Tensor llama3_frequencies(const RopeParameters& rope, int64_t dim) {
  const at::Tensor plain = default_frequencies(rope.rope_theta, dim);
  const double factor = *rope.factor, low = *rope.low_freq_factor, high = *rope.high_freq_factor;
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const at::Tensor wavelength = divide(2 * std::numbers::pi, plain);
  const at::Tensor is_long = wavelength.gt(original / low);
  const at::Tensor is_short = wavelength.lt(original / high);
  const at::Tensor scaled = at::where(is_long, plain.div(factor), plain);
  const at::Tensor smooth = divide(original, wavelength).sub(low).div(high - low);
  const at::Tensor smoothed = smooth.neg().add(1).mul(scaled).div(factor).add(smooth.mul(scaled));
  return at::where(is_short.logical_or(is_long), scaled, smoothed);
}

at::Tensor longrope_frequencies(const RopeParameters& rope, int64_t dim, int64_t sequence_length) {
  const bool is_long = sequence_length > rope.original_max_position_embeddings;
  const std::vector<double>& factors = is_long ? rope.long_factor : rope.short_factor;
  require(static_cast<int64_t>(factors.size()) == dim / 2,
          "config.json: {} of the RoPE parameters has {} numbers, but {} are needed", is_long ? "long_factor" : "short_factor",
          factors.size(), dim / 2);
  return divide(1.0, at::pow(at::Scalar(rope.rope_theta), exponents(dim)).mul(to_tensor(factors)));
}

}  // namespace

RopeParameters rope_parameters(const ModelConfig& config, double default_theta, int64_t default_max_position_embeddings,
                               double default_partial_rotary_factor) {
  const auto [name, dict] = parameter_dict(config);
  RopeParameters rope;
  rope.rope_type = dict.find_string({"rope_type", "type"}).value_or("default");
  const std::string nearest = nearest_name(rope.rope_type, known_types());
  require(std::find(known_types().begin(), known_types().end(), rope.rope_type) != known_types().end(),
          "{}: {} has the rope_type \"{}\"; known are {}{}", config.origin(), name, rope.rope_type,
          fmt::join(known_types(), ", "), nearest.empty() ? "" : ". Did you mean " + nearest + "?");

  rope.rope_theta = dict.find_float({"rope_theta"}).value_or(config.get_float("rope_theta", default_theta));
  rope.partial_rotary_factor = dict.find_float({"partial_rotary_factor"})
                                   .value_or(config.get_float("partial_rotary_factor", default_partial_rotary_factor));
  rope.max_position_embeddings = config.get_int("max_position_embeddings", default_max_position_embeddings);
  rope.original_max_position_embeddings =
      config.find_int({"original_max_position_embeddings"})
          .value_or(dict.get_int("original_max_position_embeddings", rope.max_position_embeddings));
  rope.factor = dict.find_float({"factor"});
  rope.attention_factor = dict.find_float({"attention_factor"});
  rope.mscale = dict.find_float({"mscale"});
  rope.mscale_all_dim = dict.find_float({"mscale_all_dim"});
  rope.beta_fast = dict.find_float({"beta_fast"});
  rope.beta_slow = dict.find_float({"beta_slow"});
  rope.low_freq_factor = dict.find_float({"low_freq_factor"});
  rope.high_freq_factor = dict.find_float({"high_freq_factor"});
  rope.truncate = dict.get_bool("truncate", true);
  rope.short_factor = find_numbers(dict, "short_factor");
  rope.long_factor = find_numbers(dict, "long_factor");

  require(rope.rope_theta > 0 && std::isfinite(rope.rope_theta), "{}: rope_theta is {}, but it must be positive",
          config.origin(), rope.rope_theta);
  require(rope.partial_rotary_factor > 0 && rope.partial_rotary_factor <= 1,
          "{}: partial_rotary_factor is {}, but it must be above 0 and at most 1", config.origin(), rope.partial_rotary_factor);
  require(rope.max_position_embeddings > 0 && rope.original_max_position_embeddings > 0,
          "{}: max_position_embeddings is {} and original_max_position_embeddings {}, but both must be positive",
          config.origin(), rope.max_position_embeddings, rope.original_max_position_embeddings);
  if (rope.rope_type == "linear" || rope.rope_type == "dynamic" || rope.rope_type == "llama3")
    need(rope.factor.has_value(), rope, dict, "factor");
  require(!rope.factor || *rope.factor > 0, "{}: factor is {}, but it must be positive", dict.origin(),
          rope.factor.value_or(0));
  if (rope.rope_type == "llama3") {
    need(rope.low_freq_factor.has_value(), rope, dict, "low_freq_factor");
    need(rope.high_freq_factor.has_value(), rope, dict, "high_freq_factor");
    require(*rope.low_freq_factor > 0 && *rope.high_freq_factor > *rope.low_freq_factor,
            "{}: low_freq_factor is {} and high_freq_factor {}, but 0 < low < high is needed", dict.origin(),
            *rope.low_freq_factor, *rope.high_freq_factor);
  }
  if (rope.rope_type == "longrope") {
    need(!rope.short_factor.empty(), rope, dict, "short_factor");
    need(!rope.long_factor.empty(), rope, dict, "long_factor");
  }
  return rope;
}

RopeFrequencies rope_frequencies(const RopeParameters& rope, int64_t head_dim, int64_t sequence_length) {
  const auto dim = static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor);
  const bool dynamic = rope.rope_type == "dynamic";
  require(dim >= (dynamic ? 4 : 2) && dim % 2 == 0,
          "config.json: {} of {} components of a head would be rotated (head_dim times partial_rotary_factor {}), but an even "
          "number of at least "
          "{} is needed",
          dim, head_dim, rope.partial_rotary_factor, dynamic ? 4 : 2);
  const double lengths_ratio =
      static_cast<double>(rope.max_position_embeddings) / static_cast<double>(rope.original_max_position_embeddings);
  const double factor = rope.factor.value_or(lengths_ratio);

  if (rope.rope_type == "default") return {to_vector(default_frequencies(rope.rope_theta, dim))};
  if (rope.rope_type == "linear") return {to_vector(default_frequencies(rope.rope_theta, dim).div(factor))};
  if (dynamic) return {to_vector(dynamic_frequencies(rope, dim, sequence_length))};
  if (rope.rope_type == "llama3") return {to_vector(llama3_frequencies(rope, dim))};
  if (rope.rope_type == "yarn") {
    const double mscale = rope.mscale.value_or(0), all_dim = rope.mscale_all_dim.value_or(0);
    const double attention = rope.attention_factor         ? *rope.attention_factor
                             : mscale != 0 && all_dim != 0 ? yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
                                                           : yarn_mscale(factor, 1.0);
    return {to_vector(yarn_frequencies(rope, factor, dim)), static_cast<float>(attention)};
  }
  check_argument(rope.rope_type == "longrope", "rope_frequencies: unknown rope_type {}", rope.rope_type);
  const double attention =
      rope.attention_factor ? *rope.attention_factor
      : factor <= 1.0       ? 1.0
                      : std::sqrt(1 + std::log(factor) / std::log(static_cast<double>(rope.original_max_position_embeddings)));
  return {to_vector(longrope_frequencies(rope, dim, sequence_length)), static_cast<float>(attention)};
}

}  // namespace headrace
