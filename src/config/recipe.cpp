// Reading a recipe: tree -> entries (key, value, place) -> table rows -> Recipe.
// Flow: recipe_yaml -> [recipe] -> recipe_checks. What is allowed stands in recipe_keys.cpp and recipe_peers.cpp.
#include "headrace/recipe.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "base/file.h"
#include "base/names.h"
#include "config/recipe_checks.h"
#include "config/recipe_keys.h"
#include "config/recipe_peers.h"
#include "config/recipe_yaml.h"
#include "headrace/error.h"

namespace headrace {
namespace {

/// One leaf of the tree, or one override.
struct Entry {
  std::string name;  // as written, nested names joined by dots
  RecipeNode value;
  std::string place;  // "recipe.yaml line 3: learning_rate"
};

/// A value that a row got, and who said so.
struct Given {
  std::optional<KeyValue> value;  // nullopt: an override without a value, which restores the default
  std::string name, place;
};

std::string shown(const RecipeNode& node) {
  switch (node.kind) {
    case RecipeNode::Kind::kNull: return "empty";
    case RecipeNode::Kind::kScalar: return "\"" + node.text + "\"";
    case RecipeNode::Kind::kList: return fmt::format("a list of {}", node.items.size());
    case RecipeNode::Kind::kMap: return "a section of keys";
  }
  return "";
}

// ---- texts to values

std::optional<double> read_double(std::string text) {
  if (text.starts_with('+')) text.erase(0, 1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

template <typename Integer>
std::optional<Integer> read_integer(std::string text) {
  if (text.starts_with('+')) text.erase(0, 1);
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) {
    // YAML 1.1 readers take 010 as eight; refuse rather than guess.
    const std::size_t first = text.starts_with('-') ? 1 : 0;
    return text.size() > first + 1 && text[first] == '0' ? std::nullopt : std::optional<Integer>(value);
  }
  // 3.0 and 1e3 are whole numbers too (LLaMA-Factory writes num_train_epochs: 3.0); 2^53 bounds what a double holds exactly.
  const std::optional<double> number = read_double(text);
  if (!number || *number != std::floor(*number) || std::fabs(*number) > 9007199254740992.0) return std::nullopt;
  if (std::is_unsigned_v<Integer> && *number < 0) return std::nullopt;
  return static_cast<Integer>(*number);
}

/// Reads one node as the row's type; nullopt when it is something else or outside the range.
class ValueReader {
 public:
  ValueReader(const RecipeKey& key, const RecipeNode& node) : key_(key), node_(node) {}

  std::optional<KeyValue> operator()(bool& (*)(Recipe&)) const {
    const int read = is_scalar() ? read_bool_text(node_.text) : -1;
    return read < 0 ? std::nullopt : std::optional<KeyValue>(read == 1);
  }
  std::optional<KeyValue> operator()(int64_t& (*)(Recipe&)) const { return number(read_integer<int64_t>(node_.text)); }
  std::optional<KeyValue> operator()(uint64_t& (*)(Recipe&)) const { return number(read_integer<uint64_t>(node_.text)); }
  std::optional<KeyValue> operator()(double& (*)(Recipe&)) const { return number(read_double(node_.text)); }

  std::optional<KeyValue> operator()(std::string& (*)(Recipe&)) const {
    if (!is_scalar()) return std::nullopt;
    if (key_.range.choices.empty()) return node_.text;
    std::string word = lowercase(node_.text);
    if (const int read = read_bool_text(word); read >= 0) word = read == 1 ? "true" : "false";
    for (const KeyChoice& choice : key_.range.choices) {
      if (choice.name == word || std::find(choice.synonyms.begin(), choice.synonyms.end(), word) != choice.synonyms.end())
        return choice.name;
    }
    return std::nullopt;
  }

  std::optional<KeyValue> operator()(std::vector<std::string>& (*)(Recipe&)) const {
    std::vector<std::string> out;
    const auto items = node_.kind == RecipeNode::Kind::kList ? node_.items : std::vector<RecipeNode>{node_};
    for (const RecipeNode& item : items) {
      if (item.kind == RecipeNode::Kind::kScalar) {
        out.push_back(item.text);
      } else if (item.kind == RecipeNode::Kind::kMap && item.members.size() == 1 && item.members[0].first == "path" &&
                 item.members[0].second.kind == RecipeNode::Kind::kScalar) {
        out.push_back(item.members[0].second.text);  // axolotl's `datasets: [{path: ...}]`
      } else {
        return std::nullopt;
      }
    }
    return out;
  }

 private:
  bool is_scalar() const { return node_.kind == RecipeNode::Kind::kScalar; }
  template <typename Number>
  std::optional<KeyValue> number(std::optional<Number> value) const {
    if (!is_scalar() || !value || !key_.range.holds(static_cast<double>(*value))) return std::nullopt;
    return *value;
  }
  const RecipeKey& key_;
  const RecipeNode& node_;
};

KeyValue read_value(const RecipeKey& key, const RecipeNode& node, const std::string& place) {
  std::optional<KeyValue> value = std::visit(ValueReader(key, node), key.member);
  if (!value) {
    const bool list = std::holds_alternative<std::vector<std::string>& (*)(Recipe&)>(key.member);
    fail("{} is {}, but it must be {}{}", place, shown(node), key.needed(),
         list ? " (items may also be written `path: name`, with no other key)" : "");
  }
  return *value;
}

// ---- tree to entries

/// True when some known name lies below `name`.
bool is_section(const std::string& name) {
  const std::string prefix = name + ".";
  const auto below = [&](const std::string& known) { return known.starts_with(prefix); };
  return std::any_of(recipe_keys().begin(), recipe_keys().end(),
                     [&](const RecipeKey& key) {
                       return below(key.name) || std::any_of(key.aliases.begin(), key.aliases.end(), below);
                     }) ||
         std::any_of(peer_forms().begin(), peer_forms().end(), [&](const PeerForm& form) { return below(form.name); }) ||
         std::any_of(peer_keys().begin(), peer_keys().end(), [&](const PeerKey& key) { return below(key.pattern); });
}

/// Hydra-style keys make other tools import and call what they name.
void refuse_code(const RecipeNode& node, const std::string& origin) {
  for (const auto& [key, value] : node.members) {
    const std::string leaf = key.substr(key.rfind('.') + 1);  // rfind gives npos without a dot; npos + 1 is 0
    const bool is_code =
        leaf == "_target_" || leaf == "_partial_" || leaf == "_args_" || leaf == "_call_" || leaf.ends_with("_fn");
    require(!is_code, "{}{}: \"{}\" names code to run, but a recipe is data; remove it and use the keys of docs/recipe.md",
            origin, value.line > 0 ? fmt::format(" line {}", value.line) : "", key);
    refuse_code(value, origin);
  }
  for (const RecipeNode& item : node.items) refuse_code(item, origin);
}

void collect_entries(const RecipeNode& node, const std::string& name, const std::string& origin, std::vector<Entry>& entries) {
  if (node.kind == RecipeNode::Kind::kMap && (name.empty() || is_section(name))) {
    for (const auto& [key, value] : node.members) {
      collect_entries(value, name.empty() ? key : name + "." + key, origin, entries);
    }
  } else {
    const std::string line = node.line > 0 ? fmt::format(" line {}", node.line) : "";
    entries.push_back({name, node, fmt::format("{}{}: {}", origin, line, name)});
  }
}

std::vector<Entry> entries_of_text(const RecipeNode& tree, const std::string& origin) {
  require(tree.kind == RecipeNode::Kind::kMap || tree.kind == RecipeNode::Kind::kNull,
          "{} is {}, but a recipe is a map of keys and values, such as `output_dir: out`", origin, shown(tree));
  refuse_code(tree, origin);
  std::vector<Entry> entries;
  if (tree.kind == RecipeNode::Kind::kMap) collect_entries(tree, "", origin, entries);
  // parse_yaml_tree has refused equal keys of one map; `optimizer.lr: 1` beside `optimizer: {lr: 2}` is the same fault.
  std::map<std::string, std::string> places;
  for (const Entry& entry : entries) {
    const auto [earlier, is_new] = places.emplace(entry.name, entry.place);
    require(is_new, "\"{}\" is given twice: {} and {}; remove one", entry.name, earlier->second, entry.place);
  }
  return entries;
}

std::vector<Entry> entries_of_overrides(const std::vector<std::string>& overrides) {
  std::vector<Entry> all;
  for (const std::string& text : overrides) {
    const std::size_t dashes = text.starts_with("--") ? 2 : 0;
    const std::size_t equals = text.find('=');
    require(equals != std::string::npos && equals > dashes,
            "override \"{}\": write it as --key=value, such as --optimizer.lr=1e-5", text);
    std::string name = text.substr(dashes, equals - dashes);
    std::replace(name.begin(), name.end(), '-', '_');
    const std::string origin = "override --" + name;
    RecipeNode tree;
    tree.kind = RecipeNode::Kind::kMap;
    tree.members.emplace_back(name, parse_yaml_tree(text.substr(equals + 1), origin));
    refuse_code(tree, origin);
    std::vector<Entry> entries;
    collect_entries(tree, "", "override --", entries);
    for (Entry& entry : entries) {
      entry.value.line = 0;
      entry.place = "override --" + entry.name;
      std::erase_if(all, [&](const Entry& earlier) { return earlier.name == entry.name; });  // the later one wins
      all.push_back(std::move(entry));
    }
  }
  return all;
}

// ---- entries to rows

[[noreturn]] void fail_unknown(const Entry& entry) {
  const std::size_t dot = entry.name.rfind('.');
  const std::string leaf = dot == std::string::npos ? entry.name : entry.name.substr(dot + 1);
  std::vector<std::string> known;
  std::string nearest;
  for (const RecipeKey& key : recipe_keys()) {
    known.push_back(key.name);
    known.insert(known.end(), key.aliases.begin(), key.aliases.end());
    // The right key in the wrong section, or without one.
    if (nearest.empty() && (key.name.ends_with("." + leaf) || key.name == leaf)) nearest = key.name;
  }
  for (const PeerForm& form : peer_forms()) known.push_back(form.name);
  if (nearest.empty()) {
    if (const RecipeKey* key = find_recipe_key(leaf)) nearest = key->name;
  }
  if (nearest.empty()) nearest = nearest_name(entry.name, known);
  if (nearest.empty() && dot != std::string::npos) nearest = nearest_name(leaf, known);
  fail("{} is not a known key{}; all keys are in docs/recipe.md", entry.place,
       nearest.empty() ? "" : fmt::format(" (did you mean {}?)", nearest));
}

[[noreturn]] void fail_not_supported(const Entry& entry, const PeerKey& key) {
  std::string allowed;
  for (const std::string& value : key.harmless) allowed += (allowed.empty() ? "" : ", ") + value;
  fail("{}: {} is not supported yet; {}", entry.place, key.feature,
       allowed.empty() ? "remove the key" : fmt::format("remove the key (only {} is accepted)", allowed));
}

/// The values of one source (the file, or all overrides), by the row's name.
class Source {
 public:
  explicit Source(bool null_restores_default) : null_restores_default_(null_restores_default) {}

  void add(const Entry& entry) {
    if (const PeerForm* form = find_peer_form(entry.name)) {
      if (entry.value.kind == RecipeNode::Kind::kNull) return;
      for (const auto& [name, value] : form->translate(entry.value, entry.place))
        add_to_row(*find_recipe_key(name), entry, value);
    } else if (const RecipeKey* key = find_recipe_key(entry.name); key != nullptr && !is_wrong_section(entry)) {
      add_to_row(*key, entry, entry.value);
    } else if (const PeerKey* peer = find_peer_key(entry.name)) {
      const bool empty = entry.value.kind == RecipeNode::Kind::kNull;
      const std::string word = entry.value.kind == RecipeNode::Kind::kScalar ? lowercase(entry.value.text) : "";
      const bool harmless = std::find(peer->harmless.begin(), peer->harmless.end(), word) != peer->harmless.end();
      if (!empty && !harmless) fail_not_supported(entry, *peer);
    } else if (is_section(entry.name)) {
      if (entry.value.kind != RecipeNode::Kind::kNull) {
        fail("{} is {}, but it is a section: its keys stand below it or are written {}.<key>", entry.place, shown(entry.value),
             entry.name);
      }
    } else {
      fail_unknown(entry);
    }
  }
  const std::map<std::string, Given>& rows() const { return rows_; }

 private:
  // `dataset: [..]` is an alias of dataset.path, but `dataset:` with nothing below it says nothing.
  static bool is_wrong_section(const Entry& entry) {
    return entry.value.kind == RecipeNode::Kind::kNull && is_section(entry.name);
  }

  void add_to_row(const RecipeKey& key, const Entry& entry, const RecipeNode& node) {
    Given given{std::nullopt, entry.name, entry.place};
    if (node.kind == RecipeNode::Kind::kNull) {
      if (!null_restores_default_) return;
    } else {
      given.value = read_value(key, node, entry.name == key.name ? entry.place : fmt::format("{} ({})", entry.place, key.name));
    }
    const auto [earlier, is_new] = rows_.emplace(key.name, given);
    require(is_new || earlier->second.value == given.value, "{} is given twice with different values: {} and {}; remove one",
            key.name, earlier->second.place, given.place);
  }

  bool null_restores_default_;
  std::map<std::string, Given> rows_;
};

Recipe build_recipe(const RecipeNode& tree, const std::string& origin, const std::vector<std::string>& overrides) {
  Source file(/*null_restores_default=*/false), command_line(/*null_restores_default=*/true);
  for (const Entry& entry : entries_of_text(tree, origin)) file.add(entry);
  for (const Entry& entry : entries_of_overrides(overrides)) command_line.add(entry);

  Recipe recipe;
  std::map<std::string, Given> rows = command_line.rows();
  rows.insert(file.rows().begin(), file.rows().end());  // keeps what the command line said
  for (const RecipeKey& key : recipe_keys()) {
    const auto given = rows.find(key.name);
    if (given != rows.end() && given->second.value) key.assign(recipe, *given->second.value);
  }

  const auto is_given = [&](const std::string& name) { return rows.contains(name) && rows.at(name).value.has_value(); };
  // Validation records are read as the training records are, unless the recipe says otherwise.
  if (!is_given("validation_dataset.format")) recipe.validation_dataset.format = recipe.dataset.format;
  if (!is_given("validation_dataset.train_on_prompt"))
    recipe.validation_dataset.train_on_prompt = recipe.dataset.train_on_prompt;
  if (!is_given("validation_dataset.chat_template")) recipe.validation_dataset.chat_template = recipe.dataset.chat_template;

  // Who gives accumulation, or a micro-batch alone as Hugging Face's recipes do, does not mean the default global_batch_size.
  StepSchedulerSection& steps = recipe.step_scheduler;
  if (!is_given("step_scheduler.global_batch_size")) {
    if (is_given("step_scheduler.local_batch_size") && steps.gradient_accumulation_steps == 0)
      steps.gradient_accumulation_steps = 1;
    if (steps.gradient_accumulation_steps > 0) steps.global_batch_size = 0;
  }
  check_recipe(recipe, origin);
  return recipe;
}

}  // namespace

std::vector<std::string> overrides_of_arguments(const std::vector<std::string>& arguments) {
  std::vector<std::string> overrides;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    require(argument.size() > 2 && argument.starts_with("--"),
            "the argument \"{}\" belongs to no key; write --key=value, such as --optimizer.lr=1e-5", argument);
    if (argument.find('=') != std::string::npos) {
      overrides.push_back(argument);
    } else if (i + 1 < arguments.size() && !arguments[i + 1].starts_with("--")) {
      overrides.push_back(argument + "=" + arguments[++i]);
    } else {
      overrides.push_back(argument + "=true");
    }
  }
  return overrides;
}

Recipe read_recipe(const std::string& path, const std::vector<std::string>& overrides) {
  const std::string text = read_file(path);
  const bool is_json = path.ends_with(".json");
  return build_recipe(is_json ? parse_json_tree(text, path) : parse_yaml_tree(text, path), path, overrides);
}

Recipe parse_recipe(const std::string& text, const std::string& origin, const std::vector<std::string>& overrides) {
  return build_recipe(parse_yaml_tree(text, origin), origin, overrides);
}

}  // namespace headrace
