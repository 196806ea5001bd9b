// What recipes of other tools say in a form that is not a plain alias, or ask for and Headrace cannot do yet.
// Flow: recipe.cpp asks here for every key that the table of recipe_keys.cpp does not hold.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/recipe_yaml.h"

namespace headrace {

/// A key whose value must be translated into values of table keys.
struct PeerForm {
  std::string name;
  std::string help;  // for docs/recipe.md
  /// `place` names file, line and key in errors. Throws UserError for a value without meaning.
  std::vector<std::pair<std::string, RecipeNode>> (*translate)(const RecipeNode& value, const std::string& place);
};
const std::vector<PeerForm>& peer_forms();
const PeerForm* find_peer_form(const std::string& name);

/// A key of a known peer for something that Headrace does not do, or does in one way only.
struct PeerKey {
  std::string pattern;                // a name, or the beginning of names: "lora_*"
  std::string feature;                // what it is, for the error
  std::vector<std::string> harmless;  // values that ask for nothing but what Headrace does anyway: accepted
};
const std::vector<PeerKey>& peer_keys();
const PeerKey* find_peer_key(const std::string& name);

/// "true", "yes", "on" -> 1; "false", "no", "off" -> 0 (any case); anything else -> -1.
int read_bool_text(const std::string& text);
std::string lowercase(std::string text);

}  // namespace headrace
