// See upcycle.h. In order: read the config, find and check every tensor, describe the new files, write them under a temporary
// name, rename.
#include "checkpoint/upcycle.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <set>

#include "base/file.h"
#include "checkpoint/carried_files.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/upcycle_config.h"
#include "checkpoint/weight_shards.h"
#include "headrace/error.h"

namespace headrace {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

// ---- router values

// SplitMix64 (Steele, Lea, Flood 2014) of a counter: any value can be had without those before it.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// A standard normal value as the sum of twelve 32-bit uniforms minus 6 (mean 0, variance 1, |z| < 6). Sum and difference are
// exact integers, so that no library's log or cos makes it differ between machines.
double standard_normal(uint64_t stream, uint64_t index) {
  int64_t sum = 0;
  for (uint64_t i = 0; i < 6; ++i) {
    const uint64_t bits = mix(stream ^ mix(index * 6 + i));
    sum += static_cast<int64_t>(bits >> 32) + static_cast<int64_t>(bits & 0xffffffffU) +
           1;  // + 1: two half steps, for a mean of exactly 0
  }
  return std::ldexp(static_cast<double>(sum - (int64_t{6} << 32)), -32);
}

uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);  // nearest, ties to even; values are finite
}

template <typename T>
void append(std::vector<std::byte>& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
}

std::vector<std::byte> router_bytes(const DenseModel& model, const UpcycleSettings& settings, int64_t layer,
                                    const std::string& dtype) {
  const uint64_t stream = mix(mix(settings.seed) + static_cast<uint64_t>(layer));
  std::vector<std::byte> out;
  const auto count = static_cast<uint64_t>(settings.num_experts * model.hidden_size);
  out.reserve(count * static_cast<uint64_t>(dtype_bits(dtype)) / 8);
  for (uint64_t i = 0; i < count; ++i) {
    const double value = settings.router_std * standard_normal(stream, i);
    if (dtype == "F64") {
      append(out, std::bit_cast<uint64_t>(value));
    } else if (dtype == "F32") {
      append(out, std::bit_cast<uint32_t>(static_cast<float>(value)));
    } else if (dtype == "BF16") {
      append(out, to_bfloat16(static_cast<float>(value)));
    } else {
      append(out, std::bit_cast<uint16_t>(c10::Half(static_cast<float>(value))));
    }
  }
  return out;
}

// ---- tensors

// Finds tensors of the dense model, checks them, and knows which were asked for.
class DenseTensors {
 public:
  explicit DenseTensors(const CheckpointFolder& folder) : folder_(folder) {}

  CheckpointFolder::Entry take(const std::string& name, const std::vector<int64_t>& shape) {
    const auto entry = folder_.find(name);
    require(entry.has_value(), "{} lacks the tensor {}, which config.json calls for", folder_.path().string(), name);
    require(entry->info->shape == shape, "{}: the tensor {} has shape [{}], but config.json calls for [{}]",
            entry->file->path().string(), name, fmt::join(entry->info->shape, ", "), fmt::join(shape, ", "));
    const std::string& dtype = entry->info->dtype;
    require(dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64",
            "{}: the tensor {} is {}, but F32, BF16 or F16 is needed; dequantise the model first", entry->file->path().string(),
            name, dtype);
    taken_.insert(name);
    return *entry;
  }
  std::vector<std::string> not_taken() const {
    std::vector<std::string> names;
    for (const std::string& name : folder_.names()) {
      if (!taken_.contains(name) && !name.ends_with("rotary_emb.inv_freq")) names.push_back(name);
    }
    return names;
  }

 private:
  const CheckpointFolder& folder_;
  std::set<std::string> taken_;
};

TensorToWrite copy_of(const CheckpointFolder::Entry& entry, const std::string& name) {
  return {name, entry.info->dtype, entry.info->shape, [entry](const auto& sink) { sink(entry.file->bytes(*entry.info)); }};
}

WeightBlock single(const CheckpointFolder::Entry& entry, const std::string& memory_name) {
  return {memory_name, {copy_of(entry, memory_name)}};
}

void add_moe(DenseTensors& tensors, const DenseModel& model, const UpcycleSettings& settings, int64_t layer,
             std::vector<WeightBlock>& blocks) {
  const std::string prefix = fmt::format("model.layers.{}.", layer), dense = prefix + "mlp.";
  const std::string moe = prefix + (model.to_mixtral() ? "block_sparse_moe." : "mlp.");
  const int64_t hidden = model.hidden_size, width = model.intermediate_size;
  const auto gate = tensors.take(dense + "gate_proj.weight", {width, hidden});
  const auto up = tensors.take(dense + "up_proj.weight", {width, hidden});
  const auto down = tensors.take(dense + "down_proj.weight", {hidden, width});

  const std::string dtype = gate.info->dtype;
  TensorToWrite router{
      moe + "gate.weight", dtype, {settings.num_experts, hidden}, [model, settings, layer, dtype](const auto& sink) {
        sink(router_bytes(model, settings, layer, dtype));
      }};
  blocks.push_back({prefix + "mlp.gate.weight", {}});
  blocks.back().tensors.push_back(std::move(router));
  const auto add_experts = [&](const CheckpointFolder::Entry& entry, const char* name, const char* memory_name) {
    WeightBlock block{prefix + "mlp.experts." + memory_name, {}};
    for (int64_t e = 0; e < settings.num_experts; ++e)
      block.tensors.push_back(copy_of(entry, fmt::format("{}experts.{}.{}.weight", moe, e, name)));
    blocks.push_back(std::move(block));
  };
  add_experts(down, model.to_mixtral() ? "w2" : "down_proj", "down_proj");
  add_experts(gate, model.to_mixtral() ? "w1" : "gate_proj", "gate_up_proj");
  add_experts(up, model.to_mixtral() ? "w3" : "up_proj", "gate_up_proj");
}

