#include "trainer/memory.h"

#include <sys/resource.h>

#ifdef HEADRACE_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

namespace headrace {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

double peak_resident_gib() {
  struct rusage usage {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0 / kGiB;  // ru_maxrss is in KiB
}

}  // namespace

#ifdef HEADRACE_HAS_CUDA

double peak_memory_gib(c10::Device device) {
  if (!device.is_cuda()) return peak_resident_gib();
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return static_cast<double>(stats.allocated_bytes[0].peak) / kGiB;
}

void reset_peak_memory(c10::Device device) {
  if (device.is_cuda()) c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

void release_cached_memory(c10::Device device) {
  if (device.is_cuda()) c10::cuda::CUDACachingAllocator::emptyCache();
}

double device_memory_gib(c10::Device device) {
  if (!device.is_cuda()) return 0.0;
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return static_cast<double>(total - free) / kGiB;
}

void synchronize_device(c10::Device device) {
  if (device.is_cuda()) c10::cuda::device_synchronize();
}

#else

double peak_memory_gib(c10::Device) { return peak_resident_gib(); }
void reset_peak_memory(c10::Device) {}
void release_cached_memory(c10::Device) {}
double device_memory_gib(c10::Device) { return 0.0; }
void synchronize_device(c10::Device) {}

#endif

}  // namespace headrace
