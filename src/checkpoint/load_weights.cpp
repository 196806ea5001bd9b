// Hub tensors into parameters; see checkpoint.h. In order: choose the form of each parameter, check shapes, dtypes and
// coverage, list what nobody names, and only then write.
#include <ATen/ops/from_blob.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <regex>
#include <set>
#include <thread>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "headrace/error.h"

namespace headrace {
namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr std::size_t kListed = 5;  // names shown in an error or a warning

using PiecesOfParameter = std::map<std::string, std::vector<const WeightPiece*>>;

PiecesOfParameter by_parameter(const std::vector<WeightPiece>& pieces) {
  PiecesOfParameter out;
  for (const WeightPiece& piece : pieces) out[piece.parameter].push_back(&piece);
  return out;
}

int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t dimension : shape) elements *= dimension;
  return elements;
}

std::string some_of(const std::vector<std::string>& names) {
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kListed)));
  return names.size() > kListed ? fmt::format("{} and {} more", fmt::join(first, ", "), names.size() - kListed)
                                : fmt::format("{}", fmt::join(first, ", "));
}

// A run of elements from a file to a parameter.
struct Copy {
  CheckpointFolder::Entry source;
  int64_t source_element;
  at::Tensor target;  // 1-D
};

// Which pieces fill a parameter: the hub form, unless the folder has it under its in-memory name.
std::vector<WeightPiece> choose_form(const CheckpointFolder& folder, const std::string& parameter, const PiecesOfParameter& hub,
                                     const PiecesOfParameter& in_memory) {
  const auto pieces_in = [&](const PiecesOfParameter& map) {
    std::vector<WeightPiece> pieces;
    if (const auto found = map.find(parameter); found != map.end()) {
      for (const WeightPiece* piece : found->second) pieces.push_back(*piece);
    }
    return pieces;
  };
  std::vector<WeightPiece> hub_form = pieces_in(hub), memory_form = pieces_in(in_memory);
  check_argument(!hub_form.empty() || !memory_form.empty(), "load_weights: no table entry names the parameter {}", parameter);
  const auto present = [&](const WeightPiece& piece) { return folder.find(piece.hub_name).has_value(); };
  const auto in_hub_form = std::find_if(hub_form.begin(), hub_form.end(), present);
  const auto in_memory_form = std::find_if(memory_form.begin(), memory_form.end(), present);
  if (in_memory_form == memory_form.end()) return hub_form;
  require(in_hub_form == hub_form.end(), "{} has the parameter {} twice, as {} and as {}; remove one of them",
          folder.path().string(), parameter, in_hub_form == hub_form.end() ? "" : in_hub_form->hub_name,
          in_memory_form->hub_name);
  return memory_form;
}

CheckpointFolder::Entry checked_entry(const CheckpointFolder& folder, const WeightPiece& piece) {
  const CheckpointFolder::Entry entry = *folder.find(piece.hub_name);
  const std::string file = entry.file->path().string();
  const std::string& dtype = entry.info->dtype;
  require(dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64",
          "{}: the tensor {} is {}, but F32, BF16 or F16 is needed; a quantised checkpoint must be dequantised first", file,
          piece.hub_name, dtype);
  require(entry.info->shape == piece.hub_shape, "{}: the tensor {} has shape [{}], but config.json calls for [{}]", file,
          piece.hub_name, fmt::join(entry.info->shape, ", "), fmt::join(piece.hub_shape, ", "));
  return entry;
}

// The copies that fill `parameter`; `missing` collects hub names that the folder lacks.
void plan_copies(const CheckpointFolder& folder, const NamedTensor& parameter, const std::vector<WeightPiece>& pieces,
                 std::vector<Copy>& copies, std::vector<std::string>& missing) {
  const int64_t begin = parameter.first_element, end = begin + parameter.tensor.numel();
  const at::Tensor flat = parameter.tensor.detach().view({-1});
  std::vector<std::pair<int64_t, int64_t>> covered;
  for (const WeightPiece& piece : pieces) {
    const int64_t piece_end = piece.offset + num_elements(piece.hub_shape);
    const int64_t from = std::max(begin, piece.offset), to = std::min(end, piece_end);
    if (from >= to) continue;
    covered.emplace_back(from, to);
    if (!folder.find(piece.hub_name)) {
      missing.push_back(piece.hub_name);
      continue;
    }
    copies.push_back({checked_entry(folder, piece), from - piece.offset, flat.narrow(0, from - begin, to - from)});
  }
  std::sort(covered.begin(), covered.end());
  int64_t position = begin;
  for (const auto& [from, to] : covered) {
    check_argument(from == position, "load_weights: the table {} elements {} to {} of the parameter {}",
                   from > position ? "leaves out" : "writes twice", std::min(from, position), std::max(from, position),
                   parameter.name);
    position = to;
  }
  check_argument(position == end, "load_weights: the table leaves out elements {} to {} of the parameter {}", position, end,
                 parameter.name);
}

