// The recipe's text as a plain tree, whatever the file format. The only file that knows yaml-cpp is recipe_yaml.cpp.
// Flow: text -> [RecipeNode] -> recipe.cpp.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace headrace {

struct RecipeNode {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string text;                                         // of a scalar; quotes are gone, so "1e-5" and 1e-5 are the same
  int line = 0;                                             // from 1; 0 when not known (JSON, overrides)
  std::vector<RecipeNode> items;                            // of a list
  std::vector<std::pair<std::string, RecipeNode>> members;  // of a map, in file order
};

/// Parses YAML (which includes JSON in practice); `origin` names it in errors. Throws UserError: not YAML, more than one
/// document, a key twice in one map, a key that is not a plain word, a tag other than YAML's own core types, nesting beyond 16
/// levels.
RecipeNode parse_yaml_tree(const std::string& text, const std::string& origin);

/// The same from strict JSON (a .json file may use tabs and escapes that YAML parsers refuse).
RecipeNode parse_json_tree(const std::string& text, const std::string& origin);

}  // namespace headrace
