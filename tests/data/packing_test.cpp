#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace headrace {

// Written out by a Python version of SplitMix64, Lemire's bounded draw and Fisher-Yates: the same on every machine, for ever,
// since a resumed run depends on it.
TEST(Packing, ShuffledOrderIsFixed) {
  EXPECT_EQ(shuffled_order(10, 42, 0), (std::vector<int64_t>{1, 7, 2, 5, 6, 4, 0, 9, 8, 3}));
  EXPECT_EQ(shuffled_order(10, 42, 1), (std::vector<int64_t>{3, 0, 6, 8, 4, 5, 1, 7, 2, 9}));
  EXPECT_EQ(shuffled_order(7, UINT64_MAX, 3), (std::vector<int64_t>{4, 2, 3, 5, 6, 1, 0}));
  uint64_t hash = 0;
  for (const int64_t i : shuffled_order(100000, 7, 2)) hash = hash * 31 + static_cast<uint64_t>(i);
  EXPECT_EQ(hash, 8275598991304458620ULL);
  EXPECT_TRUE(shuffled_order(0, 1, 1).empty());
  EXPECT_EQ(shuffled_order(1, 1, 1), std::vector<int64_t>{0});
}

TEST(Packing, ShuffledOrderIsAPermutationAndEven) {
  std::vector<int> first(5);
  for (uint64_t seed = 0; seed < 5000; ++seed) {
    auto order = shuffled_order(5, seed, static_cast<int64_t>(seed % 3));
    ++first[static_cast<std::size_t>(order[0])];
    std::sort(order.begin(), order.end());
    ASSERT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  }
  for (const int count : first) EXPECT_NEAR(count, 1000, 150);  // five standard deviations
  EXPECT_NE(shuffled_order(50, 1, 0), shuffled_order(50, 0, 1));
}

TEST(Packing, FirstFitByHand) {
  const std::vector<int64_t> order = {0, 1, 2, 3, 4, 5}, lengths = {6, 7, 3, 4, 1, 99};
  EXPECT_EQ(pack_rows(order, lengths, 10, true), (std::vector<std::vector<int64_t>>{{0, 2, 4}, {1}, {3}, {5}}));
  EXPECT_EQ(pack_rows(order, lengths, 10, true, /*open_rows=*/1),
            (std::vector<std::vector<int64_t>>{{0}, {1, 2}, {3, 4}, {5}}));
  EXPECT_EQ(pack_rows(order, lengths, 10, false), (std::vector<std::vector<int64_t>>{{0}, {1}, {2}, {3}, {4}, {5}}));
  EXPECT_TRUE(pack_rows({}, {}, 10, true).empty());
}

// Against a plain version: look at all rows, keep those that are not full and among the latest.
TEST(Packing, EqualsAPlainLoop) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const int64_t n = random() % 60, sequence_length = 1 + random() % 30, open_rows = 1 + random() % 6;
    std::vector<int64_t> lengths(static_cast<std::size_t>(n));
    for (int64_t& length : lengths) length = 1 + random() % 40;
    const auto order = shuffled_order(n, seed, 0);
    std::vector<std::vector<int64_t>> expected;
    std::vector<int64_t> rooms;
    std::vector<bool> closed;
    for (const int64_t d : order) {
      const int64_t length = std::min(lengths[static_cast<std::size_t>(d)], sequence_length);
      std::size_t row = 0;
      while (row < expected.size() && (closed[row] || rooms[row] < length)) ++row;
      if (row == expected.size()) {
        expected.emplace_back();
        rooms.push_back(sequence_length);
        closed.push_back(false);
      }
      expected[row].push_back(d);
      rooms[row] -= length;
      int64_t open = 0;
      for (std::size_t r = expected.size(); r-- > 0;) {
        if (rooms[r] == 0) closed[r] = true;
        if (!closed[r] && ++open > open_rows) closed[r] = true;
      }
    }
    const auto rows = pack_rows(order, lengths, sequence_length, true, open_rows);
    ASSERT_EQ(rows, expected) << "seed " << seed;
  }
}

}  // namespace headrace
