#include "data/token_shards.h"

#include "data/tiny_shards.h"
#include "headrace/error.h"

namespace headrace {
namespace {

using namespace testing_data;

/// Writes good shards, lets `damage` change the folder, and returns the error of opening them.
template <typename Damage>
std::string error_after(Damage damage, const std::string& split = "train") {
  const auto folder = fresh_folder("damaged_shards");
  write_tiny_shards(folder, random_documents(7, 9, 1));
  damage(folder);
  try {
    TokenShards(folder, split);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

template <typename Change>
std::string error_with_manifest(Change change) {
  return error_after([&](const std::filesystem::path& folder) {
    Json manifest = read_json_file(folder / "manifest.json");
    change(manifest);
    write_quickly(folder / "manifest.json", manifest.dump());
  });
}

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message << "\n  not: " << part;
}

}  // namespace

TEST(TokenShards, DocumentsComeBackFromAnyShard) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const auto documents = random_documents(1 + static_cast<int>(seed), 9, seed);
    const auto folder = fresh_folder("shards");
    write_tiny_shards(folder, documents, 1 + seed % 4);
    const TokenShards shards(folder, "train");
    ASSERT_EQ(shards.num_documents(), static_cast<int64_t>(documents.size()));
    EXPECT_EQ(shards.vocab_size(), 1000);
    EXPECT_EQ(shards.digest(), "abc");
    int64_t tokens = 0, trained = 0;
    for (std::size_t d = 0; d < documents.size(); ++d) {
      const Document view = shards.document(static_cast<int64_t>(d));
      EXPECT_EQ(std::vector<uint32_t>(view.input_ids.begin(), view.input_ids.end()), documents[d].input_ids);
      EXPECT_EQ(std::vector<uint8_t>(view.loss_mask.begin(), view.loss_mask.end()), documents[d].loss_mask);
      tokens += static_cast<int64_t>(view.input_ids.size());
      for (const uint8_t value : view.loss_mask) trained += value;
    }
    EXPECT_EQ(shards.num_tokens(), tokens);
    EXPECT_EQ(shards.num_trained_tokens(), trained);
    EXPECT_THROW(shards.document(-1), std::invalid_argument);
    EXPECT_THROW(shards.document(shards.num_documents()), std::invalid_argument);
  }
}

TEST(TokenShards, AShardWithoutDocumentsIsSkipped) {
  const auto folder = fresh_folder("empty_shard");
  write_tiny_shards(folder, random_documents(4, 9, 3), 2);
  Json manifest = read_json_file(folder / "manifest.json");
  auto& shards = manifest["splits"]["train"]["shards"];
  shards.insert(shards.begin() + 1, Json{{"name", "train-empty"}, {"num_documents", 0}, {"num_tokens", 0}});
  write_quickly(folder / "manifest.json", manifest.dump());
  write_values<uint32_t>(folder / "train-empty.input_ids", {});
  write_values<uint8_t>(folder / "train-empty.loss_mask", {});
  write_values<uint64_t>(folder / "train-empty.bounds", {0});
  const TokenShards with(folder, "train");
  const auto documents = random_documents(4, 9, 3);
  for (int64_t d = 0; d < 4; ++d)
    EXPECT_EQ(with.document(d).input_ids.size(), documents[static_cast<std::size_t>(d)].input_ids.size());
}

TEST(TokenShards, ForeignOrDamagedFoldersAreRefused) {
  using Path = std::filesystem::path;
  EXPECT_EQ(error_after([](const Path&) {}), "no error");
  expect_part(error_after([](const Path& f) { std::filesystem::remove(f / "manifest.json"); }), "run `headrace prepare`");
  expect_part(error_after([](const Path& f) { write_quickly(f / "manifest.json", "{"); }), "not valid JSON");
  expect_part(error_after([](const Path& f) { write_quickly(f / "manifest.json", "[1]"); }), "not a manifest");
  expect_part(error_after([](const Path& f) { write_quickly(f / "manifest.json", "{}"); }), "not a manifest");
  expect_part(error_after([](const Path&) {}, "validation"), "no split \"validation\"; it has: train");
  expect_part(error_after([](const Path& f) { std::filesystem::remove(f / "train-00001.loss_mask"); }),
              "train-00001.loss_mask is missing");
  for (const char* part : {"input_ids", "loss_mask", "bounds"}) {
    expect_part(error_after([&](const Path& f) {
                  const Path path = f / (std::string("train-00000.") + part);
                  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
                }),
                "the file was cut or changed");
    expect_part(
        error_after([&](const Path& f) { std::ofstream(f / (std::string("train-00000.") + part), std::ios::app) << "x"; }),
        "the file was cut or changed");
  }
}

TEST(TokenShards, LyingManifestsAreRefused) {
  EXPECT_EQ(error_with_manifest([](Json&) {}), "no error");
  expect_part(error_with_manifest([](Json& m) { m["version"] = 2; }), "version 2");
  expect_part(error_with_manifest([](Json& m) { m["format"] = "other"; }), "not a manifest");
  expect_part(error_with_manifest([](Json& m) { m.erase("digest"); }), "has no \"digest\"");
  expect_part(error_with_manifest([](Json& m) { m["digest"] = 3; }), "must be a text");
  expect_part(error_with_manifest([](Json& m) { m["splits"] = 3; }), "must be an object");
  expect_part(error_with_manifest([](Json& m) { m["splits"]["train"] = 3; }), "has no \"num_documents\"");
  expect_part(error_with_manifest([](Json& m) { m["splits"]["train"]["shards"] = 3; }), "must be a list");
  expect_part(error_with_manifest([](Json& m) { m["splits"]["train"]["num_documents"] = 8; }), "the split says 8");
  expect_part(error_with_manifest([](Json& m) { m["splits"]["train"]["num_documents"] = 0; }), "holds no documents");
  expect_part(error_with_manifest([](Json& m) { m["splits"]["train"]["num_tokens"] = 1; }), "the split says 7 and 1");
  for (const Json& wrong : {Json(-1), Json(1.5), Json("3"), Json(nullptr), Json(UINT64_MAX), Json(INT64_MAX)}) {
    expect_part(error_with_manifest([&](Json& m) { m["splits"]["train"]["shards"][0]["num_tokens"] = wrong; }),
                "it must be a count");
    expect_part(error_with_manifest([&](Json& m) { m["splits"]["train"]["shards"][0]["num_documents"] = wrong; }),
                "it must be a count");
  }
  for (const char* name : {"../train-00000", "/etc/passwd", "", "a/b", ".."}) {
    expect_part(error_with_manifest([&](Json& m) { m["splits"]["train"]["shards"][0]["name"] = name; }), "leaves the folder");
  }
}

TEST(TokenShards, BoundsMustAscend) {
  const auto with_bounds = [](const std::vector<uint64_t>& bounds) {
    return error_after([&](const std::filesystem::path& folder) {
      write_tiny_shards(folder, {{{1, 2, 3, 4, 5, 6}, {0, 0, 0, 1, 1, 1}}, {{7, 8}, {0, 1}}}, 2);
      write_values(folder / "train-00000.bounds", bounds);
    });
  };
  EXPECT_EQ(with_bounds({0, 6, 8}), "no error");
  expect_part(with_bounds({1, 6, 8}), "must run from 0 to the 8 tokens");
  expect_part(with_bounds({0, 6, 7}), "must run from 0 to the 8 tokens");
  expect_part(with_bounds({0, 9, 8}), "must ascend");
  expect_part(with_bounds({0, 0, 8}), "must ascend");
  expect_part(with_bounds({0, UINT64_MAX, 8}), "must ascend");
}

}  // namespace headrace
