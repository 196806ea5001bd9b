// Parameters into a Hugging Face folder; see checkpoint.h.
#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/carried_files.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weight_shards.h"
#include "headrace/error.h"

namespace headrace {
namespace {

// Makes the folder and removes what it holds again unless keep() is called.
class UnfinishedFolder {
 public:
  explicit UnfinishedFolder(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code error;
    existed_ = std::filesystem::exists(path_);
    require(!existed_ || (std::filesystem::is_directory(path_) && std::filesystem::is_empty(path_)),
            "{} exists and is not empty; choose a new folder for the checkpoint", path_.string());
    std::filesystem::create_directories(path_, error);
    require(!error, "cannot create the folder {}: {}", path_.string(), error.message());
  }
  UnfinishedFolder(const UnfinishedFolder&) = delete;
  UnfinishedFolder& operator=(const UnfinishedFolder&) = delete;
  ~UnfinishedFolder() {
    if (kept_) return;
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
    if (existed_) std::filesystem::create_directory(path_, ignored);
  }
  void keep() { kept_ = true; }

 private:
  std::filesystem::path path_;
  bool existed_ = false, kept_ = false;
};

int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t dimension : shape) elements *= dimension;
  return elements;
}

// A piece is copied from its device when its turn comes, one at a time.
TensorToWrite tensor_of_piece(const WeightPiece& piece, const at::Tensor& flat) {
  at::Tensor part = flat.narrow(0, piece.offset, num_elements(piece.hub_shape));
  return {piece.hub_name, safetensors_dtype(part.scalar_type()), piece.hub_shape, [part](const auto& sink) {
            const at::Tensor on_cpu = part.cpu();
            sink({static_cast<const std::byte*>(on_cpu.const_data_ptr()), static_cast<std::size_t>(on_cpu.nbytes())});
          }};
}

// The blocks of one parameter. The pieces of a fused expert tensor [E, ...] that begin at the same place within their expert
// (all gate_proj, all up_proj) form one block, in order of expert.
void add_blocks(const NamedTensor& parameter, std::vector<const WeightPiece*> pieces, std::vector<WeightBlock>& blocks) {
  const at::Tensor& tensor = parameter.tensor;
  check_argument(tensor.is_contiguous() && parameter.first_element == 0,
                 "save_checkpoint: the parameter {} must be whole and contiguous", parameter.name);
  check_argument(!pieces.empty(), "save_checkpoint: no piece names the parameter {}", parameter.name);
  std::sort(pieces.begin(), pieces.end(), [](const WeightPiece* a, const WeightPiece* b) { return a->offset < b->offset; });
  int64_t position = 0;
  for (const WeightPiece* piece : pieces) {
    check_argument(piece->offset == position, "save_checkpoint: the pieces {} elements {} to {} of the parameter {}",
                   piece->offset > position ? "leave out" : "write twice", std::min(position, piece->offset),
                   std::max(position, piece->offset), parameter.name);
    position += num_elements(piece->hub_shape);
  }
  check_argument(position == tensor.numel(), "save_checkpoint: the pieces cover {} of the {} elements of the parameter {}",
                 position, tensor.numel(), parameter.name);

  const at::Tensor flat = tensor.detach().view({-1});
  const int64_t expert_elements = pieces.size() > 1 && tensor.dim() > 1 ? tensor.numel() / tensor.size(0) : tensor.numel();
  std::map<int64_t, WeightBlock> by_place;
  for (const WeightPiece* piece : pieces) {
    WeightBlock& block = by_place[expert_elements > 0 ? piece->offset % expert_elements : 0];
    block.memory_name = parameter.name;
    block.tensors.push_back(tensor_of_piece(*piece, flat));
  }
  for (auto& [place, block] : by_place) blocks.push_back(std::move(block));
}

void add_unknown(const CheckpointFolder& source, const std::string& name, std::vector<WeightBlock>& blocks) {
  const auto entry = source.find(name);
  require(entry.has_value(), "{} no longer has the tensor {}, which is to be carried into the checkpoint",
          source.path().string(), name);
  TensorToWrite tensor{name, entry->info->dtype, entry->info->shape,
                       [entry](const auto& sink) { sink(entry->file->bytes(*entry->info)); }};
  blocks.push_back({name, {}});
  blocks.back().tensors.push_back(std::move(tensor));
}

}  // namespace

void save_checkpoint(const SaveRequest& request) {
  std::map<std::string, std::vector<const WeightPiece*>> pieces;
  for (const WeightPiece& piece : request.pieces) pieces[piece.parameter].push_back(&piece);
  std::vector<WeightBlock> blocks;
  std::set<std::string> names;
  int64_t total_parameters = 0;
  for (const NamedTensor& parameter : request.parameters) {
    check_argument(names.insert(parameter.name).second, "save_checkpoint: the parameter {} is given twice", parameter.name);
    add_blocks(parameter, pieces[parameter.name], blocks);
    if (!parameter.is_buffer) total_parameters += parameter.tensor.numel();
  }
  for (const auto& [name, of_parameter] : pieces) {
    check_argument(names.contains(name), "save_checkpoint: a piece names the parameter {}, which is not given", name);
  }
  check_argument(request.unknown.empty() || request.source.has_value(),
                 "save_checkpoint: tensors to carry need a source folder");
  std::optional<CheckpointFolder> source;
  if (!request.unknown.empty()) source.emplace(*request.source);
  for (const std::string& name : request.unknown) add_unknown(*source, name, blocks);

  UnfinishedFolder folder(request.folder);
  write_weight_shards(request.folder, std::move(blocks), request.max_shard_size, total_parameters);
  if (request.source) carry_other_files(*request.source, request.folder);
  write_file_atomically(request.folder / "config.json", to_python_json(request.config));
  sync_to_disk(request.folder);
  folder.keep();
}

}  // namespace headrace
