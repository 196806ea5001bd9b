// World: this process among the ranks, and its device. Read once from the environment.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace headrace {

struct World {
  int rank = 0, local_rank = 0, size = 1;
  c10::Device device = c10::Device(c10::kCPU);

  /// RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them (absent: one process). `device` is auto (a GPU when there is one),
  /// cpu or cuda; num_threads CPU threads for this process, 0 = all cores. Throws UserError: cuda asked for but not there; a
  /// malformed variable; WORLD_SIZE above 1 (this version trains on one process).
  static World from_environment(const std::string& device, int64_t num_threads);
};

}  // namespace headrace
