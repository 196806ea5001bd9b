// Weight files of a Hugging Face folder: which tensor goes to which file, the files themselves and their index.
// Flow: save_checkpoint / upcycle -> [write_weight_shards] -> write_safetensors. Reference: transformers 5.17 save_pretrained
// and huggingface_hub split_state_dict_into_shards_factory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace headrace {

/// Tensors that stay in one file. transformers makes the per-expert tensors of a layer by splitting a fused one, and its
/// sharding rule keeps tensors that share memory together: all down_proj of a layer are a block, all gate_proj a second, all
/// up_proj a third.
struct WeightBlock {
  std::string memory_name;  // name in memory of the parameter it comes from; the walk order follows it
  std::vector<TensorToWrite> tensors;
};

/// transformers' order of names: split at dots; a part of digits counts as a number and comes before text; trailing digits of a
/// part count as a number too ("layers.2" before "layers.10").
bool natural_less(const std::string& a, const std::string& b);

/// The file of each block: numbers from 0, in walk order. A block above the limit gets its own file at once while the current
/// file stays open; otherwise a block that does not fit closes the current file.
std::vector<std::size_t> assign_shards(const std::vector<uint64_t>& block_sizes, uint64_t max_shard_size);

/// Sorts the blocks by memory_name (stable) and writes model.safetensors, or model-0000i-of-0000n.safetensors and
/// model.safetensors.index.json, into an existing folder. `total_parameters` goes into the index. Everything is flushed to
/// disk. Throws UserError when the disk has too little room (before a byte is written, where the file system tells) or fills
/// up.
void write_weight_shards(const std::filesystem::path& folder, std::vector<WeightBlock> blocks, uint64_t max_shard_size,
                         int64_t total_parameters);

}  // namespace headrace
