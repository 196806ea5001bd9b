// Folders: what is refused, conversion and coverage on load, and the round trip load -> save.
#include "checkpoint/checkpoint.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/file.h"
#include "checkpoint/temporary_folder.h"
#include "checkpoint/test_tables.h"
#include "headrace/error.h"
#include "tests/refusal.h"

namespace headrace {
namespace {

TensorToWrite to_write(const std::string& name, const at::Tensor& tensor) {
  return {name, safetensors_dtype(tensor.scalar_type()), tensor.sizes().vec(), [tensor](const auto& sink) {
            sink({static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.nbytes())});
          }};
}

using Tensors = std::map<std::string, at::Tensor>;

void write_file(const std::filesystem::path& path, const Tensors& tensors) {
  std::vector<TensorToWrite> list;
  for (const auto& [name, tensor] : tensors) list.push_back(to_write(name, tensor));
  write_safetensors(path, std::move(list));
}

using test_support::refusal;

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "\"" << message << "\" lacks " << word;
}

// Values that no dtype rounds: small multiples of 1/4, different everywhere.
at::Tensor numbers(const std::vector<int64_t>& shape, int64_t start, at::ScalarType type = at::kFloat) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return at::arange(start, start + n, at::TensorOptions().dtype(at::kFloat)).remainder(251).div(4).to(type).view(shape);
}

ModelConfig tiny_config(const std::string& type = "qwen3_moe", const std::string& more = "") {
  return {parse_json(R"({"model_type": ")" + type +
                         R"(", "hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
      "num_experts": 3, "moe_intermediate_size": 5, "intermediate_size": 5, "vocab_size": 11, "num_hidden_layers": 2, "torch_dtype": "bfloat16")" +
                         more + "}",
                     "config.json"),
          "config.json"};
}

Tensors hub_tensors(const TestTable& table, at::ScalarType type) {
  Tensors tensors;
  int64_t start = 0;
  for (const WeightPiece& piece : table.map.hub) tensors[piece.hub_name] = numbers(piece.hub_shape, start += 17, type);
  return tensors;
}

struct Fixture {
  TemporaryFolder folder;
  ModelConfig config = tiny_config();
  TestTable table = test_table(config);
  Tensors tensors = hub_tensors(table, at::kBFloat16);

  std::filesystem::path source() const { return folder.path() / "source"; }
  void write() const {
    std::filesystem::create_directories(source());
    write_file(source() / "model.safetensors", tensors);
  }
  LoadedWeights load(const std::vector<NamedTensor>& parameters) const {
    return load_weights(CheckpointFolder(source()), table.map, parameters);
  }
  std::string load_refusal() const {
    write();
    const auto parameters = table.tensors(at::kBFloat16);
    const std::string message = refusal([&] { load(parameters); });
    if (!message.empty()) {
      EXPECT_NE(message.find(source().string()), std::string::npos) << message;
      for (const auto& parameter : parameters)
        EXPECT_TRUE(parameter.tensor.isnan().all().item<bool>()) << "something was written";
    }
    return message;
  }
};

const at::Tensor& find(const std::vector<NamedTensor>& parameters, const std::string& name) {
  for (const NamedTensor& parameter : parameters) {
    if (parameter.name == name) return parameter.tensor;
  }
  throw std::out_of_range(name);
}

TEST(LoadWeights, PutsExpertsInPlaceAndConverts) {
  for (const at::ScalarType file_type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      Fixture fixture;
      fixture.tensors = hub_tensors(fixture.table, file_type);
      fixture.write();
      const auto parameters = fixture.table.tensors(type);
      EXPECT_TRUE(fixture.load(parameters).unknown.empty());
      const at::Tensor& gate_up = find(parameters, "model.layers.1.mlp.experts.gate_up_proj");
      for (int64_t e = 0; e < 3; ++e) {
        const std::string expert = "model.layers.1.mlp.experts." + std::to_string(e) + ".";
        const at::Tensor wanted =
            at::cat({fixture.tensors.at(expert + "gate_proj.weight"), fixture.tensors.at(expert + "up_proj.weight")}, 0);
        EXPECT_TRUE(at::equal(gate_up.select(0, e), wanted.to(type)));
        EXPECT_TRUE(at::equal(find(parameters, "model.layers.1.mlp.experts.down_proj").select(0, e),
                              fixture.tensors.at(expert + "down_proj.weight").to(type)));
      }
      for (const NamedTensor& parameter : parameters)
        EXPECT_FALSE(parameter.tensor.isnan().any().item<bool>()) << parameter.name;
      EXPECT_TRUE(at::equal(find(parameters, "lm_head.weight"), fixture.tensors.at("lm_head.weight").to(type)));
    }
  }
}

