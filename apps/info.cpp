#include "apps/info.h"

#include <fmt/ostream.h>
#include <fmt/ranges.h>

#include <map>
#include <set>

#include "checkpoint/checkpoint.h"
#include "headrace/error.h"
#include "models/decoder.h"
#include "models/load_model.h"

namespace headrace {
namespace {

// Parameters that one token passes through: of the experts top_k out of num_experts.
double active_parameters(const DecoderSpec& spec, const ParameterLayout& layout) {
  double active = 0;
  for (const ParameterInfo& info : layout.entries()) {
    const bool of_experts = info.name.find(".mlp.experts.") != std::string::npos;
    double share = 1.0;
    if (of_experts) {
      for (const LayerSpec& layer : spec.layers) {
        if (!layer.is_moe()) continue;
        share = static_cast<double>(layer.moe().router.top_k) / static_cast<double>(layer.moe().router.num_experts);
        break;
      }
    }
    active += share * static_cast<double>(info.numel());
  }
  return active;
}

// "30.532 billion", "134.5 million"
std::string count_text(double count) {
  return count >= 1e9 ? fmt::format("{:.3f} billion", count / 1e9) : fmt::format("{:.3f} million", count / 1e6);
}

std::string bytes_text(double bytes) {
  return bytes >= 1e9 ? fmt::format("{:.2f} GB", bytes / 1e9) : fmt::format("{:.2f} MB", bytes / 1e6);
}

void print_shape(const DecoderSpec& spec, std::ostream& out) {
  const AttentionConfig& attention = spec.layers[0].attention;
  fmt::print(out, "layers        {}, hidden_size {}, vocab_size {}{}\n", spec.layers.size(), spec.hidden_size, spec.vocab_size,
             spec.tie_word_embeddings ? ", tied embeddings" : "");
  fmt::print(out, "attention     {} heads, {} key/value heads, head_dim {}{}\n", attention.num_heads,
             attention.num_key_value_heads, attention.head_dim, attention.qk_norm ? ", q/k norm" : "");
  int64_t sparse = 0;
  const LayerSpec* example = nullptr;
  for (const LayerSpec& layer : spec.layers) {
    if (layer.is_moe()) ++sparse, example = &layer;
  }
  if (example != nullptr) {
    const MoeConfig& moe = example->moe();
    fmt::print(out, "experts       {} of width {}, top_k {}, in {} of {} layers\n", moe.router.num_experts,
               moe.moe_intermediate_size, moe.router.top_k, sparse, spec.layers.size());
  }
}

}  // namespace

void print_info(const std::filesystem::path& folder, std::ostream& out) {
  const ModelConfig config = ModelConfig::read(folder);
  const Family& family = find_family(config);
  const DecoderSpec spec = family.spec(config);
  const ParameterLayout layout = decoder_layout(spec);
  const CheckpointFolder checkpoint(folder);

  fmt::print(out, "family        {} ({})\n", family.model_type, family.architecture);
  print_shape(spec, out);
  fmt::print(out, "parameters    {}, {} active per token\n", count_text(static_cast<double>(layout.num_parameters())),
             count_text(active_parameters(spec, layout)));

  std::map<std::string, int64_t> dtypes;
  std::set<std::string> files;
  uint64_t bytes = 0;
  for (const std::string& name : checkpoint.names()) {
    const auto entry = checkpoint.find(name);
    ++dtypes[entry->info->dtype];
    files.insert(entry->file->path().filename().string());
    bytes += entry->info->end - entry->info->begin;
  }
  std::string dtype_text;
  for (const auto& [dtype, count] : dtypes)
    dtype_text += fmt::format("{}{} x {}", dtype_text.empty() ? "" : ", ", count, dtype);
  fmt::print(out, "tensors       {} ({}), {} in {} file{}\n", checkpoint.names().size(), dtype_text,
             bytes_text(static_cast<double>(bytes)), files.size(), files.size() == 1 ? "" : "s");

  // A load into tensors without memory: every check of a real one, and its error where that would fail.
  const LoadedModel model = load_model(folder, {}, c10::Device(c10::kMeta));
  fmt::print(out, "loads         as {}\n", torch_dtype_of(model.decoder.dtype()));
  if (!model.weights.unknown.empty()) fmt::print(out, "not used      {}\n", fmt::join(model.weights.unknown, ", "));
}

}  // namespace headrace
