#include "base/json.h"

#include <cmath>
#include <set>

#include "base/file.h"
#include "headrace/error.h"

namespace headrace {
namespace {

// nlohmann keeps the last of two equal keys silently; a checkpoint header or config that repeats a key is a lie about one of
// them.
class DuplicateKeyCheck {
 public:
  explicit DuplicateKeyCheck(std::string origin) : origin_(std::move(origin)) {}
  bool operator()(int /*depth*/, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start: open_.emplace_back(); break;
      case Json::parse_event_t::object_end: open_.pop_back(); break;
      case Json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        require(open_.back().insert(key).second, "{}: the key \"{}\" appears twice in one object", origin_, key);
        break;
      }
      default: break;
    }
    return true;
  }

 private:
  std::string origin_;
  std::vector<std::set<std::string>> open_;
};

void append_escaped(std::string& out, const std::string& text) { out += Json(text).dump(-1, ' ', /*ensure_ascii=*/true); }

std::string python_float(double value) {
  if (std::isnan(value)) return R"({"__float__": "NaN"})";
  if (std::isinf(value)) return value > 0 ? R"({"__float__": "Infinity"})" : R"({"__float__": "-Infinity"})";
  // Shortest text that reads back the same; Python's repr turns to an exponent below 1e-4 and from 1e16 on, with two digits.
  std::string shortest = fmt::format("{}", value);
  const double magnitude = std::fabs(value);
  if (magnitude != 0 && (magnitude < 1e-4 || magnitude >= 1e16)) {
    if (shortest.find('e') == std::string::npos) shortest = fmt::format("{:e}", value);
    return shortest;
  }
  if (shortest.find('e') != std::string::npos) shortest = fmt::format("{:.1f}", value);
  if (shortest.find('.') == std::string::npos) shortest += ".0";
  return shortest;
}

void append_python(std::string& out, const Json& value, int indent, bool sort_keys) {
  const std::string inner(static_cast<std::size_t>(indent) + 2, ' ');
  const std::string outer(static_cast<std::size_t>(indent), ' ');
  if (value.is_object() && !value.empty()) {
    std::vector<std::string> keys;
    for (const auto& item : value.items()) keys.push_back(item.key());
    if (sort_keys) std::sort(keys.begin(), keys.end());
    out += "{\n";
    for (std::size_t i = 0; i < keys.size(); ++i) {
      out += inner;
      append_escaped(out, keys[i]);
      out += ": ";
      append_python(out, value.at(keys[i]), indent + 2, sort_keys);
      out += i + 1 < keys.size() ? ",\n" : "\n";
    }
    out += outer + "}";
  } else if (value.is_array() && !value.empty()) {
    out += "[\n";
    for (std::size_t i = 0; i < value.size(); ++i) {
      out += inner;
      append_python(out, value[i], indent + 2, sort_keys);
      out += i + 1 < value.size() ? ",\n" : "\n";
    }
    out += outer + "]";
  } else if (value.is_number_float()) {
    out += python_float(value.get<double>());
  } else {
    out += value.dump(-1, ' ', /*ensure_ascii=*/true);
  }
}

}  // namespace

Json parse_json(const std::string& text, const std::string& origin) {
  try {
    return Json::parse(text, DuplicateKeyCheck(origin));
  } catch (const nlohmann::json::exception& error) {
    fail("{} is not valid JSON: {}", origin, error.what());
  }
}

Json read_json_file(const std::filesystem::path& path) { return parse_json(read_file(path), path.string()); }

std::string to_python_json(const Json& value, bool sort_keys) {
  std::string out;
  append_python(out, value, 0, sort_keys);
  return out + "\n";
}

}  // namespace headrace
