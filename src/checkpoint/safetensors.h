// safetensors files: read by memory map (only the byte ranges wanted are touched) and written byte for byte as Hugging Face's
// own writer does. No torch here: bytes, shapes and dtypes. Reference: safetensors 0.8 (see docs/architecture.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"

namespace headrace {

/// One tensor of a file. `begin` and `end` are byte offsets from the start of the data buffer.
struct TensorInfo {
  std::string name;
  std::string dtype;           // "F32", "BF16", "F16", "I64", "U8", "F8_E4M3", ... as in the header
  std::vector<int64_t> shape;  // empty: a scalar
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Bits of one element of a safetensors dtype; 0 for an unknown one.
int dtype_bits(const std::string& dtype);

/// Bytes of a tensor of that dtype and shape. Throws std::invalid_argument: unknown dtype, negative or overflowing shape, bits
/// that do not fill whole bytes.
uint64_t tensor_bytes(const std::string& dtype, const std::vector<int64_t>& shape);

/// The header, checked. Exposed apart from the file for the fuzzer.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in order of `begin`
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // byte offset of the data buffer in the file
};
/// Checks everything the reference reader checks: header length against the file and 100,000,000, JSON, duplicate names, known
/// dtypes, non-negative shapes without overflow, end - begin = size of the shape, offsets contiguous from 0 without holes or
/// overlap, last end = end of the file. Throws UserError naming `origin` and, where there is one, the tensor.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, const std::string& origin);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return file_.path(); }
  const SafetensorsHeader& header() const { return header_; }
  const TensorInfo* find(const std::string& name) const;  // nullptr when absent
  std::span<const std::byte> bytes(const TensorInfo& tensor) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t> index_;
};

/// A tensor to write. `write` is called once, in file order, and must hand exactly `size in bytes` bytes to its argument (in
/// one or several pieces), so that a tensor on a device is copied only when its turn comes.
struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::function<void(const std::function<void(std::span<const std::byte>)>& sink)> write;
};

/// Writes one file: tensors sorted by dtype rank descending, then name; header padded with spaces to a multiple of 8; metadata
/// {"format":"pt"} unless given. Written under a temporary name beside `path`, flushed to disk, then renamed: a failure leaves
/// no file (or the old one). Throws UserError on a full disk, std::invalid_argument on a duplicate name, a name that is not
/// UTF-8, or a wrong byte count.
void write_safetensors(const std::filesystem::path& path, std::vector<TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace headrace
