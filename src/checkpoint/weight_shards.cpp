// Sharding rule, weight files and index; see weight_shards.h.
#include "checkpoint/weight_shards.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "base/json.h"
#include "headrace/error.h"

namespace headrace {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// A part of a name: text, then a number (empty digits: none). A part of digits alone has is_number.
struct Part {
  std::string_view text, digits;
  bool is_number;
};

Part next_part(std::string_view& rest) {
  const std::size_t dot = rest.find('.');
  const std::string_view part = rest.substr(0, dot);
  rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
  std::size_t end = part.size();
  while (end > 0 && is_digit(part[end - 1])) --end;
  return {part.substr(0, end), part.substr(end), end == 0 && !part.empty()};
}

int compare_digits(std::string_view a, std::string_view b) {
  while (a.size() > 1 && a.front() == '0') a.remove_prefix(1);
  while (b.size() > 1 && b.front() == '0') b.remove_prefix(1);
  if (a.size() != b.size()) return a.size() < b.size() ? -1 : 1;
  return a.compare(b);
}

int compare_parts(const Part& a, const Part& b) {
  if (a.is_number != b.is_number) return a.is_number ? -1 : 1;
  if (const int text = a.text.compare(b.text); text != 0) return text;
  if (a.digits.empty() != b.digits.empty()) return a.digits.empty() ? -1 : 1;
  return compare_digits(a.digits, b.digits);
}

uint64_t block_bytes(const WeightBlock& block) {
  uint64_t total = 0;
  for (const TensorToWrite& tensor : block.tensors) total += tensor_bytes(tensor.dtype, tensor.shape);
  return total;
}

// As json.dumps(..., indent=2, sort_keys=True) + "\n" gives it. By hand, because an ordered JSON object looks names up one by
// one.
std::string index_text(const std::map<std::string, std::string>& weight_map, int64_t total_parameters, uint64_t total_size) {
  std::string out = fmt::format(
      "{{\n  \"metadata\": {{\n    \"total_parameters\": {},\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{\n",
      total_parameters, total_size);
  std::size_t left = weight_map.size();
  for (const auto& [name, file] : weight_map) {
    out += fmt::format("    {}: \"{}\"{}\n", Json(name).dump(-1, ' ', /*ensure_ascii=*/true), file, --left > 0 ? "," : "");
  }
  return out + "  }\n}\n";
}

void require_room(const std::filesystem::path& folder, uint64_t needed) {
  std::error_code error;
  const auto space = std::filesystem::space(folder, error);
  if (error || space.capacity == 0 || space.capacity == static_cast<std::uintmax_t>(-1))
    return;  // the file system does not tell
  require(space.available >= needed,
          "{} needs {:.1f} GB, but its disk has only {:.1f} GB free; free some space or choose another output folder",
          folder.string(), static_cast<double>(needed) / 1e9, static_cast<double>(space.available) / 1e9);
}

}  // namespace

bool natural_less(const std::string& a, const std::string& b) {
  std::string_view rest_a = a, rest_b = b;
  bool more_a = true, more_b = true;
  while (more_a && more_b) {
    more_a = rest_a.find('.') != std::string_view::npos;
    more_b = rest_b.find('.') != std::string_view::npos;
    const Part part_a = next_part(rest_a), part_b = next_part(rest_b);
    if (const int order = compare_parts(part_a, part_b); order != 0) return order < 0;
  }
  return !more_a && more_b;
}

std::vector<std::size_t> assign_shards(const std::vector<uint64_t>& block_sizes, uint64_t max_shard_size) {
  // Shards are numbered when they are closed, as the reference appends them to its list.
  constexpr std::size_t kOpen = static_cast<std::size_t>(-1);
  std::vector<std::size_t> shard(block_sizes.size(), kOpen);
  std::vector<std::size_t> open;
  std::size_t closed = 0;
  uint64_t open_size = 0;
  const auto close = [&] {
    for (const std::size_t block : open) shard[block] = closed;
    open.clear();
    open_size = 0;
    ++closed;
  };
  for (std::size_t i = 0; i < block_sizes.size(); ++i) {
    if (block_sizes[i] > max_shard_size) {
      shard[i] = closed++;
      continue;
    }
    if (open_size + block_sizes[i] > max_shard_size) close();
    open.push_back(i);
    open_size += block_sizes[i];
  }
  if (!open.empty()) close();
  return shard;
}

void write_weight_shards(const std::filesystem::path& folder, std::vector<WeightBlock> blocks, uint64_t max_shard_size,
                         int64_t total_parameters) {
  check_argument(!blocks.empty(), "write_weight_shards: no tensors to write");
  check_argument(max_shard_size > 0, "write_weight_shards: max_shard_size must be positive");
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const WeightBlock& a, const WeightBlock& b) { return natural_less(a.memory_name, b.memory_name); });
  std::vector<uint64_t> sizes;
  uint64_t total_size = 0;
  for (const WeightBlock& block : blocks) {
    sizes.push_back(block_bytes(block));
    total_size += sizes.back();
  }
  const std::vector<std::size_t> shard_of_block = assign_shards(sizes, max_shard_size);
  const std::size_t num_shards = *std::max_element(shard_of_block.begin(), shard_of_block.end()) + 1;
  require_room(folder, total_size);

  std::vector<std::vector<TensorToWrite>> shards(num_shards);
  std::map<std::string, std::string> weight_map;
  const auto file_name = [&](std::size_t shard) {
    return num_shards == 1 ? std::string("model.safetensors")
                           : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, num_shards);
  };
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (TensorToWrite& tensor : blocks[i].tensors) {
      const bool is_new = weight_map.emplace(tensor.name, file_name(shard_of_block[i])).second;
      check_argument(is_new, "write_weight_shards: two tensors are named {}", tensor.name);
      shards[shard_of_block[i]].push_back(std::move(tensor));
    }
  }
  for (std::size_t i = 0; i < num_shards; ++i) write_safetensors(folder / file_name(i), std::move(shards[i]));
  if (num_shards > 1)
    write_file_atomically(folder / "model.safetensors.index.json", index_text(weight_map, total_parameters, total_size));
}

}  // namespace headrace
