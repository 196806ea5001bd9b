// World: what the environment says about ranks and devices, and what is refused.
#include "headrace/world.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "headrace/error.h"

namespace headrace {
namespace {

class WorldTest : public testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : {"RANK", "LOCAL_RANK", "WORLD_SIZE"}) ::unsetenv(name);
  }
  static std::string refusal(const std::string& device = "cpu") {
    try {
      World::from_environment(device, 1);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(WorldTest, OneProcessWithoutTorchrun) {
  const World world = World::from_environment("cpu", 1);
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.local_rank, 0);
  EXPECT_EQ(world.size, 1);
  EXPECT_TRUE(world.device.is_cpu());
}

TEST_F(WorldTest, TorchrunWithOneProcess) {
  ::setenv("RANK", "0", 1);
  ::setenv("LOCAL_RANK", "0", 1);
  ::setenv("WORLD_SIZE", "1", 1);
  EXPECT_EQ(World::from_environment("cpu", 1).size, 1);
}

TEST_F(WorldTest, ThreadsAreThoseAskedFor) {
  World::from_environment("cpu", 2);
  EXPECT_EQ(at::get_num_threads(), 2);
  World::from_environment("cpu", 1);
  EXPECT_EQ(at::get_num_threads(), 1);
}

TEST_F(WorldTest, MalformedVariablesAreNamed) {
  for (const char* value : {"two", "-1", "1x", "1.5", "99999999999"}) {
    ::setenv("WORLD_SIZE", value, 1);
    const std::string message = refusal();
    EXPECT_NE(message.find("WORLD_SIZE"), std::string::npos) << value << ": " << message;
    EXPECT_NE(message.find(value), std::string::npos) << message;
  }
}

TEST_F(WorldTest, SeveralProcessesAreRefusedNotIgnored) {
  ::setenv("WORLD_SIZE", "2", 1);
  EXPECT_NE(refusal().find("WORLD_SIZE is 2"), std::string::npos);
}

TEST_F(WorldTest, CudaWithoutADeviceIsRefused) {
  if (at::globalContext().hasCUDA()) GTEST_SKIP() << "a CUDA device is here";
  EXPECT_NE(refusal("cuda").find("device: cpu"), std::string::npos);
  EXPECT_TRUE(World::from_environment("auto", 1).device.is_cpu());
}

}  // namespace
}  // namespace headrace
