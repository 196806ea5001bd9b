// Fuzzes parse_safetensors_header: whatever the bytes, it answers with a UserError or with a header that tells the truth about
// them.
#include <cstdint>
#include <cstdlib>
#include <set>
#include <span>
#include <string>

#include "checkpoint/safetensors.h"
#include "headrace/error.h"

namespace {

void check(bool condition) {
  if (!condition) std::abort();
}

// Parses the bytes and checks the answer against them.
void check_file(std::span<const std::byte> file) {
  headrace::SafetensorsHeader header;
  try {
    header = headrace::parse_safetensors_header(file, "fuzz.safetensors");
  } catch (const headrace::UserError& error) {
    check(std::string(error.what()).starts_with("fuzz.safetensors"));
    return;
  }
  check(header.data_begin >= 8 && header.data_begin <= file.size());
  uint64_t position = 0;
  std::set<std::string> names;
  for (const headrace::TensorInfo& tensor : header.tensors) {
    check(tensor.begin == position && tensor.end >= tensor.begin);
    check(names.insert(tensor.name).second);
    unsigned __int128 bits = static_cast<unsigned>(headrace::dtype_bits(tensor.dtype));
    check(bits > 0);
    for (const int64_t dimension : tensor.shape) {
      check(dimension >= 0);
      bits *= static_cast<uint64_t>(dimension);
    }
    check(bits == static_cast<unsigned __int128>(tensor.end - tensor.begin) * 8);
    position = tensor.end;
  }
  check(header.data_begin + position == file.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  check_file(file);
  // Once more with a length that fits: the text up to the last '}' is the header. Without this hardly a mutation gets past the
  // length.
  std::string repaired(reinterpret_cast<const char*>(data), size);
  const std::size_t brace = repaired.rfind('}');
  if (brace == std::string::npos || brace < 8) return 0;
  for (std::size_t i = 0; i < 8; ++i) repaired[i] = static_cast<char>((brace - 7) >> (8 * i));
  check_file(std::as_bytes(std::span(repaired)));
  return 0;
}
