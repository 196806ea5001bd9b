// RoPE against transformers 5.17: rope_golden.json holds what its own code gave (make_rope_golden.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "base/json.h"
#include "config/model_config.h"
#include "headrace/error.h"

namespace headrace {
namespace {

RopeParameters parameters_of(const std::string& text, double default_theta = 10000.0) {
  Json raw = parse_json(text, "config.json");
  if (!raw.contains("model_type")) raw["model_type"] = "glm4_moe";
  return rope_parameters(ModelConfig(std::move(raw), "config.json"), default_theta, 4096);
}

TEST(RopeFrequencies, EqualTransformers) {
  const char* source = std::getenv("HEADRACE_SOURCE_DIR");
  ASSERT_NE(source, nullptr);
  const Json golden = read_json_file(std::filesystem::path(source) / "tests/config/rope_golden.json");
  ASSERT_GT(golden.size(), 20U);
  for (const auto& [name, item] : golden.items()) {
    const ModelConfig config(item.at("config"), name);
    const RopeParameters rope = rope_parameters(config, 10000.0, 131072, 0.5);
    const RopeFrequencies ours = rope_frequencies(rope, config.need_int("head_dim"), item.at("sequence_length").get<int64_t>());
    const Json& theirs = item.at("inverse_frequencies");
    ASSERT_EQ(ours.inverse_frequencies.size(), theirs.size()) << name;
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const double wanted = std::strtod(theirs[i].get<std::string>().c_str(), nullptr);
      // Same bits where the golden file was made; one unit in the last place for a processor whose vector pow rounds otherwise.
      EXPECT_NEAR(ours.inverse_frequencies[i], wanted, wanted * 1.2e-7) << name << ", frequency " << i;
    }
    EXPECT_FLOAT_EQ(ours.attention_factor, item.at("attention_factor").get<float>()) << name;
  }
}

TEST(RopeParameters, DefaultsAndPrecedence) {
  EXPECT_EQ(parameters_of("{}", 1e6).rope_theta, 1e6);
  EXPECT_EQ(parameters_of(R"({"rope_theta": 500000})", 1e6).rope_theta, 5e5);
  EXPECT_EQ(parameters_of(R"({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 8.0})").rope_theta,
            7.0);
  EXPECT_EQ(parameters_of(R"({"rope_scaling": null, "rope_parameters": {"rope_type": "linear", "factor": 2}})").rope_type,
            "linear");
  EXPECT_EQ(parameters_of(R"({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2}})").rope_type,
            "linear");
  EXPECT_EQ(parameters_of(R"({"rope_scaling": {"type": "dynamic", "factor": 2}})").rope_type, "dynamic");
  EXPECT_EQ(parameters_of(R"({"partial_rotary_factor": 0.5})").partial_rotary_factor, 0.5);
  EXPECT_EQ(parameters_of(R"({"max_position_embeddings": 77})").original_max_position_embeddings, 77);
}

void expect_refused(const std::string& text, const std::vector<std::string>& words) {
  try {
    const RopeParameters rope = parameters_of(text);
    rope_frequencies(rope, 64, 1);
    FAIL() << text << " was accepted";
  } catch (const UserError& error) {
    for (const std::string& word : words) EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(RopeParameters, RefusesWithASentence) {
  expect_refused(R"({"rope_scaling": {"rope_type": "yarm", "factor": 2}})", {"yarm", "longrope", "Did you mean yarn?"});
  expect_refused(R"({"rope_scaling": {"rope_type": "linear"}})", {"linear", "factor"});
  expect_refused(R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}})",
                 {"llama3", "high_freq_factor"});
  expect_refused(R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}})",
                 {"low < high"});
  expect_refused(R"({"rope_scaling": {"rope_type": "longrope", "factor": 8, "long_factor": [1]}})",
                 {"longrope", "short_factor"});
  expect_refused(R"({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}})",
                 {"short_factor", "1 numbers", "32"});
  expect_refused(R"({"rope_scaling": {"rope_type": "longrope", "short_factor": ["a"], "long_factor": [1]}})",
                 {"short_factor", "numbers"});
  expect_refused(R"({"rope_scaling": "yarn"})", {"rope_scaling", "object"});
  expect_refused(R"({"rope_theta": "10000"})", {"rope_theta", "number"});
  expect_refused(R"({"rope_theta": -1})", {"rope_theta", "positive"});
  expect_refused(R"({"rope_scaling": {"type": "linear", "factor": 0}})", {"factor", "positive"});
  expect_refused(R"({"partial_rotary_factor": 0.36})", {"23 of 64"});
  expect_refused(
      R"({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}})",
      {"per layer type", "full_attention"});
}

}  // namespace
}  // namespace headrace
