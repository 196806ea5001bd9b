#include "data/token_shards.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/json.h"
#include "headrace/error.h"

namespace headrace {
namespace {

static_assert(std::endian::native == std::endian::little, "token shards are little-endian and are read where they lie");

constexpr const char* kFormat = "headrace-tokens";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxTokens = int64_t{1} << 48;  // keeps every byte count far from overflow

/// Typed access to the manifest, so that a foreign or damaged one ends in a sentence.
class Manifest {
 public:
  Manifest(const Json& json, std::string origin) : json_(json), origin_(std::move(origin)) {}

  const Json& get(const char* key) const {
    require(json_.is_object() && json_.contains(key), "{} has no \"{}\"; run `headrace prepare` again", origin_, key);
    return json_.at(key);
  }
  int64_t count(const char* key) const {
    const Json& value = get(key);
    const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(kMaxTokens)
                                                 : value.is_number_integer() && value.get<int64_t>() >= 0;
    require(fits, "{}: \"{}\" is {}, but it must be a count from 0 to {}; run `headrace prepare` again", origin_, key,
            value.dump(), kMaxTokens);
    return value.get<int64_t>();
  }
  std::string text(const char* key) const {
    const Json& value = get(key);
    require(value.is_string(), "{}: \"{}\" is {}, but it must be a text; run `headrace prepare` again", origin_, key,
            value.dump());
    return value.get<std::string>();
  }

 private:
  const Json& json_;
  std::string origin_;
};

MappedFile open_part(const std::filesystem::path& path, int64_t count, int64_t bytes_each) {
  require(std::filesystem::exists(path), "{} is missing, though manifest.json names it; run `headrace prepare` again",
          path.string());
  MappedFile file(path);
  require(file.bytes().size() == static_cast<std::size_t>(count * bytes_each),
          "{} holds {} bytes, but manifest.json says {} values of {} bytes; the file was cut or changed: run `headrace "
          "prepare` again",
          path.string(), file.bytes().size(), count, bytes_each);
  return file;
}

template <typename T>
std::span<const T> values_of(const MappedFile& file) {
  return {reinterpret_cast<const T*>(file.bytes().data()), file.bytes().size() / sizeof(T)};  // maps begin at a page: aligned
}

void check_bounds(const MappedFile& file, int64_t num_tokens) {
  const auto bounds = values_of<uint64_t>(file);
  require(
      bounds.front() == 0 && bounds.back() == static_cast<uint64_t>(num_tokens),
      "{}: the bounds run from {} to {}, but they must run from 0 to the {} tokens of the shard; run `headrace prepare` again",
      file.path().string(), bounds.front(), bounds.back(), num_tokens);
  for (std::size_t i = 1; i < bounds.size(); ++i) {
    require(bounds[i] > bounds[i - 1],
            "{}: document {} runs from token {} to {}, but bounds must ascend; run `headrace prepare` again",
            file.path().string(), i - 1, bounds[i - 1], bounds[i]);
  }
}

}  // namespace

TokenShards::TokenShards(const std::filesystem::path& folder, const std::string& split) {
  const std::filesystem::path path = folder / "manifest.json";
  require(std::filesystem::exists(path), "{} is missing, so {} is no folder of prepared tokens; run `headrace prepare`",
          path.string(), folder.string());
  const Json json = read_json_file(path);
  const Manifest manifest(json, path.string());
  require(json.is_object() && json.contains("format") && json.at("format") == kFormat,
          "{} is not a manifest of prepared tokens (its format is not \"{}\"); run `headrace prepare`", path.string(), kFormat);
  const int64_t version = manifest.count("version");
  require(version == kVersion, "{} has version {}, but this program reads version {}; run `headrace prepare` again",
          path.string(), version, kVersion);
  digest_ = manifest.text("digest");
  vocab_size_ = manifest.count("vocab_size");

  const Json& splits = manifest.get("splits");
  require(splits.is_object(), "{}: \"splits\" must be an object; run `headrace prepare` again", path.string());
  if (!splits.contains(split)) {
    std::string known;
    for (const auto& item : splits.items()) known += (known.empty() ? "" : ", ") + item.key();
    fail("{} has no split \"{}\"; it has: {}", path.string(), split, known.empty() ? "none" : known);
  }
  const Manifest totals(splits.at(split), fmt::format("{}: split \"{}\"", path.string(), split));
  num_documents_ = totals.count("num_documents");
  num_tokens_ = totals.count("num_tokens");
  num_trained_tokens_ = totals.count("num_trained_tokens");
  require(num_documents_ > 0, "{}: the split \"{}\" holds no documents; look at the data and at max_length", path.string(),
          split);

  const Json& shards = totals.get("shards");
  require(shards.is_array(), "{}: the shards of \"{}\" must be a list; run `headrace prepare` again", path.string(), split);
  int64_t documents = 0, tokens = 0;
  for (const Json& entry : shards) {
    const Manifest shard(entry, fmt::format("{}: a shard of \"{}\"", path.string(), split));
    const std::string name = shard.text("name");
    require(!name.empty() && name.find('/') == std::string::npos && name != "." && name != "..",
            "{}: the shard name \"{}\" leaves the folder; run `headrace prepare` again", path.string(), name);
    const int64_t shard_documents = shard.count("num_documents"), shard_tokens = shard.count("num_tokens");
    shards_.push_back({open_part(folder / (name + ".input_ids"), shard_tokens, sizeof(uint32_t)),
                       open_part(folder / (name + ".loss_mask"), shard_tokens, sizeof(uint8_t)),
                       open_part(folder / (name + ".bounds"), shard_documents + 1, sizeof(uint64_t)), documents,
                       shard_documents});
    check_bounds(shards_.back().bounds, shard_tokens);
    documents += shard_documents;
    tokens += shard_tokens;
  }
  require(
      documents == num_documents_ && tokens == num_tokens_,
      "{}: the shards of \"{}\" hold {} documents and {} tokens, but the split says {} and {}; run `headrace prepare` again",
      path.string(), split, documents, tokens, num_documents_, num_tokens_);
}

Document TokenShards::document(int64_t index) const {
  check_argument(index >= 0 && index < num_documents_, "TokenShards::document: index {} is outside 0 to {}", index,
                 num_documents_ - 1);
  // The last shard that begins at or before the document; shards without documents share their begin with the next one.
  const auto after = std::upper_bound(shards_.begin(), shards_.end(), index,
                                      [](int64_t i, const Shard& shard) { return i < shard.first_document; });
  const Shard& shard = *std::prev(after);
  const auto bounds = values_of<uint64_t>(shard.bounds);
  const std::size_t local = static_cast<std::size_t>(index - shard.first_document);
  const std::size_t begin = bounds[local], length = bounds[local + 1] - begin;
  return {values_of<uint32_t>(shard.input_ids).subspan(begin, length),
          values_of<uint8_t>(shard.loss_mask).subspan(begin, length)};
}

}  // namespace headrace
