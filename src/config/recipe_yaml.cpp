#include "config/recipe_yaml.h"

#include <yaml-cpp/yaml.h>

#include <set>

#include "base/json.h"
#include "headrace/error.h"

namespace headrace {
namespace {

// Deeper than any recipe; bounds aliases that contain themselves and aliases of aliases.
constexpr int kMaxDepth = 16;
constexpr int kMaxNodes = 10000;

// yaml-cpp marks plain scalars "?" and quoted ones "!"; everything else was written as a tag in the file.
bool is_core_tag(const std::string& tag) {
  static const std::set<std::string> core = {"",
                                             "?",
                                             "!",
                                             "tag:yaml.org,2002:str",
                                             "tag:yaml.org,2002:int",
                                             "tag:yaml.org,2002:float",
                                             "tag:yaml.org,2002:bool",
                                             "tag:yaml.org,2002:null",
                                             "tag:yaml.org,2002:seq",
                                             "tag:yaml.org,2002:map"};
  return core.contains(tag);
}

class YamlToTree {
 public:
  explicit YamlToTree(const std::string& origin) : origin_(origin) {}

  RecipeNode convert(const YAML::Node& node, int depth) {
    require(depth <= kMaxDepth && ++count_ <= kMaxNodes,
            "{}: nested deeper than {} levels or more than {} values: this is no recipe", origin_, kMaxDepth, kMaxNodes);
    RecipeNode out;
    out.line = node.Mark().line + 1;
    require(is_core_tag(node.Tag()),
            "{} line {}: the YAML tag \"{}\" asks for code or a foreign type, but a recipe is data; remove the tag", origin_,
            out.line, node.Tag());
    if (node.IsScalar()) {
      out.kind = RecipeNode::Kind::kScalar;
      out.text = node.Scalar();
    } else if (node.IsSequence()) {
      out.kind = RecipeNode::Kind::kList;
      for (const YAML::Node& item : node) out.items.push_back(convert(item, depth + 1));
    } else if (node.IsMap()) {
      out.kind = RecipeNode::Kind::kMap;
      convert_members(node, depth, out);
    }
    return out;
  }

 private:
  void convert_members(const YAML::Node& node, int depth, RecipeNode& out) {
    for (const auto& member : node) {
      const int line = member.first.Mark().line + 1;
      require(member.first.IsScalar(), "{} line {}: a key must be a plain name", origin_, line);
      const std::string key = member.first.Scalar();
      require(key != "<<", "{} line {}: merge keys (<<) are not supported; write the values out", origin_, line);
      // yaml-cpp 0.7 keeps both silently.
      for (const auto& [earlier, value] : out.members) {
        require(earlier != key, "{}: the key \"{}\" is given twice, on lines {} and {}; remove one", origin_, key, value.line,
                line);
      }
      RecipeNode value = convert(member.second, depth + 1);
      value.line = line;  // where the key stands is what a reader looks for
      out.members.emplace_back(key, std::move(value));
    }
  }

  std::string origin_;
  int count_ = 0;
};

RecipeNode from_json(const Json& json) {
  RecipeNode out;
  if (json.is_object()) {
    out.kind = RecipeNode::Kind::kMap;
    for (const auto& item : json.items()) out.members.emplace_back(item.key(), from_json(item.value()));
  } else if (json.is_array()) {
    out.kind = RecipeNode::Kind::kList;
    for (const Json& item : json) out.items.push_back(from_json(item));
  } else if (json.is_string()) {
    out.kind = RecipeNode::Kind::kScalar;
    out.text = json.get<std::string>();
  } else if (!json.is_null()) {
    out.kind = RecipeNode::Kind::kScalar;
    out.text = json.dump();
  }
  return out;
}

}  // namespace

RecipeNode parse_yaml_tree(const std::string& text, const std::string& origin) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    require(documents.size() <= 1, "{} holds {} YAML documents, but a recipe is one; remove the \"---\" lines between them",
            origin, documents.size());
    return documents.empty() ? RecipeNode{} : YamlToTree(origin).convert(documents[0], 0);
  } catch (const YAML::Exception& error) {
    fail("{} is not valid YAML: line {}, column {}: {}", origin, error.mark.line + 1, error.mark.column + 1, error.msg);
  }
}

RecipeNode parse_json_tree(const std::string& text, const std::string& origin) { return from_json(parse_json(text, origin)); }

}  // namespace headrace
