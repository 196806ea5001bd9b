#include "data/batches.h"

#include <map>

#include "data/packing.h"
#include "data/tiny_shards.h"
#include "headrace/error.h"

namespace headrace {
namespace {

using namespace testing_data;

std::vector<int64_t> ints(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

void expect_same(const TokenBatch& a, const TokenBatch& b) {
  EXPECT_EQ(ints(a.input_ids), ints(b.input_ids));
  EXPECT_EQ(ints(a.targets), ints(b.targets));
  EXPECT_EQ(ints(a.position_ids), ints(b.position_ids));
  EXPECT_EQ(a.document_bounds, b.document_bounds);
}

void expect_same(const StepBatches& a, const StepBatches& b) {
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.step_in_epoch, b.step_in_epoch);
  EXPECT_EQ(a.global_trained_tokens, b.global_trained_tokens);
  EXPECT_EQ(a.global_tokens, b.global_tokens);
  ASSERT_EQ(a.micro_batches.size(), b.micro_batches.size());
  for (std::size_t m = 0; m < a.micro_batches.size(); ++m) expect_same(a.micro_batches[m], b.micro_batches[m]);
}

TokenShards shards_with(const std::vector<TinyDocument>& documents, const std::string& name) {
  const auto folder = fresh_folder(name);
  write_tiny_shards(folder, documents);
  return TokenShards(folder, "train");
}

}  // namespace

TEST(MakeBatch, ByHand) {
  const TokenShards shards =
      shards_with({{{10, 11, 12, 13}, {1, 0, 1, 1}}, {{20}, {1}}, {{30, 31, 32, 33, 34}, {1, 1, 1, 1, 1}}}, "by_hand");
  const TokenBatch batch = make_batch(shards, {2, 0, 1}, 4);  // document 2 is cut after 33
  EXPECT_EQ(ints(batch.input_ids), (std::vector<int64_t>{30, 31, 32, 33, 10, 11, 12, 13, 20}));
  EXPECT_EQ(ints(batch.targets), (std::vector<int64_t>{31, 32, 33, -100, -100, 12, 13, -100, -100}));
  EXPECT_EQ(ints(batch.position_ids), (std::vector<int64_t>{0, 1, 2, 3, 0, 1, 2, 3, 0}));
  EXPECT_EQ(batch.document_bounds, (std::vector<int64_t>{0, 4, 8, 9}));
  ASSERT_EQ(batch.cu_seqlens.numel(), 4);
  ASSERT_EQ(batch.cu_seqlens.scalar_type(), at::kInt);
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(batch.cu_seqlens.const_data_ptr<int32_t>()[i], batch.document_bounds[static_cast<std::size_t>(i)]);
  EXPECT_EQ(batch.max_document_length, 4);
  EXPECT_EQ(batch.num_trained_tokens, 5);
  EXPECT_EQ(batch.num_tokens(), 9);
}

TEST(MakeBatch, NoDocuments) {
  const TokenBatch batch = make_batch(shards_with({{{1}, {0}}}, "no_documents"), {}, 4);
  EXPECT_EQ(batch.num_tokens(), 0);
  EXPECT_EQ(batch.cu_seqlens.numel(), 1);
  EXPECT_EQ(batch.num_trained_tokens, 0);
}

TEST(MakeBatch, ForeignTokensAreRefused) {
  EXPECT_NO_THROW(make_batch(shards_with({{{999, 1}, {0, 1}}}, "ids"), {0}, 4));
  EXPECT_THROW(make_batch(shards_with({{{1000, 1}, {0, 1}}}, "ids"), {0}, 4), UserError);
  EXPECT_THROW(make_batch(shards_with({{{1, 1}, {0, 2}}}, "ids"), {0}, 4), UserError);
}

// For any number of ranks: every document once per epoch, the order of one rank, the same counts and the same number of
// micro-batches everywhere.
TEST(Batches, RanksShareTheOrderOfOne) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    const auto documents = random_documents(1 + static_cast<int>(seed * 3), 12, seed);
    const TokenShards shards = shards_with(documents, "ranks");
    const int64_t local = 1 + seed % 3;
    BatchSettings settings{.sequence_length = 10,
                           .local_batch_size = local,
                           .global_batch_size = local * 4,
                           .pack = seed % 4 != 0,
                           .shuffle = seed % 5 != 0,
                           .seed = seed};
    Batches alone(shards, settings);
    for (const int world_size : {2, 4}) {
      alone.seek(0, 0);
      std::vector<Batches> ranks;
      for (int rank = 0; rank < world_size; ++rank) {
        settings.rank = rank;
        settings.world_size = world_size;
        ranks.emplace_back(shards, settings);
      }
      std::map<int64_t, int64_t> tokens_seen;
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        const int64_t steps = alone.steps_in_epoch(epoch);
        ASSERT_EQ(steps, alone.steps_per_epoch());
        for (int64_t s = 0; s < steps; ++s) {
          const StepBatches expected = alone.next();
          EXPECT_EQ(expected.epoch, epoch);
          EXPECT_EQ(expected.step_in_epoch, s);
          std::vector<StepBatches> parts;
          for (Batches& rank : ranks) parts.push_back(rank.next());
          int64_t tokens = 0, trained = 0;
          for (std::size_t r = 0; r < parts.size(); ++r) {
            EXPECT_EQ(parts[r].global_trained_tokens, expected.global_trained_tokens);
            EXPECT_EQ(parts[r].global_tokens, expected.global_tokens);
            EXPECT_EQ(parts[r].micro_batches.size(), parts[0].micro_batches.size());
            EXPECT_LE(parts[r].micro_batches.size(), 4U / static_cast<unsigned>(world_size));
            for (std::size_t m = 0; m < parts[r].micro_batches.size(); ++m) {
              const std::size_t global = m * static_cast<std::size_t>(world_size) + r;
              if (global < expected.micro_batches.size()) {
                expect_same(parts[r].micro_batches[m], expected.micro_batches[global]);
              } else {
                EXPECT_EQ(parts[r].micro_batches[m].num_tokens(), 0);
              }
              tokens += parts[r].micro_batches[m].num_tokens();
              trained += parts[r].micro_batches[m].num_trained_tokens;
            }
          }
          EXPECT_EQ(tokens, expected.global_tokens);
          EXPECT_EQ(trained, expected.global_trained_tokens);
          tokens_seen[epoch] += tokens;
        }
      }
      int64_t all = 0;
      for (const TinyDocument& document : documents)
        all += std::min<int64_t>(10, static_cast<int64_t>(document.input_ids.size()));
      EXPECT_EQ(tokens_seen[0], all);
      EXPECT_EQ(tokens_seen[1], all);
    }
  }
}