std::vector<WeightBlock> describe_tensors(const CheckpointFolder& folder, const DenseModel& model,
                                          const UpcycleSettings& settings) {
  DenseTensors tensors(folder);
  std::vector<WeightBlock> blocks;
  const auto keep = [&](const std::string& name, const std::vector<int64_t>& shape) {
    blocks.push_back(single(tensors.take(name, shape), name));
  };
  const int64_t hidden = model.hidden_size, queries = model.num_heads * model.head_dim,
                keys = model.num_key_value_heads * model.head_dim;

  const bool has_embedding = folder.find(kEmbedding).has_value(), has_head = folder.find(kHead).has_value();
  if (!model.tie_word_embeddings || has_embedding || !has_head) keep(kEmbedding, {model.vocab_size, hidden});
  if (!model.tie_word_embeddings) {
    keep(kHead, {model.vocab_size, hidden});
  } else if (has_head) {
    const auto head = tensors.take(kHead, {model.vocab_size, hidden});
    require(!has_embedding || folder.same_bits(kHead, kEmbedding),
            "{}: {} and {} differ, but config.json ties them (tie_word_embeddings is true); set "
            "it to false to keep them apart",
            folder.path().string(), kHead, kEmbedding);
    if (!has_embedding) blocks.push_back({kEmbedding, {copy_of(head, kEmbedding)}});
  }
  keep("model.norm.weight", {hidden});
  for (int64_t n = 0; n < model.num_layers; ++n) {
    const std::string layer = fmt::format("model.layers.{}.", n), attention = layer + "self_attn.";
    keep(layer + "input_layernorm.weight", {hidden});
    keep(layer + "post_attention_layernorm.weight", {hidden});
    keep(attention + "q_proj.weight", {queries, hidden});
    keep(attention + "k_proj.weight", {keys, hidden});
    keep(attention + "v_proj.weight", {keys, hidden});
    keep(attention + "o_proj.weight", {hidden, queries});
    if (model.attention_bias) {
      keep(attention + "q_proj.bias", {queries});
      keep(attention + "k_proj.bias", {keys});
      keep(attention + "v_proj.bias", {keys});
      keep(attention + "o_proj.bias", {hidden});
    }
    if (!model.to_mixtral()) {
      keep(attention + "q_norm.weight", {model.head_dim});
      keep(attention + "k_norm.weight", {model.head_dim});
    }
    add_moe(tensors, model, settings, n, blocks);
  }
  const std::vector<std::string> rest = tensors.not_taken();
  require(rest.empty(), "{} has {} tensors that a plain {} does not have, for example {}; they cannot be upcycled",
          folder.path().string(), rest.size(), model.family, rest.empty() ? "" : rest.front());
  return blocks;
}

// Removes the folder again unless it was renamed to its final name.
class TemporaryOutput {
 public:
  explicit TemporaryOutput(const std::filesystem::path& out) : out_(out), path_(out) {
    path_ += fmt::format(".tmp-{}", ::getpid());
    std::error_code error;
    if (out.has_parent_path()) std::filesystem::create_directories(out.parent_path(), error);
    require(!error, "cannot create the folder {}: {}", out.parent_path().string(), error.message());
    require(std::filesystem::create_directory(path_, error) && !error, "cannot create the folder {}: {}", path_.string(),
            error ? error.message() : "it exists already");
  }
  TemporaryOutput(const TemporaryOutput&) = delete;
  TemporaryOutput& operator=(const TemporaryOutput&) = delete;
  ~TemporaryOutput() {
    std::error_code ignored;
    if (!finished_) std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }
  void finish() {
    sync_to_disk(path_);
    std::error_code error;
    std::filesystem::rename(path_, out_, error);
    require(!error, "cannot rename {} to {}: {}", path_.string(), out_.string(), error.message());
    finished_ = true;
    sync_to_disk(out_.has_parent_path() ? out_.parent_path() : std::filesystem::path("."));
  }

 private:
  std::filesystem::path out_, path_;
  bool finished_ = false;
};

}  // namespace

void upcycle(const std::filesystem::path& dense, const std::filesystem::path& out, const UpcycleSettings& settings) {
  require(settings.num_experts >= 2, "num_experts is {}, but at least 2 are needed", settings.num_experts);
  require(settings.top_k >= 1 && settings.top_k <= settings.num_experts,
          "top_k is {}, but it must be between 1 and num_experts ({})", settings.top_k, settings.num_experts);
  require(std::isfinite(settings.router_std) && settings.router_std > 0,
          "router_std is {}, but it must be positive: with equal logits every token would go to the same experts",
          settings.router_std);
  std::filesystem::path target = out.lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "folder/"
  require(!std::filesystem::exists(target), "{} exists already; choose a new folder", target.string());

  const ModelConfig config = ModelConfig::read(dense);
  const DenseModel model = read_dense_model(config);
  const Json new_config = upcycled_config(config, model, settings);
  const CheckpointFolder folder(dense);
  std::vector<WeightBlock> blocks = describe_tensors(folder, model, settings);
  int64_t total_parameters = 0;
  for (const WeightBlock& block : blocks) {
    for (const TensorToWrite& tensor : block.tensors) {
      int64_t elements = 1;
      for (const int64_t dimension : tensor.shape) elements *= dimension;
      total_parameters += elements;
    }
  }

  TemporaryOutput output(target);
  write_weight_shards(output.path(), std::move(blocks), settings.max_shard_size, total_parameters);
  carry_other_files(dense, output.path());
  write_file_atomically(output.path() / "config.json", to_python_json(new_config));
  output.finish();
}

}  // namespace headrace
