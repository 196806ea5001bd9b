// Packing: which documents share a row of at most `sequence_length` tokens.
// Flow: TokenShards -> [packing] -> rows -> batches. Attention never crosses a document (cu_seqlens), so rows only fill the
// GPU.
#pragma once

#include <cstdint>
#include <vector>

namespace headrace {

/// Deterministic permutation of 0..n-1 for (seed, epoch): the same on every machine and standard library.
std::vector<int64_t> shuffled_order(int64_t n, uint64_t seed, int64_t epoch);

/// Rows of document indices. Documents are taken in `order`; each goes into the first (oldest) of the open rows that has room
/// for it (first fit), else it begins a row. Open are the `open_rows` latest rows that are not full. Rows are emitted in the
/// order of their first document. A document longer than sequence_length counts as sequence_length: the batcher cuts it there
/// (prepare has normally cut it before). With `pack` false every document is a row. Cost: O(documents * open_rows).
std::vector<std::vector<int64_t>> pack_rows(const std::vector<int64_t>& order, const std::vector<int64_t>& lengths,
                                            int64_t sequence_length, bool pack, int64_t open_rows = 64);

}  // namespace headrace