TEST(LoadWeights, UnalignedDataOfOldFiles) {
  Fixture fixture;
  fixture.write();
  // The header without its padding plus one space: the data then begin at an odd byte.
  std::string text = read_file(fixture.source() / "model.safetensors");
  uint64_t length = 0;
  std::memcpy(&length, text.data(), 8);
  std::string header = text.substr(8, length);
  header.resize(header.find_last_not_of(' ') + 1);
  if (header.size() % 2 == 0) header += ' ';
  const uint64_t shorter = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &shorter, 8);
  write_text(fixture.source() / "model.safetensors", file + header + text.substr(8 + length));
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const auto parameters = fixture.table.tensors(type);
    fixture.load(parameters);
    EXPECT_TRUE(at::equal(find(parameters, "lm_head.weight"), fixture.tensors.at("lm_head.weight").to(type)));
  }
}

TEST(LoadWeights, FusedFormAndAMixtureOfForms) {
  Fixture fixture;
  const std::string gate_up = "model.layers.0.mlp.experts.gate_up_proj";
  for (int64_t e = 0; e < 3; ++e) {
    fixture.tensors.erase("model.layers.0.mlp.experts." + std::to_string(e) + ".gate_proj.weight");
    fixture.tensors.erase("model.layers.0.mlp.experts." + std::to_string(e) + ".up_proj.weight");
  }
  fixture.tensors[gate_up] = numbers({3, 10, 6}, 3, at::kBFloat16);
  fixture.write();
  const auto parameters = fixture.table.tensors(at::kBFloat16);
  const LoadedWeights loaded = fixture.load(parameters);
  EXPECT_TRUE(at::equal(find(parameters, gate_up), fixture.tensors.at(gate_up)));
  std::size_t fused = 0;
  for (const WeightPiece& piece : loaded.pieces) fused += piece.hub_name == gate_up ? 1 : 0;
  EXPECT_EQ(fused, 1U);

  fixture.tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = numbers({5, 6}, 0, at::kBFloat16);
  expect_words(fixture.load_refusal(), {gate_up, "twice", "model.layers.0.mlp.experts.1.up_proj.weight"});
}

TEST(LoadWeights, PartsOfAParameter) {
  // Experts 1..2 of 3 as one rank of two would hold them, and an odd run of elements as in a sharded flat buffer.
  Fixture fixture;
  fixture.write();
  const std::string name = "model.layers.0.mlp.experts.gate_up_proj";
  const auto whole = fixture.table.tensors(at::kBFloat16);
  fixture.load(whole);
  const at::Tensor wanted = find(whole, name);
  const std::vector<NamedTensor> parts = {{name, at::empty({2, 10, 6}, at::kBFloat16), 60},
                                          {name, at::empty({41}, at::kFloat), 7}};
  const LoadedWeights loaded = fixture.load(parts);
  EXPECT_TRUE(at::equal(parts[0].tensor, wanted.narrow(0, 1, 2)));
  EXPECT_TRUE(at::equal(parts[1].tensor, wanted.view({-1}).narrow(0, 7, 41).to(at::kFloat)));
  EXPECT_EQ(loaded.pieces.size(), 6U);
}

TEST(LoadWeights, MissingTensorsAreListed) {
  Fixture fixture;
  fixture.tensors.erase("model.layers.1.mlp.experts.2.up_proj.weight");
  fixture.tensors.erase("model.norm.weight");
  expect_words(fixture.load_refusal(), {"lacks 2 tensors", "model.layers.1.mlp.experts.2.up_proj.weight", "model.norm.weight"});
}

TEST(LoadWeights, RenamedExpertKeysAreNamed) {
  Fixture fixture;
  Tensors renamed;
  for (const auto& [name, tensor] : fixture.tensors) {
    const std::size_t at = name.find(".mlp.experts.");
    renamed[at == std::string::npos ? name : name.substr(0, at) + ".moe.expert_" + name.substr(at + 13)] = tensor;
  }
  fixture.tensors = renamed;
  expect_words(fixture.load_refusal(),
               {"lacks 18 tensors", "mlp.experts.0.gate_proj", "18 tensors that this model does not know", "moe.expert_0"});
}

