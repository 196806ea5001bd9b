// load_model: dtype rules, tied and untied heads, the round trip through a folder, and a load that must leave nothing
// unwritten.
#include "models/load_model.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "checkpoint/temporary_folder.h"
#include "models/tiny_models.h"

namespace headrace {
namespace {

using testing_models::refusal;
using testing_models::tiny_config;
using testing_models::write_model;

class EveryFamilyLoads : public testing::TestWithParam<std::tuple<std::string, bool, at::ScalarType>> {};

TEST_P(EveryFamilyLoads, SaveAndLoadKeepEveryBit) {
  const auto& [type, tied, dtype] = GetParam();
  const TemporaryFolder temporary;
  write_model(temporary.path() / "a", tiny_config(type, tied), dtype);
  const LoadedModel first = load_model(temporary.path() / "a", {}, at::kCPU);
  EXPECT_EQ(first.decoder.dtype(), dtype);
  EXPECT_GT(first.decoder.parameters().flat().abs().sum().item<float>(), 0.0F);
  save_checkpoint(save_request(first, temporary.path() / "b"));
  const LoadedModel second = load_model(temporary.path() / "b", {}, at::kCPU);
  EXPECT_TRUE(at::equal(first.decoder.parameters().flat(), second.decoder.parameters().flat()));
  EXPECT_EQ(read_file(temporary.path() / "a/model.safetensors"), read_file(temporary.path() / "b/model.safetensors"));
  EXPECT_EQ(CheckpointFolder(temporary.path() / "b").find("lm_head.weight").has_value(), !tied);
}

INSTANTIATE_TEST_SUITE_P(Families, EveryFamilyLoads,
                         testing::Combine(testing::Values("llama", "qwen3", "mixtral", "qwen3_moe"), testing::Bool(),
                                          testing::Values(at::kFloat, at::kBFloat16)));

TEST(LoadModel, DtypeIsTheConfigsUnlessAskedFor) {
  const TemporaryFolder temporary;
  write_model(temporary.path() / "m", tiny_config("llama"), at::kBFloat16);
  LoadSettings settings;
  EXPECT_EQ(load_model(temporary.path() / "m", settings, at::kCPU).decoder.dtype(), at::kBFloat16);
  settings.torch_dtype = "float32";
  EXPECT_EQ(load_model(temporary.path() / "m", settings, at::kCPU).decoder.dtype(), at::kFloat);
  settings.torch_dtype = "float16";
  EXPECT_NE(refusal([&] { load_model(temporary.path() / "m", settings, at::kCPU); }).find("float16"), std::string::npos);
  // Without the key: that of the file.
  Json config = tiny_config("llama");
  config.erase("dtype");
  write_file_atomically(temporary.path() / "m/config.json", config.dump());
  EXPECT_EQ(load_model(temporary.path() / "m", {}, at::kCPU).decoder.dtype(), at::kBFloat16);
}

TEST(LoadModel, BalancingLossCanBeAskedFor) {
  const TemporaryFolder temporary;
  write_model(temporary.path() / "m", tiny_config("mixtral"));
  EXPECT_FALSE(load_model(temporary.path() / "m", {}, at::kCPU).decoder.spec().output_router_logits);
  const LoadedModel model = load_model(temporary.path() / "m", {"auto", true, 0.25}, at::kCPU);
  EXPECT_TRUE(model.decoder.spec().output_router_logits);
  EXPECT_EQ(model.decoder.spec().router_aux_loss_coef, 0.25);
}

TEST(LoadModel, TiedConfigWithAnotherHeadIsLoadedAndSavedUntied) {
  const TemporaryFolder temporary;
  write_model(temporary.path() / "m", tiny_config("llama", /*tied=*/false));  // random: head and embedding differ
  Json config = tiny_config("llama", /*tied=*/true);
  write_file_atomically(temporary.path() / "m/config.json", config.dump());
  const LoadedModel model = load_model(temporary.path() / "m", {}, at::kCPU);
  EXPECT_FALSE(model.decoder.spec().tie_word_embeddings);
  EXPECT_FALSE(at::equal(model.decoder.parameters().weight("lm_head.weight"),
                         model.decoder.parameters().weight("model.embed_tokens.weight")));
  save_checkpoint(save_request(model, temporary.path() / "saved"));
  EXPECT_EQ(read_json_file(temporary.path() / "saved/config.json").at("tie_word_embeddings"), false);
}

TEST(LoadModel, UntiedConfigWithoutAHeadIsRefused) {
  const TemporaryFolder temporary;
  write_model(temporary.path() / "m", tiny_config("llama", /*tied=*/true));
  write_file_atomically(temporary.path() / "m/config.json", tiny_config("llama", /*tied=*/false).dump());
  EXPECT_NE(refusal([&] { load_model(temporary.path() / "m", {}, at::kCPU); }).find("lm_head.weight"), std::string::npos);
}

TEST(LoadModel, ChecksWithoutMemoryAreThoseOfALoad) {
  const TemporaryFolder temporary;
  write_model(temporary.path() / "m", tiny_config("qwen3_moe"));
  EXPECT_EQ(load_model(temporary.path() / "m", {}, c10::Device(c10::kMeta)).weights.pieces.size(),
            load_model(temporary.path() / "m", {}, at::kCPU).weights.pieces.size());
  Json config = tiny_config("qwen3_moe");
  config["moe_intermediate_size"] = 13;
  write_file_atomically(temporary.path() / "m/config.json", config.dump());
  const std::string with = refusal([&] { load_model(temporary.path() / "m", {}, at::kCPU); });
  EXPECT_NE(with.find("[13, 16]"), std::string::npos) << with;
  EXPECT_EQ(refusal([&] { load_model(temporary.path() / "m", {}, c10::Device(c10::kMeta)); }), with);
}

}  // namespace
}  // namespace headrace