void run_copy(const Copy& copy) {
  const at::ScalarType type = scalar_type(copy.source.info->dtype).value();
  const std::size_t element = c10::elementSize(type);
  const auto count = static_cast<std::size_t>(copy.target.numel());
  const auto bytes = copy.source.file->bytes(*copy.source.info)
                         .subspan(static_cast<std::size_t>(copy.source_element) * element, count * element);
  if (copy.target.is_cpu() && copy.target.scalar_type() == type) {
    std::memcpy(copy.target.mutable_data_ptr(), bytes.data(), bytes.size());
    return;
  }
  const void* data = bytes.data();
  std::vector<std::byte> aligned;  // old files may begin their data at any byte
  if (reinterpret_cast<std::uintptr_t>(data) % element != 0) {
    aligned.assign(bytes.begin(), bytes.end());
    data = aligned.data();
  }
  // The source is only read; from_blob takes no const pointer.
  copy.target.copy_(at::from_blob(const_cast<void*>(data), {copy.target.numel()}, at::TensorOptions().dtype(type)));
}

// Plain byte copies wait for the disk, so several threads take them; conversions and copies to a device go one by one (ATen has
// its own threads for them).
void run_copies(const std::vector<Copy>& copies) {
  std::vector<const Copy*> plain;
  for (const Copy& copy : copies) {
    const bool is_plain = copy.target.is_cpu() && copy.target.scalar_type() == scalar_type(copy.source.info->dtype);
    if (is_plain) {
      plain.push_back(&copy);
    } else {
      run_copy(copy);
    }
  }
  std::atomic<std::size_t> next = 0;
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    try {
      for (std::size_t i = next++; i < plain.size(); i = next++) run_copy(*plain[i]);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  const std::size_t num_threads = std::min<std::size_t>({8, std::max(1U, std::thread::hardware_concurrency()), plain.size()});
  for (std::size_t i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
  threads.clear();
  if (failure) std::rethrow_exception(failure);
}

// With a head tied to the embedding (the map has no head) a file may hold either name or both.
void resolve_tied_head(const CheckpointFolder& folder, const WeightMap& map, std::vector<WeightPiece>& hub) {
  const auto named = [](const char* name) { return [name](const WeightPiece& piece) { return piece.hub_name == name; }; };
  const auto embedding = std::find_if(hub.begin(), hub.end(), named(kEmbedding));
  if (embedding == hub.end() || std::any_of(map.hub.begin(), map.hub.end(), named(kHead)) || !folder.find(kHead)) return;
  if (!folder.find(kEmbedding)) {
    embedding->hub_name = kHead;
    return;
  }
  require(folder.same_bits(kHead, kEmbedding),
          "{}: {} and {} differ, but config.json ties them (tie_word_embeddings is true); set it to false to "
          "train them apart",
          folder.path().string(), kHead, kEmbedding);
}

std::vector<std::string> unknown_names(const CheckpointFolder& folder, const WeightMap& map, bool head_is_tied) {
  std::set<std::string> known;
  for (const auto* pieces : {&map.hub, &map.in_memory}) {
    for (const WeightPiece& piece : *pieces) known.insert(piece.hub_name);
  }
  if (head_is_tied) known.insert(kHead);
  std::vector<std::regex> ignored;
  for (const std::string& pattern : map.ignored) ignored.emplace_back(pattern);
  std::vector<std::string> unknown;
  for (const std::string& name : folder.names()) {
    const auto matches = [&](const std::regex& pattern) { return std::regex_match(name, pattern); };
    if (!known.contains(name) && std::none_of(ignored.begin(), ignored.end(), matches)) unknown.push_back(name);
  }
  return unknown;
}

}  // namespace

LoadedWeights load_weights(const CheckpointFolder& folder, const WeightMap& map, const std::vector<NamedTensor>& parameters) {
  std::vector<WeightPiece> hub = map.hub;
  resolve_tied_head(folder, map, hub);
  const PiecesOfParameter hub_pieces = by_parameter(hub), memory_pieces = by_parameter(map.in_memory);
  const bool head_is_tied = hub_pieces.contains(kEmbedding) && !hub_pieces.contains(kHead);

  LoadedWeights loaded;
  loaded.unknown = unknown_names(folder, map, head_is_tied);
  std::vector<Copy> copies;
  std::vector<std::string> missing;
  std::set<std::string> seen;
  for (const NamedTensor& parameter : parameters) {
    check_argument(parameter.tensor.is_contiguous() && parameter.tensor.is_floating_point(),
                   "load_weights: the parameter {} must be a contiguous floating tensor", parameter.name);
    std::vector<WeightPiece> pieces = choose_form(folder, parameter.name, hub_pieces, memory_pieces);
    plan_copies(folder, parameter, pieces, copies, missing);
    if (!seen.insert(parameter.name).second) continue;  // a rank may hold several parts of one parameter
    for (WeightPiece& piece : pieces) {
      if (head_is_tied && piece.hub_name == kHead) piece.hub_name = kEmbedding;  // saved under the name transformers keeps
      loaded.pieces.push_back(std::move(piece));
    }
  }
  if (!missing.empty()) {
    fail("{} lacks {} tensors that config.json calls for: {}{}", folder.path().string(), missing.size(), some_of(missing),
         loaded.unknown.empty() ? "; the checkpoint is incomplete or of another model"
                                : fmt::format("; it has {} tensors that this model does not know: {}", loaded.unknown.size(),
                                              some_of(loaded.unknown)));
  }
  if (!loaded.unknown.empty()) {
    log_warning(fmt::format("{}: {} tensors are not part of the model and are carried into saves unchanged: {}",
                            folder.path().string(), loaded.unknown.size(), some_of(loaded.unknown)));
  }
  run_copies(copies);
  return loaded;
}

}  // namespace headrace
