// config.json as read; see model_config.h.
#include "config/model_config.h"

#include <cmath>
#include <limits>

#include "base/file.h"
#include "headrace/error.h"

namespace headrace {
namespace {

// Python's json module writes Infinity, -Infinity and NaN bare, and some config.json files hold them. JSON knows no such words:
// outside of strings they become {"__float__": "Infinity"}, the form that transformers v5 writes for them.
std::string replace_bare_floats(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  bool in_string = false;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\' && i + 1 < text.size()) out += text[i++];
      if (c == '"') in_string = false;
      out += text[i++];
      continue;
    }
    bool replaced = false;
    for (const char* word : {"-Infinity", "Infinity", "NaN"}) {
      const std::string name = word;
      if (text.compare(i, name.size(), name) != 0) continue;
      out += R"({"__float__": ")" + name + R"("})";
      i += name.size();
      replaced = true;
      break;
    }
    if (replaced) continue;
    in_string = c == '"';
    out += text[i++];
  }
  return out;
}

std::optional<double> special_float(const Json& value) {
  if (!value.is_object() || value.size() != 1 || !value.contains("__float__")) return std::nullopt;
  const Json& name = value.at("__float__");
  if (name == "Infinity") return std::numeric_limits<double>::infinity();
  if (name == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (name == "NaN") return std::numeric_limits<double>::quiet_NaN();
  return std::nullopt;
}

// The first of `keys` that is there and not null.
const Json* find_value(const Json& raw, const std::vector<std::string>& keys, std::string& found) {
  for (const std::string& key : keys) {
    const auto item = raw.find(key);
    if (item == raw.end() || item->is_null()) continue;
    found = key;
    return &*item;
  }
  return nullptr;
}

[[noreturn]] void wrong_type(const std::string& origin, const std::string& key, const Json& value, const char* needed) {
  fail("{}: {} is {}, but it must be {}", origin, key, value.dump(-1, ' ', false, Json::error_handler_t::replace), needed);
}

}  // namespace

ModelConfig ModelConfig::read(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  require(std::filesystem::is_directory(folder), "{} is not a folder; a Hugging Face model folder with config.json is needed",
          folder.string());
  require(std::filesystem::exists(path), "{} has no config.json; a Hugging Face model folder is needed", folder.string());
  return {parse_json(replace_bare_floats(read_file(path)), path.string()), path.string()};
}

ModelConfig::ModelConfig(Json raw, std::string origin) : raw_(std::move(raw)), origin_(std::move(origin)) {
  require(raw_.is_object(), "{} is not a JSON object", origin_);
  const auto type = find_string({"model_type"});
  require(type.has_value() && !type->empty(),
          "{} has no model_type; add it (for example \"qwen3_moe\") or use a folder that "
          "transformers loads",
          origin_);
  model_type_ = *type;
}

bool ModelConfig::has(const std::string& key) const {
  const auto item = raw_.find(key);
  return item != raw_.end() && !item->is_null();
}

std::optional<int64_t> ModelConfig::find_int(const std::vector<std::string>& keys) const {
  std::string key;
  const Json* value = find_value(raw_, keys, key);
  if (value == nullptr) return std::nullopt;
  if (value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    wrong_type(origin_, key, *value, "an integer below 2^63");
  }
  if (value->is_number_integer()) return value->get<int64_t>();
  if (value->is_number_float()) {
    const double number = value->get<double>();
    if (number == std::floor(number) && std::fabs(number) <= 9007199254740992.0) return static_cast<int64_t>(number);
  }
  wrong_type(origin_, key, *value, "an integer");
}

std::optional<double> ModelConfig::find_float(const std::vector<std::string>& keys) const {
  std::string key;
  const Json* value = find_value(raw_, keys, key);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) return value->get<double>();
  if (const auto special = special_float(*value)) return special;
  wrong_type(origin_, key, *value, "a number");
}

std::optional<bool> ModelConfig::find_bool(const std::vector<std::string>& keys) const {
  std::string key;
  const Json* value = find_value(raw_, keys, key);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  wrong_type(origin_, key, *value, "true or false");
}

std::optional<std::string> ModelConfig::find_string(const std::vector<std::string>& keys) const {
  std::string key;
  const Json* value = find_value(raw_, keys, key);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->get<std::string>();
  wrong_type(origin_, key, *value, "a string");
}

int64_t ModelConfig::get_int(const std::string& key, int64_t default_value) const {
  return find_int({key}).value_or(default_value);
}
double ModelConfig::get_float(const std::string& key, double default_value) const {
  return find_float({key}).value_or(default_value);
}
bool ModelConfig::get_bool(const std::string& key, bool default_value) const {
  return find_bool({key}).value_or(default_value);
}
std::string ModelConfig::get_string(const std::string& key, const std::string& default_value) const {
  return find_string({key}).value_or(default_value);
}

int64_t ModelConfig::need_int(const std::string& key) const {
  const auto value = find_int({key});
  require(value.has_value(), "{} has no {}", origin_, key);
  return *value;
}

std::optional<std::string> ModelConfig::dtype() const {
  auto name = find_string({"dtype", "torch_dtype"});
  if (!name) return std::nullopt;
  if (name->starts_with("torch.")) name = name->substr(6);
  if (*name == "auto") return std::nullopt;  // written by some tools; it says nothing
  require(*name == "float32" || *name == "bfloat16" || *name == "float16",
          "{}: dtype is {}, but float32, bfloat16 or float16 is needed", origin_, *name);
  return name;
}

Json ModelConfig::for_saving(const std::string& dtype) const {
  Json out = raw_;
  bool written = false;
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!out.contains(key)) continue;
    out[key] = dtype;
    written = true;
  }
  if (!written) out["dtype"] = dtype;
  return out;
}

}  // namespace headrace