TEST(LoadWeights, WrongShapeAndDtype) {
  Fixture fixture;
  fixture.tensors["model.layers.0.mlp.experts.0.up_proj.weight"] =
      numbers({6, 5}, 0, at::kBFloat16);  // as many elements, transposed
  expect_words(fixture.load_refusal(),
               {"model.safetensors", "model.layers.0.mlp.experts.0.up_proj.weight", "[6, 5]", "[5, 6]"});
  fixture.tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = numbers({5, 6}, 0).to(at::kFloat8_e4m3fn);
  expect_words(fixture.load_refusal(), {"model.layers.0.mlp.experts.0.up_proj.weight", "F8_E4M3", "quantised"});
  fixture.tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = numbers({5, 6}, 0).to(at::kLong);
  expect_words(fixture.load_refusal(), {"I64"});
}

TEST(LoadWeights, TableAndParametersMustFit) {
  Fixture fixture;
  fixture.write();
  EXPECT_THROW(fixture.load({{"model.nothing", at::empty({3})}}), std::invalid_argument);
  EXPECT_THROW(fixture.load({{"model.norm.weight", at::empty({7})}}), std::invalid_argument);
  EXPECT_THROW(fixture.load({{"model.norm.weight", at::empty({3}), 4}}), std::invalid_argument);
  EXPECT_THROW(fixture.load({{"model.norm.weight", at::empty({6}, at::kLong)}}), std::invalid_argument);
  fixture.table.map.hub.push_back({"model.norm.weight", {6}, "model.norm.weight", 5});
  EXPECT_THROW(fixture.load({{"model.norm.weight", at::empty({11})}}), std::invalid_argument);
}

TEST(LoadWeights, TiedHead) {
  Fixture fixture;
  fixture.config = tiny_config("qwen3_moe", R"(, "tie_word_embeddings": true)");
  fixture.table = test_table(fixture.config);
  fixture.tensors = hub_tensors(fixture.table, at::kBFloat16);
  const at::Tensor embedding = fixture.tensors.at("model.embed_tokens.weight");
  const auto check = [&] {
    fixture.write();
    const auto parameters = fixture.table.tensors(at::kBFloat16);
    const LoadedWeights loaded = fixture.load(parameters);
    EXPECT_TRUE(at::equal(find(parameters, "model.embed_tokens.weight"), embedding));
    EXPECT_TRUE(loaded.unknown.empty());  // a stale copy of the head must not be carried into saves
    for (const WeightPiece& piece : loaded.pieces) EXPECT_NE(piece.hub_name, "lm_head.weight");
  };
  check();
  fixture.tensors["lm_head.weight"] = embedding.clone();
  check();
  fixture.tensors.erase("model.embed_tokens.weight");
  check();
  fixture.tensors["model.embed_tokens.weight"] = embedding.add(1);
  expect_words(fixture.load_refusal(), {"lm_head.weight", "model.embed_tokens.weight", "differ", "tie_word_embeddings"});
}

TEST(LoadWeights, UnknownAndIgnored) {
  Fixture fixture;
  fixture.tensors["model.layers.9.mtp.weight"] = numbers({2}, 0);
  fixture.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = numbers({2}, 0);
  fixture.write();
  EXPECT_EQ(fixture.load(fixture.table.tensors(at::kFloat)).unknown, (std::vector<std::string>{"model.layers.9.mtp.weight"}));
}

// ---- folders

