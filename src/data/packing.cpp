#include "data/packing.h"

#include <algorithm>
#include <numeric>

#include "headrace/error.h"

namespace headrace {
namespace {

/// SplitMix64 (Steele, Lea, Flood 2014): small, and the same everywhere, unlike std::shuffle and the std distributions.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t state) : state_(state) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ULL;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  /// Uniform in 0..bound-1 without bias: draws from the incomplete last interval are thrown away (Lemire 2019).
  uint64_t below(uint64_t bound) {
    while (true) {
      const unsigned __int128 product = static_cast<unsigned __int128>(next()) * bound;
      const auto low = static_cast<uint64_t>(product);
      if (low >= (0 - bound) % bound) return static_cast<uint64_t>(product >> 64);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace

std::vector<int64_t> shuffled_order(int64_t n, uint64_t seed, int64_t epoch) {
  check_argument(n >= 0, "shuffled_order: n is {}, but it must not be negative", n);
  std::vector<int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  // The seed goes through the generator before the epoch is added: (1, 0) and (0, 1) must not give the same order.
  SplitMix64 random(SplitMix64(seed).next() + static_cast<uint64_t>(epoch));
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

std::vector<std::vector<int64_t>> pack_rows(const std::vector<int64_t>& order, const std::vector<int64_t>& lengths,
                                            int64_t sequence_length, bool pack, int64_t open_rows) {
  check_argument(sequence_length > 0, "pack_rows: sequence_length is {}, but it must be above 0", sequence_length);
  check_argument(open_rows > 0, "pack_rows: open_rows is {}, but it must be above 0", open_rows);
  struct OpenRow {
    std::size_t row;
    int64_t room;
  };
  std::vector<std::vector<int64_t>> rows;
  std::vector<OpenRow> open;  // oldest first, at most open_rows, each with room left
  for (const int64_t document : order) {
    const int64_t length = std::min(lengths.at(static_cast<std::size_t>(document)), sequence_length);
    const auto fitting =
        pack ? std::find_if(open.begin(), open.end(), [&](const OpenRow& row) { return row.room >= length; }) : open.end();
    if (fitting != open.end()) {
      rows[fitting->row].push_back(document);
      fitting->room -= length;
      if (fitting->room == 0) open.erase(fitting);
    } else {
      rows.push_back({document});
      if (!pack || length == sequence_length) continue;
      if (static_cast<int64_t>(open.size()) == open_rows) open.erase(open.begin());
      open.push_back({rows.size() - 1, sequence_length - length});
    }
  }
  return rows;
}

}  // namespace headrace
