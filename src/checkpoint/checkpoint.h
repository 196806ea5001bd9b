// Hugging Face checkpoint folders: open, load into parameters, save from parameters.
// Flow: folder -> CheckpointFolder (headers only) -> [load_weights] -> training -> [save_checkpoint] -> folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/weight_map.h"

namespace headrace {

/// The weight files of a folder, opened: model.safetensors, else model.safetensors.index.json and the shards it names.
class CheckpointFolder {
 public:
  /// Throws UserError: no weights found (naming a .bin file if only that is there), a shard named by the index but missing,
  /// a tensor that the index places in a shard that lacks it, a tensor in two shards.
  explicit CheckpointFolder(const std::filesystem::path& folder);

  struct Entry {
    const SafetensorsFile* file;
    const TensorInfo* info;
  };
  std::optional<Entry> find(const std::string& hub_name) const;
  std::vector<std::string> names() const;  // sorted
  /// Same dtype, shape and bytes. Both must be there.
  bool same_bits(const std::string& hub_name, const std::string& other) const;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Entry> entries_;
};

/// A parameter to fill or to save: name in memory and a contiguous tensor (any device; float32, bfloat16, float16).
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  /// For a rank that holds a part: the element of the whole parameter (row-major) that the tensor begins with. load_weights
  /// fills just that part (experts of an expert-parallel rank, a shard of a flat buffer); save_checkpoint wants whole
  /// parameters.
  int64_t first_element = 0;
  bool is_buffer = false;  // e_score_correction_bias: saved, but not counted in the index's total_parameters
};

struct LoadedWeights {
  std::vector<WeightPiece> pieces;   // what was really used, hub or in-memory form per parameter; pass to save_checkpoint
  std::vector<std::string> unknown;  // tensors of the folder that no table entry names: warned about, carried into saves
};

/// Fills every parameter from the folder, converting the file's floating dtype to the tensor's (F64, F32, BF16, F16 sources),
/// straight from the mapped files. A parameter takes the hub form, or the in-memory form when the folder has that. What is
/// covered is accounted by intervals of elements, before the first write: a parameter is whole or the load fails. A head tied
/// to the embedding (the map has no lm_head.weight): the embedding is read from whichever of the two names is there. Throws
/// UserError naming file and tensor: a parameter (or part of one) that nothing wrote, a wrong shape, a dtype that is not a
/// float type or is a quantised one, a parameter present in both forms, a tied head that differs from the embedding. Tensors
/// that no entry names while a parameter stays unwritten are listed in the error. Throws std::invalid_argument when map and
/// parameters do not fit together.
LoadedWeights load_weights(const CheckpointFolder& folder, const WeightMap& map, const std::vector<NamedTensor>& parameters);

struct SaveRequest {
  std::filesystem::path folder;         // created; must not exist or be empty
  std::vector<NamedTensor> parameters;  // in-memory names
  std::vector<WeightPiece> pieces;      // the form to write (LoadedWeights::pieces, or WeightMap::hub)
  Json config;                          // config.json to write (ModelConfig::for_saving)
  /// Folder whose other files (tokenizer, generation_config, chat template, custom code, but no weights and no config.json; the
  /// list is in carried_files.h) and unknown tensors are carried along.
  std::optional<std::filesystem::path> source;
  std::vector<std::string> unknown;          // names of tensors to carry from `source`, bits unchanged
  uint64_t max_shard_size = 50'000'000'000;  // bytes; transformers' rule and walk order (weight_shards.h)
};

/// Writes a Hugging Face folder in `request.folder` itself (the caller renames; see trainer/checkpointing): shards and index by
/// transformers' rules, carried files, config.json last. A tensor is saved in its own dtype. Everything is flushed to disk;
/// after a failure the folder is gone (or empty again if it was there). Throws UserError: the folder is not empty, the disk is
/// full, an unknown tensor is not in `source`; std::invalid_argument: a parameter that the pieces do not cover exactly once.
void save_checkpoint(const SaveRequest& request);

/// "F32" for at::kFloat, ...; throws std::invalid_argument for a type safetensors lacks. And back; nullopt when ATen lacks it.
std::string safetensors_dtype(at::ScalarType type);
std::optional<at::ScalarType> scalar_type(const std::string& safetensors_dtype);

}  // namespace headrace