TEST(CheckpointFolder, RefusesBrokenFolders) {
  const TemporaryFolder folder;
  const auto open = [&] { return refusal([&] { CheckpointFolder opened(folder.path()); }); };
  const auto index = [&](const std::string& text) { write_text(folder.path() / "model.safetensors.index.json", text); };
  expect_words(refusal([&] { CheckpointFolder opened(folder.path() / "nowhere"); }), {"nowhere", "is not a folder"});
  expect_words(open(), {"has no weights"});
  write_text(folder.path() / "pytorch_model.bin", "x");
  expect_words(open(), {"pytorch_model.bin", "safetensors"});
  index("{");
  expect_words(open(), {"index.json", "not valid JSON"});
  index("[]");
  expect_words(open(), {"no weight_map"});
  index(R"({"weight_map": {}})");
  expect_words(open(), {"empty"});
  index(R"({"weight_map": {"a": 3}})");
  expect_words(open(), {"\"a\"", "file name"});
  index(R"({"weight_map": {"a": {"b": "c"}}})");
  expect_words(open(), {"\"a\"", "file name"});
  index(R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})");
  expect_words(open(), {"tensor a twice"});
  index(R"({"weight_map": {"a": "../x.safetensors"}})");
  expect_words(open(), {"../x.safetensors", "plain file name"});
  index(
      R"({"metadata": {"total_size": 8.0, "weight_map": {"z": [1]}}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})");
  write_file(folder.path() / "x.safetensors", {{"a", numbers({2}, 0)}});
  expect_words(open(), {"y.safetensors", "tensor b", "missing"});
  write_file(folder.path() / "y.safetensors", {{"c", numbers({2}, 0)}});
  expect_words(open(), {"places the tensor b in y.safetensors", "lacks it"});
  write_file(folder.path() / "y.safetensors", {{"a", numbers({2}, 0)}, {"b", numbers({2}, 0)}});
  expect_words(open(), {"tensor a is in two shards", "x.safetensors", "y.safetensors"});
  write_file(folder.path() / "y.safetensors", {{"b", numbers({2}, 0)}});
  EXPECT_EQ(open(), "");
  write_text(folder.path() / "y.safetensors", read_file(folder.path() / "y.safetensors").substr(0, 60));
  expect_words(open(), {"y.safetensors"});
}

TEST(CheckpointFolder, SingleFileWinsOverIndex) {
  const TemporaryFolder folder;
  write_text(folder.path() / "model.safetensors.index.json", R"({"weight_map": {"a": "missing.safetensors"}})");
  write_file(folder.path() / "model.safetensors", {{"b", numbers({2}, 0)}, {"c", numbers({2}, 0)}, {"d", numbers({2}, 1)}});
  const CheckpointFolder opened(folder.path());
  EXPECT_EQ(opened.names(), (std::vector<std::string>{"b", "c", "d"}));
  EXPECT_TRUE(opened.same_bits("b", "c"));
  EXPECT_FALSE(opened.same_bits("b", "d"));
}

// ---- saving

SaveRequest request_of(const Fixture& fixture, const std::vector<NamedTensor>& parameters, const LoadedWeights& loaded) {
  SaveRequest request;
  request.folder = fixture.folder.path() / "out";
  request.parameters = parameters;
  request.pieces = loaded.pieces;
  request.config = fixture.config.for_saving("bfloat16");
  request.source = fixture.source();
  request.unknown = loaded.unknown;
  return request;
}

