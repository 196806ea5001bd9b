#include "data/batches.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "data/packing.h"
#include "headrace/error.h"

namespace headrace {
namespace {

constexpr int64_t kNotTrained = -100;  // cross-entropy's ignore_index

struct TokenCounts {
  int64_t tokens = 0, trained = 0;
};

/// What make_batch would count for one document; the first token is never a target.
TokenCounts count_tokens(const Document& document, int64_t sequence_length) {
  const auto length = std::min<std::size_t>(document.input_ids.size(), static_cast<std::size_t>(sequence_length));
  TokenCounts counts{static_cast<int64_t>(length), 0};
  for (std::size_t i = 1; i < length; ++i) counts.trained += document.loss_mask[i] == 1 ? 1 : 0;
  return counts;
}

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

TokenBatch make_batch(const TokenShards& shards, const std::vector<int64_t>& documents, int64_t sequence_length) {
  check_argument(sequence_length > 0, "make_batch: sequence_length is {}, but it must be above 0", sequence_length);
  TokenBatch batch;
  batch.document_bounds.push_back(0);
  std::vector<Document> views;
  views.reserve(documents.size());
  for (const int64_t index : documents) {
    Document view = shards.document(index);
    const auto length = std::min<std::size_t>(view.input_ids.size(), static_cast<std::size_t>(sequence_length));
    view.input_ids = view.input_ids.first(length);
    view.loss_mask = view.loss_mask.first(length);
    batch.document_bounds.push_back(batch.document_bounds.back() + static_cast<int64_t>(length));
    batch.max_document_length = std::max(batch.max_document_length, static_cast<int64_t>(length));
    views.push_back(view);
  }
  const int64_t num_tokens = batch.document_bounds.back();
  check_argument(num_tokens <= std::numeric_limits<int32_t>::max(),
                 "make_batch: {} tokens in one batch, but cu_seqlens counts to 2^31 - 1", num_tokens);

  batch.input_ids = at::empty({num_tokens}, at::kLong);
  batch.targets = at::empty({num_tokens}, at::kLong);
  batch.position_ids = at::empty({num_tokens}, at::kLong);
  batch.cu_seqlens = at::empty({static_cast<int64_t>(batch.document_bounds.size())}, at::kInt);
  std::copy(batch.document_bounds.begin(), batch.document_bounds.end(), batch.cu_seqlens.mutable_data_ptr<int32_t>());

  auto* input_ids = batch.input_ids.mutable_data_ptr<int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<int64_t>();
  auto* position_ids = batch.position_ids.mutable_data_ptr<int64_t>();
  for (std::size_t d = 0; d < views.size(); ++d) {
    const auto& [ids, mask] = views[d];
    for (std::size_t s = 0; s < ids.size(); ++s) {
      // An id beyond the embedding would read foreign memory on a GPU.
      require(ids[s] < static_cast<uint64_t>(shards.vocab_size()),
              "document {} holds the token id {}, but the vocabulary ends at {}; run `headrace prepare` again", documents[d],
              ids[s], shards.vocab_size() - 1);
      require(mask[s] <= 1, "document {} holds the loss mask {}, but it must be 0 or 1; run `headrace prepare` again",
              documents[d], mask[s]);
      const bool is_trained = s + 1 < ids.size() && mask[s + 1] == 1;
      *input_ids++ = ids[s];
      *targets++ = is_trained ? static_cast<int64_t>(ids[s + 1]) : kNotTrained;
      *position_ids++ = static_cast<int64_t>(s);
      batch.num_trained_tokens += is_trained ? 1 : 0;
    }
  }
  return batch;
}

Batches::Batches(const TokenShards& shards, BatchSettings settings) : shards_(&shards), settings_(settings) {
  check_argument(settings.sequence_length > 0, "Batches: sequence_length is {}, but it must be above 0",
                 settings.sequence_length);
  check_argument(settings.world_size > 0 && settings.rank >= 0 && settings.rank < settings.world_size,
                 "Batches: rank {} of {} ranks", settings.rank, settings.world_size);
  check_argument(settings.local_batch_size > 0 && settings.global_batch_size > 0 &&
                     settings.global_batch_size % (settings.local_batch_size * settings.world_size) == 0,
                 "Batches: global_batch_size is {}, but it must be a multiple of local_batch_size ({}) times {} ranks",
                 settings.global_batch_size, settings.local_batch_size, settings.world_size);
  lengths_.reserve(static_cast<std::size_t>(shards.num_documents()));
  for (int64_t i = 0; i < shards.num_documents(); ++i)
    lengths_.push_back(static_cast<int64_t>(shards.document(i).input_ids.size()));
  begin_epoch(0);
}

std::vector<std::vector<int64_t>> Batches::rows_of_epoch(int64_t epoch) const {
  std::vector<int64_t> order(lengths_.size());
  if (settings_.shuffle) {
    order = shuffled_order(static_cast<int64_t>(lengths_.size()), settings_.seed, epoch);
  } else {
    std::iota(order.begin(), order.end(), 0);
  }
  return pack_rows(order, lengths_, settings_.sequence_length, settings_.pack);
}

void Batches::begin_epoch(int64_t epoch) {
  rows_ = rows_of_epoch(epoch);
  epoch_ = epoch;
  step_in_epoch_ = 0;
}

int64_t Batches::steps_per_epoch() const {
  return ceil_divide(static_cast<int64_t>(rows_.size()), settings_.global_batch_size);
}

int64_t Batches::steps_in_epoch(int64_t epoch) const {
  if (epoch == epoch_ || !settings_.pack || !settings_.shuffle) return steps_per_epoch();
  return ceil_divide(static_cast<int64_t>(rows_of_epoch(epoch).size()), settings_.global_batch_size);
}

StepBatches Batches::next() {
  StepBatches step;
  step.epoch = epoch_;
  step.step_in_epoch = step_in_epoch_;
  const int64_t first_row = step_in_epoch_ * settings_.global_batch_size;
  const int64_t num_rows = std::min(settings_.global_batch_size, static_cast<int64_t>(rows_.size()) - first_row);

  // Micro-batch m of the step belongs to rank m % world_size; all ranks walk through all of them to know the global counts.
  const int64_t micro_batches_per_rank = ceil_divide(ceil_divide(num_rows, settings_.local_batch_size), settings_.world_size);
  for (int64_t m = 0; m < micro_batches_per_rank * settings_.world_size; ++m) {
    std::vector<int64_t> documents;
    for (int64_t r = m * settings_.local_batch_size; r < std::min((m + 1) * settings_.local_batch_size, num_rows); ++r) {
      const auto& row = rows_[static_cast<std::size_t>(first_row + r)];
      documents.insert(documents.end(), row.begin(), row.end());
    }
    for (const int64_t document : documents) {
      const TokenCounts counts = count_tokens(shards_->document(document), settings_.sequence_length);
      step.global_tokens += counts.tokens;
      step.global_trained_tokens += counts.trained;
    }
    if (m % settings_.world_size == settings_.rank)
      step.micro_batches.push_back(make_batch(*shards_, documents, settings_.sequence_length));
  }

  ++step_in_epoch_;
  if (step_in_epoch_ == steps_per_epoch()) begin_epoch(epoch_ + 1);
  return step;
}

void Batches::seek(int64_t epoch, int64_t step_in_epoch) {
  check_argument(epoch >= 0 && step_in_epoch >= 0, "Batches::seek: epoch {}, step {}", epoch, step_in_epoch);
  if (epoch != epoch_) begin_epoch(epoch);
  require(step_in_epoch < steps_per_epoch(),
          "the saved position is step {} of epoch {}, but that epoch has {} steps: the data or the batch sizes have changed; "
          "start without "
          "resume_from_checkpoint",
          step_in_epoch, epoch, steps_per_epoch());
  step_in_epoch_ = step_in_epoch;
}

}  // namespace headrace
