// The weight files of a folder, opened and checked against each other; and the names of dtypes. See checkpoint.h.
#include <algorithm>
#include <array>
#include <cstring>

#include "checkpoint/checkpoint.h"
#include "headrace/error.h"

namespace headrace {
namespace {

constexpr std::array<std::pair<at::ScalarType, const char*>, 19> kDtypes = {{{at::kBool, "BOOL"},
                                                                             {at::kByte, "U8"},
                                                                             {at::kChar, "I8"},
                                                                             {at::kFloat8_e5m2, "F8_E5M2"},
                                                                             {at::kFloat8_e4m3fn, "F8_E4M3"},
                                                                             {at::kFloat8_e8m0fnu, "F8_E8M0"},
                                                                             {at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
                                                                             {at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
                                                                             {at::kShort, "I16"},
                                                                             {at::kUInt16, "U16"},
                                                                             {at::kHalf, "F16"},
                                                                             {at::kBFloat16, "BF16"},
                                                                             {at::kInt, "I32"},
                                                                             {at::kUInt32, "U32"},
                                                                             {at::kFloat, "F32"},
                                                                             {at::kComplexFloat, "C64"},
                                                                             {at::kDouble, "F64"},
                                                                             {at::kLong, "I64"},
                                                                             {at::kUInt64, "U64"}}};

// name -> file of an index.json, by events: the map may have 37,000 entries. Other keys (metadata) are skipped whatever they
// hold.
class IndexEvents : public Json::json_sax_t {
 public:
  IndexEvents(std::map<std::string, std::string>& weight_map, const std::string& origin)
      : weight_map_(weight_map), origin_(origin) {}

  bool start_object(std::size_t /*size*/) override {
    other();
    in_map_ = ++depth_ == 2 && key_ == "weight_map";
    require(!in_map_ || !found_, "{} has weight_map twice", origin_);
    found_ = found_ || in_map_;
    return true;
  }
  bool end_object() override {
    if (--depth_ < 2) in_map_ = false;
    return true;
  }
  bool start_array(std::size_t /*size*/) override {
    ++depth_;
    return other();
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& text) override {
    if (depth_ == 1 || in_map_) key_ = text;
    return true;
  }
  bool string(string_t& text) override {
    if (!in_map_) return true;
    require(weight_map_.emplace(key_, text).second, "{}: weight_map names the tensor {} twice", origin_, key_);
    return true;
  }
  bool null() override { return other(); }
  bool boolean(bool /*value*/) override { return other(); }
  bool number_integer(number_integer_t /*value*/) override { return other(); }
  bool number_unsigned(number_unsigned_t /*value*/) override { return other(); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return other(); }
  bool binary(binary_t& /*value*/) override { return false; }
  bool parse_error(std::size_t /*position*/, const std::string& /*token*/, const Json::exception& error) override {
    fail("{} is not valid JSON: {}", origin_, error.what());
  }
  bool found() const { return found_; }

 private:
  bool other() const {
    require(!in_map_, "{}: weight_map[\"{}\"] must be a file name", origin_, key_);
    return true;
  }

  std::map<std::string, std::string>& weight_map_;
  const std::string& origin_;
  std::string key_;
  int depth_ = 0;
  bool in_map_ = false, found_ = false;
};

std::map<std::string, std::string> read_weight_map(const std::filesystem::path& path) {
  const std::string text = read_file(path), origin = path.string();
  std::map<std::string, std::string> weight_map;
  IndexEvents events(weight_map, origin);
  Json::sax_parse(text, &events);
  require(events.found(), "{} has no weight_map object", origin);
  return weight_map;
}

}  // namespace

CheckpointFolder::CheckpointFolder(const std::filesystem::path& folder) : path_(folder) {
  require(std::filesystem::is_directory(folder), "{} is not a folder; a Hugging Face model folder is needed", folder.string());
  const auto open = [&](const std::filesystem::path& path) -> const SafetensorsFile& {
    files_.push_back(std::make_unique<SafetensorsFile>(path));
    return *files_.back();
  };
  const std::filesystem::path single = folder / "model.safetensors", index = folder / "model.safetensors.index.json";
  if (std::filesystem::exists(single)) {
    const SafetensorsFile& file = open(single);
    for (const TensorInfo& info : file.header().tensors) entries_.emplace(info.name, Entry{&file, &info});
    return;
  }
  if (!std::filesystem::exists(index)) {
    for (const char* old : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
      require(!std::filesystem::exists(folder / old),
              "{} has its weights in {} only, but safetensors is needed; load it with transformers once "
              "and save it with save_pretrained",
              folder.string(), old);
    }
    fail("{} has no weights: model.safetensors or model.safetensors.index.json is needed", folder.string());
  }

  std::map<std::string, std::vector<std::string>> names_of_shard;
  for (const auto& [name, shard] : read_weight_map(index)) names_of_shard[shard].push_back(name);
  require(!names_of_shard.empty(), "{}: weight_map is empty", index.string());
  for (const auto& [shard, names] : names_of_shard) {
    require(std::filesystem::path(shard).filename() == shard && shard != "..",
            "{}: the shard name \"{}\" must be a plain file name", index.string(), shard);
    require(std::filesystem::exists(folder / shard), "{}: the shard {} of tensor {} is missing; the download may be unfinished",
            index.string(), shard, names.front());
    const SafetensorsFile& file = open(folder / shard);
    for (const std::string& name : names) {
      const TensorInfo* info = file.find(name);
      require(info != nullptr, "{} places the tensor {} in {}, but that file lacks it", index.string(), name, shard);
      entries_.emplace(name, Entry{&file, info});
    }
    // A tensor that the index does not name belongs to the checkpoint all the same: a shard may not hold more than one truth
    // about it.
    for (const TensorInfo& info : file.header().tensors) {
      const auto [other, is_new] = entries_.emplace(info.name, Entry{&file, &info});
      require(is_new || other->second.info == &info, "{}: the tensor {} is in two shards, {} and {}", folder.string(),
              info.name, other->second.file->path().filename().string(), shard);
    }
  }
}

std::optional<CheckpointFolder::Entry> CheckpointFolder::find(const std::string& hub_name) const {
  const auto found = entries_.find(hub_name);
  if (found == entries_.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> CheckpointFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

bool CheckpointFolder::same_bits(const std::string& hub_name, const std::string& other) const {
  const Entry a = entries_.at(hub_name), b = entries_.at(other);
  const auto bytes_a = a.file->bytes(*a.info), bytes_b = b.file->bytes(*b.info);
  return a.info->dtype == b.info->dtype && a.info->shape == b.info->shape &&
         (bytes_a.empty() || std::memcmp(bytes_a.data(), bytes_b.data(), bytes_a.size()) == 0);
}

std::string safetensors_dtype(at::ScalarType type) {
  for (const auto& [scalar, name] : kDtypes) {
    if (scalar == type) return name;
  }
  throw std::invalid_argument(fmt::format("safetensors_dtype: safetensors has no dtype for {}", c10::toString(type)));
}

std::optional<at::ScalarType> scalar_type(const std::string& safetensors_dtype) {
  for (const auto& [scalar, name] : kDtypes) {
    if (safetensors_dtype == name) return scalar;
  }
  return std::nullopt;
}

}  // namespace headrace
