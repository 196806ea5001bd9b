// Writing a recipe: as YAML that reads back the same, and the table of keys as Markdown.
// Flow: Recipe -> [recipe_write] -> output_dir/recipe.yaml; recipe_keys -> docs/recipe.md.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>

#include "config/recipe_keys.h"
#include "config/recipe_peers.h"
#include "headrace/recipe.h"

namespace headrace {
namespace {

// PyYAML takes 1e-05 for a text; with a point it is a number to every reader.
std::string yaml_number(double value) {
  std::string text = fmt::format("{}", value);
  if (const std::size_t e = text.find('e'); e != std::string::npos) {
    if (text.find('.') == std::string::npos) text.insert(e, ".0");
  } else if (text.find('.') == std::string::npos) {
    text += ".0";
  }
  return text;
}

// Plain only where no YAML reader can see anything but a text.
bool is_plain(const std::string& text) {
  static const std::set<std::string> words = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "nan", "inf"};
  if (text.empty() || words.contains(lowercase(text))) return false;
  if (std::isalpha(static_cast<unsigned char>(text[0])) == 0 && text[0] != '/') return false;
  return std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.' || c == '/'; });
}

std::string yaml_text(const std::string& text) {
  if (is_plain(text)) return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

struct YamlValue {
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return fmt::format("{}", value); }
  std::string operator()(uint64_t value) const { return fmt::format("{}", value); }
  std::string operator()(double value) const { return yaml_number(value); }
  std::string operator()(const std::string& value) const { return yaml_text(value); }
  std::string operator()(const std::vector<std::string>& value) const {
    std::string out;
    for (const std::string& item : value) out += (out.empty() ? "" : ", ") + yaml_text(item);
    return "[" + out + "]";
  }
};

std::string yaml_value(const RecipeKey& key, const Recipe& recipe) {
  if (key.is_set != nullptr && !key.is_set(recipe)) return "null";
  return std::visit(YamlValue{}, key.value(recipe));
}

}  // namespace

std::string to_yaml(const Recipe& recipe) {
  std::string out = "# Every key with its value; docs/recipe.md explains them.\n", section;
  for (const RecipeKey& key : recipe_keys()) {
    const std::size_t dot = key.name.find('.');
    const std::string key_section = dot == std::string::npos ? "" : key.name.substr(0, dot);
    if (key_section != section && !key_section.empty()) out += key_section + ":\n";
    section = key_section;
    out += fmt::format("{}{}: {}\n", section.empty() ? "" : "  ",
                       dot == std::string::npos ? key.name : key.name.substr(dot + 1), yaml_value(key, recipe));
  }
  return out;
}

std::string recipe_key_table() {
  const Recipe defaults;
  std::string out = "| key | type | default | meaning | other names |\n|---|---|---|---|---|\n";
  for (const RecipeKey& key : recipe_keys()) {
    std::string aliases;
    for (const std::string& alias : key.aliases) aliases += (aliases.empty() ? "`" : ", `") + alias + "`";
    const std::string value = yaml_value(key, defaults);
    out += fmt::format("| `{}` | {} | {} | {} | {} |\n", key.name, key.needed(),
                       value == "\"\"" || value == "[]" ? "" : "`" + value + "`", key.help, aliases);
  }
  out += "\nWritten differently by other tools, and understood:\n\n| key | meaning |\n|---|---|\n";
  for (const PeerForm& form : peer_forms()) out += fmt::format("| `{}` | {} |\n", form.name, form.help);
  out +=
      "\nKnown from other tools, but not supported yet (a value in the last column asks for nothing else and is accepted):\n\n"
      "| key | what it is | accepted |\n|---|---|---|\n";
  for (const PeerKey& key : peer_keys()) {
    std::string accepted;
    for (const std::string& value : key.harmless) accepted += (accepted.empty() ? "`" : ", `") + value + "`";
    out += fmt::format("| `{}` | {} | {} |\n", key.pattern, key.feature, accepted);
  }
  return out;
}

}  // namespace headrace
