// Writes a small folder of prepared tokens, as `headrace prepare` does, and random documents to fill it with.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"

namespace headrace::testing_data {

struct TinyDocument {
  std::vector<uint32_t> input_ids;
  std::vector<uint8_t> loss_mask;
};

inline std::filesystem::path fresh_folder(const std::string& name) {
  const auto folder = std::filesystem::path(testing::TempDir()) / ("headrace_" + name);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

/// Unlike write_file_atomically without waiting for the disk: the property tests write hundreds of folders.
inline void write_quickly(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

template <typename T>
void write_values(const std::filesystem::path& path, const std::vector<T>& values) {
  write_quickly(path, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)});
}

/// Writes `documents` as split "train", so many to a shard, with vocab_size 1000.
inline void write_tiny_shards(const std::filesystem::path& folder, const std::vector<TinyDocument>& documents,
                              std::size_t documents_per_shard = 3) {
  Json shards = Json::array();
  int64_t all_tokens = 0, trained = 0;
  for (std::size_t first = 0; first < documents.size(); first += documents_per_shard) {
    std::vector<uint32_t> ids;
    std::vector<uint8_t> mask;
    std::vector<uint64_t> bounds = {0};
    for (std::size_t d = first; d < std::min(first + documents_per_shard, documents.size()); ++d) {
      ids.insert(ids.end(), documents[d].input_ids.begin(), documents[d].input_ids.end());
      mask.insert(mask.end(), documents[d].loss_mask.begin(), documents[d].loss_mask.end());
      bounds.push_back(ids.size());
    }
    const std::string name = fmt::format("train-{:05}", first / documents_per_shard);
    write_values(folder / (name + ".input_ids"), ids);
    write_values(folder / (name + ".loss_mask"), mask);
    write_values(folder / (name + ".bounds"), bounds);
    shards.push_back({{"name", name}, {"num_documents", bounds.size() - 1}, {"num_tokens", ids.size()}});
    all_tokens += static_cast<int64_t>(ids.size());
    for (const uint8_t value : mask) trained += value;
  }
  const Json train = {
      {"num_documents", documents.size()}, {"num_tokens", all_tokens}, {"num_trained_tokens", trained}, {"shards", shards}};
  const Json manifest = {{"format", "headrace-tokens"}, {"version", 1},     {"digest", "abc"},
                         {"vocab_size", 1000},          {"max_length", 64}, {"splits", {{"train", train}}}};
  write_quickly(folder / "manifest.json", manifest.dump(2));
}

inline std::vector<TinyDocument> random_documents(int count, int max_length, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<TinyDocument> out(static_cast<std::size_t>(count));
  for (TinyDocument& document : out) {
    const auto length = 1 + random() % static_cast<unsigned>(max_length);
    for (unsigned i = 0; i < length; ++i) {
      document.input_ids.push_back(random() % 1000);
      document.loss_mask.push_back(random() % 2);
    }
  }
  return out;
}

}  // namespace headrace::testing_data
