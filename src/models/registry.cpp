#include "models/registry.h"

#include "headrace/error.h"

namespace headrace {

const std::vector<Family>& families() {
  static const std::vector<Family> list = {
      {"llama", "LlamaForCausalLM", llama_spec, dense_weight_map},
      {"qwen3", "Qwen3ForCausalLM", qwen3_spec, dense_weight_map},
      {"mixtral", "MixtralForCausalLM", mixtral_spec, mixtral_weight_map},
      {"qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe_spec, qwen3_moe_weight_map},
  };
  return list;
}

const Family& find_family(const ModelConfig& config) {
  std::string known;
  for (const Family& family : families()) {
    if (config.model_type() == family.model_type) return family;
    known += (known.empty() ? "" : ", ") + std::string(family.model_type);
  }
  fail("{}: model_type \"{}\" is not supported yet; this version trains {}.", config.origin(), config.model_type(), known);
}

}  // namespace headrace
