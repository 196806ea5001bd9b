// See carried_files.h.
#include "checkpoint/carried_files.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <vector>

#include "base/file.h"
#include "headrace/error.h"

namespace headrace {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

template <std::size_t n>
bool begins_with_one(const std::string& text, const std::array<const char*, n>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(), [&](const char* prefix) { return text.starts_with(prefix); });
}

template <std::size_t n>
bool ends_with_one(const std::string& text, const std::array<const char*, n>& suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(), [&](const char* suffix) { return text.ends_with(suffix); });
}

constexpr std::array kWeightEndings = {".safetensors", ".bin", ".pt",      ".pth",  ".ckpt", ".gguf",
                                       ".ggml",        ".h5",  ".msgpack", ".onnx", ".npz",  ".index.json"};
constexpr std::array kTrainerNames = {"optimizer",     "scheduler", "rng_state",   "trainer_state",
                                      "training_args", "adapter_",  "train_state", "global_step"};
constexpr std::array kCarriedEndings = {".json",  ".jsonl",    ".txt",   ".md",  ".py",   ".jinja",
                                        ".model", ".tiktoken", ".vocab", ".bpe", ".yaml", ".yml"};
constexpr std::array kCarriedNames = {"tokenizer", "license", "licence", "notice", "readme", "use_policy"};

}  // namespace

bool is_carried(const std::string& file_name) {
  const std::string name = lower(file_name);
  if (name.empty() || name.front() == '.' || name == "config.json") return false;
  if (ends_with_one(name, kWeightEndings) || begins_with_one(name, kTrainerNames)) return false;
  return ends_with_one(name, kCarriedEndings) || begins_with_one(name, kCarriedNames);
}

void carry_other_files(const std::filesystem::path& source, const std::filesystem::path& destination) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(source)) {
    if (entry.is_regular_file() && is_carried(entry.path().filename().string())) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) write_file_atomically(destination / file.filename(), read_file(file));
}

}  // namespace headrace