TEST(Batches, EveryDocumentOncePerEpochInItsRow) {
  std::vector<TinyDocument> documents;
  for (uint32_t d = 0; d < 50; ++d)
    documents.push_back({std::vector<uint32_t>(1 + d % 7, d), std::vector<uint8_t>(1 + d % 7, 1)});
  const TokenShards shards = shards_with(documents, "once");
  Batches batches(shards, {.sequence_length = 16, .local_batch_size = 2, .global_batch_size = 6, .seed = 3});
  std::vector<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int64_t> order;
    const int64_t steps = batches.steps_per_epoch();
    for (int64_t s = 0; s < steps; ++s) {
      for (const TokenBatch& batch : batches.next().micro_batches) {
        EXPECT_LE(batch.num_tokens(), 32);
        for (std::size_t d = 0; d + 1 < batch.document_bounds.size(); ++d)
          order.push_back(ints(batch.input_ids)[static_cast<std::size_t>(batch.document_bounds[d])]);
      }
    }
    EXPECT_EQ(batches.epoch(), epoch + 1);
    EXPECT_EQ(batches.step_in_epoch(), 0);
    orders.push_back(order);
    std::sort(order.begin(), order.end());
    ASSERT_EQ(order.size(), 50U);
    for (int64_t d = 0; d < 50; ++d) EXPECT_EQ(order[static_cast<std::size_t>(d)], d);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
}

TEST(Batches, SeekEqualsReplay) {
  const TokenShards shards = shards_with(random_documents(40, 12, 9), "seek");
  const BatchSettings settings{
      .sequence_length = 12, .local_batch_size = 1, .global_batch_size = 4, .seed = 5, .rank = 1, .world_size = 2};
  Batches unbroken(shards, settings);
  for (int i = 0; i < 25; ++i) {
    Batches resumed(shards, settings);
    resumed.seek(unbroken.epoch(), unbroken.step_in_epoch());
    Batches copy = unbroken;
    for (int j = 0; j < 3; ++j) expect_same(resumed.next(), copy.next());
    unbroken.next();
  }
  unbroken.seek(0, 0);
  expect_same(unbroken.next(), Batches(shards, settings).next());
  EXPECT_THROW(unbroken.seek(0, 1000), UserError);
}

TEST(Batches, AStepWithoutTrainedTokensIsKept) {
  const TokenShards shards = shards_with({{{1, 2, 3}, {1, 0, 0}}, {{4, 5}, {0, 0}}}, "untrained");
  Batches batches(shards, {.sequence_length = 8, .local_batch_size = 1, .global_batch_size = 1});
  const StepBatches step = batches.next();
  EXPECT_EQ(step.global_trained_tokens, 0);
  EXPECT_EQ(step.global_tokens, 5);
  EXPECT_EQ(step.micro_batches.at(0).num_trained_tokens, 0);
}

TEST(Batches, WrongSettings) {
  const TokenShards shards = shards_with({{{1, 2}, {0, 1}}}, "settings");
  const auto make = [&](BatchSettings settings) { Batches(shards, settings); };
  EXPECT_NO_THROW(make({.sequence_length = 2, .local_batch_size = 2, .global_batch_size = 8, .rank = 1, .world_size = 2}));
  EXPECT_THROW(make({.sequence_length = 0}), std::invalid_argument);
  EXPECT_THROW(make({.sequence_length = 2, .local_batch_size = 2, .global_batch_size = 6, .world_size = 2}),
               std::invalid_argument);
  EXPECT_THROW(make({.sequence_length = 2, .global_batch_size = 2, .rank = 2, .world_size = 2}), std::invalid_argument);
}

}  // namespace headrace
