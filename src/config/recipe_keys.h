// The table of recipe keys: one row drives reading, overrides, aliases, ranges, to_yaml and the table of docs/recipe.md.
// Flow: recipe_yaml -> recipe.cpp (uses [recipe_keys], recipe_peers) -> recipe_checks. A new key is one row and one member.
#pragma once

#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "headrace/recipe.h"

namespace headrace {

/// Where a key's value lives in a Recipe; the alternative is the key's type.
using KeyMember = std::variant<bool& (*)(Recipe&), int64_t& (*)(Recipe&), uint64_t& (*)(Recipe&), double& (*)(Recipe&),
                               std::string& (*)(Recipe&), std::vector<std::string>& (*)(Recipe&)>;
using KeyValue = std::variant<bool, int64_t, uint64_t, double, std::string, std::vector<std::string>>;

/// One allowed text of a key and what peers write for it.
struct KeyChoice {
  std::string name;
  std::vector<std::string> synonyms;
};

struct KeyRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_excluded = false, high_excluded = false;
  std::vector<KeyChoice> choices;  // of texts; empty: any text

  bool holds(double value) const;
  std::string text() const;  // "at least 1", "from 0 to below 1", "one of a, b"; empty when everything is allowed
};

struct RecipeKey {
  std::string name;  // nested: "optimizer.lr"
  KeyMember member;
  KeyRange range;
  std::string help;  // one sentence
  std::vector<std::string> aliases;
  /// For keys whose absence means "as config.json says": null in YAML when this is false.
  bool (*is_set)(const Recipe&) = nullptr;
  void (*mark_set)(Recipe&) = nullptr;

  KeyValue value(const Recipe& recipe) const;
  void assign(Recipe& recipe, const KeyValue& value) const;
  std::string type_text() const;  // "a number", "true or false", ...
  /// type_text and range in one phrase for errors: "a number above 0".
  std::string needed() const;
};

/// All keys, in the order in which to_yaml writes them (sections together, top-level keys last).
const std::vector<RecipeKey>& recipe_keys();

/// The row with this name or alias, or nullptr.
const RecipeKey* find_recipe_key(const std::string& name);

}  // namespace headrace