TEST(SaveCheckpoint, RoundTripKeepsKeysBitsAndOtherFiles) {
  for (const uint64_t limit : {uint64_t{50'000'000'000}, uint64_t{300}, uint64_t{1}}) {
    Fixture fixture;
    fixture.tensors["model.layers.9.mtp.weight"] = numbers({3}, 5);
    fixture.tensors["model.layers.9.mtp.scales"] = numbers({3}, 5).to(at::kByte);
    fixture.write();
    const auto write = [&](const std::string& name, const std::string& text) { write_text(fixture.source() / name, text); };
    write("tokenizer.json", "{\"a\": 1}\n");
    write("LICENSE", "text\r\n");
    write("config.json", "not this one");
    write("optimizer.pt", "x");
    write(".gitattributes", "x");
    std::filesystem::create_directories(fixture.source() / "sub.json");
    std::filesystem::create_symlink("tokenizer.json", fixture.source() / "vocab.json");  // the hub's cache is made of links

    const auto parameters = fixture.table.tensors(at::kBFloat16);
    const LoadedWeights loaded = fixture.load(parameters);
    SaveRequest request = request_of(fixture, parameters, loaded);
    request.max_shard_size = limit;
    save_checkpoint(request);

    const CheckpointFolder before(fixture.source()), after(request.folder);
    EXPECT_EQ(after.names(), before.names());
    for (const std::string& name : before.names()) {
      const auto a = before.find(name), b = after.find(name);
      EXPECT_EQ(a->info->dtype, b->info->dtype) << name;
      EXPECT_EQ(a->info->shape, b->info->shape) << name;
      const auto bytes_a = a->file->bytes(*a->info), bytes_b = b->file->bytes(*b->info);
      EXPECT_TRUE(std::equal(bytes_a.begin(), bytes_a.end(), bytes_b.begin(), bytes_b.end())) << name;
    }
    std::vector<std::string> others;
    for (const auto& entry : std::filesystem::directory_iterator(request.folder)) {
      const std::string name = entry.path().filename().string();
      if (!name.ends_with(".safetensors") && !name.ends_with(".index.json")) others.push_back(name);
    }
    std::sort(others.begin(), others.end());
    EXPECT_EQ(others, (std::vector<std::string>{"LICENSE", "config.json", "tokenizer.json", "vocab.json"}));
    EXPECT_EQ(read_file(request.folder / "vocab.json"), "{\"a\": 1}\n");
    EXPECT_EQ(read_file(request.folder / "LICENSE"), "text\r\n");
    EXPECT_EQ(ModelConfig::read(request.folder).raw(), fixture.config.raw());
    EXPECT_EQ(std::filesystem::exists(request.folder / "model.safetensors"), limit > 1000);
  }
}

TEST(SaveCheckpoint, FailuresLeaveNothing) {
  Fixture fixture;
  fixture.write();
  const auto parameters = fixture.table.tensors(at::kBFloat16);
  const LoadedWeights loaded = fixture.load(parameters);
  SaveRequest request = request_of(fixture, parameters, loaded);

  request.unknown = {"nowhere"};
  expect_words(refusal([&] { save_checkpoint(request); }), {"nowhere"});
  EXPECT_FALSE(std::filesystem::exists(request.folder));

  // Half-way: the config cannot be written because it is not UTF-8.
  request.unknown.clear();
  request.config["bad"] = "\xff";
  EXPECT_ANY_THROW(save_checkpoint(request));
  EXPECT_FALSE(std::filesystem::exists(request.folder));
  std::filesystem::create_directory(request.folder);
  EXPECT_ANY_THROW(save_checkpoint(request));
  EXPECT_TRUE(std::filesystem::is_empty(request.folder));

  request.config.erase("bad");
  write_text(request.folder / "x", "mine");
  expect_words(refusal([&] { save_checkpoint(request); }), {"not empty"});
  EXPECT_EQ(read_file(request.folder / "x"), "mine");
  std::filesystem::remove(request.folder / "x");
  save_checkpoint(request);
  EXPECT_EQ(CheckpointFolder(request.folder).names().size(), fixture.tensors.size());
}

TEST(SaveCheckpoint, PiecesAndParametersMustFit) {
  Fixture fixture;
  fixture.write();
  const auto parameters = fixture.table.tensors(at::kBFloat16);
  const LoadedWeights loaded = fixture.load(parameters);
  const auto refused = [&](const std::function<void(SaveRequest&)>& change) {
    SaveRequest request = request_of(fixture, parameters, loaded);
    change(request);
    EXPECT_THROW(save_checkpoint(request), std::invalid_argument);
    EXPECT_FALSE(std::filesystem::exists(request.folder));
  };
  refused([](SaveRequest& r) { r.pieces.pop_back(); });
  refused([](SaveRequest& r) { r.pieces.push_back(r.pieces.back()); });
  refused([](SaveRequest& r) { r.parameters.pop_back(); });
  refused([](SaveRequest& r) { r.parameters.push_back(r.parameters.back()); });
  refused([](SaveRequest& r) { r.parameters.back().first_element = 3; });
  refused([](SaveRequest& r) { r.pieces[3].offset += 1; });
  refused([](SaveRequest& r) { r.unknown = {"x"}, r.source.reset(); });
}

TEST(Dtypes, ThereAndBack) {
  for (const char* name : {"F32", "BF16", "F16", "F64", "I64", "BOOL", "U8", "F8_E4M3", "F8_E5M2", "U64"}) {
    ASSERT_TRUE(scalar_type(name).has_value()) << name;
    EXPECT_EQ(safetensors_dtype(*scalar_type(name)), name);
    EXPECT_EQ(c10::elementSize(*scalar_type(name)) * 8, static_cast<std::size_t>(dtype_bits(name)));
  }
  EXPECT_EQ(scalar_type("F4"), std::nullopt);
  EXPECT_THROW(safetensors_dtype(at::kComplexDouble), std::invalid_argument);
}

}  // namespace
}  // namespace headrace
