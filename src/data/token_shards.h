// Token shards: tokenised documents on disk, written by `python -m headrace.prepare`, memory-mapped here.
// Flow: dataset -> prepare -> folder of shards -> [TokenShards] -> PackedBatches -> trainer.
//
// Folder layout (format "headrace-tokens", version 1; all numbers little-endian):
//   manifest.json
//   <split>-<5 digits>.input_ids   uint32 [num_tokens]            token ids, documents one after the other
//   <split>-<5 digits>.loss_mask   uint8  [num_tokens]            1: this token is trained (the model must predict it)
//   <split>-<5 digits>.bounds      uint64 [num_documents + 1]     first token of each document, then num_tokens
// manifest.json:
//   {"format": "headrace-tokens", "version": 1, "digest": "<sha256 over everything that decides the content>",
//    "vocab_size": V, "max_length": L, "tokenizer_sha256": "..", "chat_template_sha256": ".." | null,
//    "sources": [{"path": "..", "sha256": ".."}], "settings": {...},
//    "splits": {"train": {"num_documents": .., "num_tokens": .., "num_trained_tokens": ..,
//                         "shards": [{"name": "train-00000", "num_documents": .., "num_tokens": ..}]}, "validation": {...}}}
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"

namespace headrace {

/// One document, a view into the map.
struct Document {
  std::span<const uint32_t> input_ids;
  std::span<const uint8_t> loss_mask;  // same length; 1 = trained
};

class TokenShards {
 public:
  /// Opens one split of a prepared folder. Throws UserError: missing or foreign manifest, another version, no such split, a
  /// shard file missing or of a size that disagrees with the manifest, bounds that are not ascending, an empty split.
  TokenShards(const std::filesystem::path& folder, const std::string& split);

  int64_t num_documents() const { return num_documents_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_trained_tokens() const { return num_trained_tokens_; }
  int64_t vocab_size() const { return vocab_size_; }
  const std::string& digest() const { return digest_; }  // of the manifest: part of a training state
  Document document(int64_t index) const;

 private:
  struct Shard {
    MappedFile input_ids, loss_mask, bounds;
    int64_t first_document, num_documents;
  };
  std::vector<Shard> shards_;
  int64_t num_documents_ = 0, num_tokens_ = 0, num_trained_tokens_ = 0, vocab_size_ = 0;
  std::string digest_;
};

}  // namespace headrace
