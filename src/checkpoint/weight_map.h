// WeightMap: which bytes of which parameter a hub tensor is. One table per family, read both ways.
// Flow: family -> [WeightMap] -> load (hub -> parameters) and save (parameters -> hub).
//
// Every hub tensor is one contiguous piece of one parameter in transformers' in-memory layout. For example, with
// mlp.experts.gate_up_proj [E, 2I, H], expert e's up_proj.weight [I, H] is the piece at element offset (e * 2I + I) * H.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headrace {

struct WeightPiece {
  std::string hub_name;            // name in the hub checkpoint
  std::vector<int64_t> hub_shape;  // shape in the hub checkpoint
  std::string parameter;           // name in memory (transformers v5)
  int64_t offset = 0;              // first element within the parameter, row-major
};

struct WeightMap {
  /// The hub layout, every parameter covered exactly once.
  std::vector<WeightPiece> hub;
  /// The whole-parameter form of those parameters whose hub form differs (v5 files saved with save_original_format=False):
  /// hub_name = in-memory name, offset 0. Accepted on load; a checkpoint loaded in this form is saved in this form.
  std::vector<WeightPiece> in_memory;
  /// Tensors that may be in a file and carry no weight: ignored on load and not written back (ECMAScript regular expressions
  /// that match the whole name).
  std::vector<std::string> ignored;
};

}  // namespace headrace
