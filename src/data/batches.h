// Batches: the stream of micro-batches of a training run, and its position.
// Flow: TokenShards -> packing -> [Batches] -> trainer. Next: trainer/train.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "data/token_shards.h"
#include "headrace/token_batch.h"

namespace headrace {

struct BatchSettings {
  int64_t sequence_length = 0;    // tokens a row holds at most
  int64_t local_batch_size = 1;   // rows in a micro-batch
  int64_t global_batch_size = 1;  // rows in an optimizer step, over all ranks; a multiple of local_batch_size * world_size
  bool pack = true;
  bool shuffle = true;
  uint64_t seed = 0;
  int rank = 0, world_size = 1;
};

/// Builds one TokenBatch (CPU tensors) from documents, cutting each at sequence_length. The target of a position is the next
/// token of the same document where that token's loss mask is 1, else -100. No documents give a batch of 0 tokens (cu_seqlens
/// [0]). Throws UserError for a token id outside the vocabulary and for a loss mask that is neither 0 nor 1.
TokenBatch make_batch(const TokenShards& shards, const std::vector<int64_t>& documents, int64_t sequence_length);

/// One optimizer step's micro-batches of this rank, and the trained tokens of the whole step on all ranks (the loss is divided
/// by that number; 0 when no token of the step is trained). The last step of an epoch may hold fewer rows: then micro-batches
/// may be short, or hold 0 tokens on some ranks, but all ranks have equally many of them, since experts exchange tokens in
/// each.
struct StepBatches {
  std::vector<TokenBatch> micro_batches;
  int64_t global_trained_tokens = 0;
  int64_t global_tokens = 0;  // tokens of the whole step on all ranks
  int64_t epoch = 0;
  int64_t step_in_epoch = 0;
};

/// Endless: after the last step of an epoch the next epoch's order begins. Row r of a step belongs to micro-batch
/// (r / local_batch_size), dealt to ranks in turn, so that the global order does not depend on the number of ranks.
class Batches {
 public:
  Batches(const TokenShards& shards, BatchSettings settings);
  int64_t steps_per_epoch() const;              // of the current epoch (packing may differ slightly between epochs)
  int64_t steps_in_epoch(int64_t epoch) const;  // of any epoch; packs it, so not for every step
  StepBatches next();
  /// Position for train_state: the epoch and step that next() will return.
  int64_t epoch() const { return epoch_; }
  int64_t step_in_epoch() const { return step_in_epoch_; }
  /// Goes to that position as if next() had been called so often. Throws UserError when the epoch has fewer steps.
  void seek(int64_t epoch, int64_t step_in_epoch);

 private:
  std::vector<std::vector<int64_t>> rows_of_epoch(int64_t epoch) const;
  void begin_epoch(int64_t epoch);
  const TokenShards* shards_;  // must outlive this object
  BatchSettings settings_;
  std::vector<int64_t> lengths_;  // of all documents
  std::vector<std::vector<int64_t>> rows_;
  int64_t epoch_ = 0, step_in_epoch_ = 0;
};

}  // namespace headrace
