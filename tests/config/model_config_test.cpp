// config.json: old and new key forms, typed access with sentences, and what is written back.
#include "config/model_config.h"

#include <gtest/gtest.h>

#include <cmath>

#include "checkpoint/temporary_folder.h"
#include "headrace/error.h"
#include "tests/refusal.h"

namespace headrace {
namespace {

ModelConfig config_of(const std::string& text) { return {parse_json(text, "x/config.json"), "x/config.json"}; }

using test_support::refusal;

TEST(ModelConfig, OldAndNewKeysInOrder) {
  const ModelConfig config =
      config_of(R"({"model_type": "qwen3_moe", "num_experts": null, "num_local_experts": 128, "rms_norm_eps": 1e-06,
      "rope_theta": 1000000, "max_position_embeddings": 40960.0, "norm_topk_prob": true, "hidden_act": "silu"})");
  EXPECT_EQ(config.model_type(), "qwen3_moe");
  EXPECT_EQ(config.find_int({"num_experts", "num_local_experts"}), 128);
  EXPECT_FALSE(config.has("num_experts"));
  EXPECT_EQ(config.find_int({"n_routed_experts"}), std::nullopt);
  EXPECT_EQ(config.get_float("rope_theta", 1.0), 1e6);
  EXPECT_EQ(config.get_float("rms_norm_eps", 1.0), 1e-6);
  EXPECT_EQ(config.need_int("max_position_embeddings"), 40960);
  EXPECT_TRUE(config.get_bool("norm_topk_prob", false));
  EXPECT_TRUE(config.get_bool("absent", true));
  EXPECT_EQ(config.get_string("hidden_act", "gelu"), "silu");
  EXPECT_EQ(config.get_int("absent", 5), 5);
}

TEST(ModelConfig, WrongTypesAreNamed) {
  const ModelConfig config = config_of(
      R"({"model_type": "llama", "hidden_size": "4096", "layers": 2.5, "tie": 1, "eps": true, "act": 3, "big": 1e300})");
  EXPECT_EQ(refusal([&] { config.need_int("hidden_size"); }),
            "x/config.json: hidden_size is \"4096\", but it must be an integer");
  EXPECT_EQ(refusal([&] { config.need_int("layers"); }), "x/config.json: layers is 2.5, but it must be an integer");
  EXPECT_NE(refusal([&] { config.need_int("big"); }), "");
  EXPECT_EQ(refusal([&] { config.get_bool("tie", false); }), "x/config.json: tie is 1, but it must be true or false");
  EXPECT_EQ(refusal([&] { config.get_float("eps", 0); }), "x/config.json: eps is true, but it must be a number");
  EXPECT_EQ(refusal([&] { config.get_int("eps", 0); }), "x/config.json: eps is true, but it must be an integer");
  EXPECT_EQ(refusal([&] { config.get_string("act", ""); }), "x/config.json: act is 3, but it must be a string");
  EXPECT_EQ(refusal([&] { config.need_int("vocab_size"); }), "x/config.json has no vocab_size");
  EXPECT_NE(refusal([] { config_of("[]"); }), "");
  EXPECT_NE(refusal([] { config_of(R"({"hidden_size": 1})"); }).find("model_type"), std::string::npos);
}

TEST(ModelConfig, DtypeInBothForms) {
  EXPECT_EQ(config_of(R"({"model_type": "a"})").dtype(), std::nullopt);
  EXPECT_EQ(config_of(R"({"model_type": "a", "torch_dtype": "torch.float16"})").dtype(), "float16");
  EXPECT_EQ(config_of(R"({"model_type": "a", "torch_dtype": "float32", "dtype": "bfloat16"})").dtype(), "bfloat16");
  EXPECT_EQ(config_of(R"({"model_type": "a", "torch_dtype": null, "dtype": null})").dtype(), std::nullopt);
  EXPECT_EQ(config_of(R"({"model_type": "a", "torch_dtype": "auto"})").dtype(), std::nullopt);
  EXPECT_NE(refusal([] { config_of(R"({"model_type": "a", "dtype": "int8"})").dtype(); }).find("int8"), std::string::npos);
}

TEST(ModelConfig, SavingKeepsEverythingButTheDtype) {
  const Json old_form = config_of(R"({"b": 1.0, "model_type": "a", "torch_dtype": "float32", "num_experts": 4, "note": null})")
                            .for_saving("bfloat16");
  EXPECT_EQ(old_form.dump(), R"({"b":1.0,"model_type":"a","torch_dtype":"bfloat16","num_experts":4,"note":null})");
  EXPECT_EQ(config_of(R"({"model_type": "a"})").for_saving("bfloat16").dump(), R"({"model_type":"a","dtype":"bfloat16"})");
  EXPECT_EQ(config_of(R"({"dtype": "float16", "model_type": "a", "torch_dtype": "float16"})").for_saving("float32").dump(),
            R"({"dtype":"float32","model_type":"a","torch_dtype":"float32"})");
}

TEST(ModelConfig, ReadsAFolderWithPythonsBareFloats) {
  const TemporaryFolder folder;
  write_text(
      folder.path() / "config.json",
      R"({"model_type": "nemotron_h", "time_step_limit": [0.0, Infinity], "low": -Infinity, "nan": NaN, "text": "Infinity \" NaN"})");
  const ModelConfig config = ModelConfig::read(folder.path());
  EXPECT_EQ(config.get_float("low", 0), -INFINITY);
  EXPECT_TRUE(std::isnan(config.get_float("nan", 0)));
  EXPECT_EQ(config.get_string("text", ""), "Infinity \" NaN");
  EXPECT_EQ(config.raw().at("time_step_limit").dump(), R"([0.0,{"__float__":"Infinity"}])");
}

TEST(ModelConfig, ReadNamesWhatIsMissing) {
  const TemporaryFolder folder;
  EXPECT_NE(refusal([&] { ModelConfig::read(folder.path()); }).find("has no config.json"), std::string::npos);
  EXPECT_NE(refusal([&] { ModelConfig::read(folder.path() / "nowhere"); }).find("is not a folder"), std::string::npos);
  write_text(folder.path() / "config.json", "{\"model_type\": ");
  EXPECT_NE(refusal([&] { ModelConfig::read(folder.path()); }).find("not valid JSON"), std::string::npos);
}

}  // namespace
}  // namespace headrace
