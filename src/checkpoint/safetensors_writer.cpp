// safetensors, writing: byte for byte what Hugging Face's own writer gives, streamed so that one tensor at a time is in memory.
// Flow: save_checkpoint / upcycle -> weight_shards -> [write_safetensors] -> file.
#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "base/json.h"
#include "checkpoint/safetensors.h"
#include "headrace/error.h"

namespace headrace {
namespace {

// The reference writer orders tensors by its list of dtypes, last first; the header keeps that order.
constexpr std::array<const char*, 22> kDtypeRank = {
    "BOOL", "F4",  "F6_E2M3", "F6_E3M2", "U8",  "I8",  "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16",  "U16", "F16",     "BF16",    "I32", "U32", "F32",     "C64",     "F64",     "I64",         "U64"};

int dtype_rank(const std::string& dtype) {
  const auto* const found = std::find(kDtypeRank.begin(), kDtypeRank.end(), dtype);
  return found == kDtypeRank.end() ? -1 : static_cast<int>(found - kDtypeRank.begin());
}

// A file under a temporary name beside its final one; gone again unless finish() renamed it.
class UnfinishedFile {
 public:
  explicit UnfinishedFile(const std::filesystem::path& path) : path_(path), temporary_(path) {
    temporary_ += fmt::format(".tmp-{}", ::getpid());
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    check(descriptor_ >= 0, "create");
  }
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;
  ~UnfinishedFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!finished_) ::unlink(temporary_.c_str());
  }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      check(written >= 0, "write");
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }

  void finish() {
    check(::fsync(descriptor_) == 0, "flush");
    const int descriptor = descriptor_;
    descriptor_ = -1;
    check(::close(descriptor) == 0, "close");  // network file systems report a full disk here
    check(::rename(temporary_.c_str(), path_.c_str()) == 0, "rename");
    finished_ = true;
    const std::filesystem::path parent = path_.parent_path();
    sync_to_disk(parent.empty() ? std::filesystem::path(".") : parent);
  }

 private:
  void check(bool ok, const char* action) const {
    if (ok) return;
    const int error = errno;
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    fail("cannot {} {}: {}{}", action, path_.string(), std::strerror(error),
         full ? "; free some space or choose another output folder" : "");
  }

  std::filesystem::path path_, temporary_;
  int descriptor_ = -1;
  bool finished_ = false;
};

// JSON as serde_json writes it: compact, non-ASCII text left as UTF-8.
void append_json_string(std::string& out, const std::string& text) {
  try {
    out += Json(text).dump(-1, ' ', /*ensure_ascii=*/false);
  } catch (const nlohmann::json::exception&) {
    throw std::invalid_argument(
        fmt::format("write_safetensors: a name or metadata text is not valid UTF-8 ({} bytes)", text.size()));
  }
}

std::string header_text(const std::vector<const TensorToWrite*>& ordered, const std::vector<uint64_t>& sizes,
                        const std::map<std::string, std::string>& metadata) {
  std::string out = "{";
  const char* separator = "";
  if (!metadata.empty()) {
    out += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      out += separator;
      append_json_string(out, key);
      out += ":";
      append_json_string(out, value);
      separator = ",";
    }
    out += "}";
    separator = ",";
  }
  uint64_t begin = 0;
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    out += separator;
    append_json_string(out, ordered[i]->name);
    out += fmt::format(":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", ordered[i]->dtype,
                       fmt::join(ordered[i]->shape, ","), begin, begin + sizes[i]);
    begin += sizes[i];
    separator = ",";
  }
  out += "}";
  out.resize((out.size() + 7) / 8 * 8, ' ');
  return out;
}

}  // namespace

uint64_t tensor_bytes(const std::string& dtype, const std::vector<int64_t>& shape) {
  const int bits = dtype_bits(dtype);
  check_argument(bits > 0, "tensor_bytes: unknown dtype \"{}\"", dtype);
  uint64_t total = static_cast<uint64_t>(bits);
  for (const int64_t dimension : shape) {
    check_argument(dimension >= 0 && !__builtin_mul_overflow(total, static_cast<uint64_t>(dimension), &total),
                   "tensor_bytes: the shape [{}] is negative or overflows 64 bits", fmt::join(shape, ", "));
  }
  check_argument(total % 8 == 0, "tensor_bytes: dtype {} with shape [{}] does not fill whole bytes", dtype,
                 fmt::join(shape, ", "));
  return total / 8;
}

void write_safetensors(const std::filesystem::path& path, std::vector<TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const TensorToWrite*> ordered;
  ordered.reserve(tensors.size());
  for (const TensorToWrite& tensor : tensors) ordered.push_back(&tensor);
  std::sort(ordered.begin(), ordered.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    const int rank_a = dtype_rank(a->dtype), rank_b = dtype_rank(b->dtype);
    return rank_a != rank_b ? rank_a > rank_b : a->name < b->name;
  });
  std::vector<std::string> names;
  std::vector<uint64_t> sizes;
  for (const TensorToWrite* tensor : ordered) {
    names.push_back(tensor->name);
    sizes.push_back(tensor_bytes(tensor->dtype, tensor->shape));
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  check_argument(twice == names.end(), "write_safetensors: two tensors are named {}", twice == names.end() ? "" : *twice);
  check_argument(!std::binary_search(names.begin(), names.end(), std::string("__metadata__")),
                 "write_safetensors: no tensor may be named __metadata__");

  const std::string header = header_text(ordered, sizes, metadata);
  std::array<std::byte, 8> length;
  for (std::size_t i = 0; i < length.size(); ++i) length[i] = static_cast<std::byte>(header.size() >> (8 * i));

  UnfinishedFile file(path);
  file.write(length);
  file.write(std::as_bytes(std::span(header)));
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    uint64_t given = 0;
    ordered[i]->write([&](std::span<const std::byte> bytes) {
      given += bytes.size();
      check_argument(given <= sizes[i], "write_safetensors: tensor {} handed over more than its {} bytes", ordered[i]->name,
                     sizes[i]);
      file.write(bytes);
    });
    check_argument(given == sizes[i], "write_safetensors: tensor {} handed over {} bytes, but its shape needs {}",
                   ordered[i]->name, given, sizes[i]);
  }
  file.finish();
}

}  // namespace headrace
