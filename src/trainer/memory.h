// Memory in use, for the progress line and the benchmark.
#pragma once

#include <c10/core/Device.h>

namespace headrace {

/// GiB: on a GPU the allocator's peak since the last reset_peak_memory(), on the CPU the process's peak resident set.
double peak_memory_gib(c10::Device device);
void reset_peak_memory(c10::Device device);
/// Gives memory that the allocator keeps for later back to the device.
void release_cached_memory(c10::Device device);

/// GiB in use on the whole GPU as the driver reports it, whoever took it; 0 on the CPU.
double device_memory_gib(c10::Device device);

/// Waits until the device has done all that was asked of it; nothing to do on the CPU.
void synchronize_device(c10::Device device);

}  // namespace headrace
