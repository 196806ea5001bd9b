#include "headrace/world.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "headrace/error.h"

namespace headrace {
namespace {

int environment_number(const char* name, int default_value) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return default_value;
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, value);
  require(parsed.ec == std::errc() && parsed.ptr == end && value >= 0,
          "the environment variable {} is \"{}\", but it must be a number of 0 or more, as torchrun sets it", name, text);
  return value;
}

}  // namespace

World World::from_environment(const std::string& device, int64_t num_threads) {
  World world;
  world.rank = environment_number("RANK", 0);
  world.local_rank = environment_number("LOCAL_RANK", 0);
  world.size = environment_number("WORLD_SIZE", 1);
  require(world.size == 1, "WORLD_SIZE is {}, but this version trains on one process. Start it without torchrun.", world.size);
  const bool has_cuda = at::globalContext().hasCUDA();
  require(device != "cuda" || has_cuda, "device is cuda, but no CUDA device can be used here. Try device: cpu.");
  if (device == "cuda" || (device == "auto" && has_cuda)) {
    world.device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(world.local_rank));
  }
  at::set_num_threads(num_threads > 0 ? static_cast<int>(num_threads) : static_cast<int>(std::thread::hardware_concurrency()));
  return world;
}

}  // namespace headrace
