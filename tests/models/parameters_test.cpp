// Parameters: offsets, views and adjacency of the flat buffers.
#include "models/parameters.h"

#include <gtest/gtest.h>

#include "headrace/error.h"

namespace headrace {
namespace {

ParameterLayout layout() {
  ParameterLayout out;
  out.add_group({{"norm", {3}, false}});
  out.add_group({{"q", {4, 5}}, {"k", {2, 5}}, {"v", {2, 5}}});
  out.add_group({{"empty", {0, 7}}});
  out.add_group({{"down", {2, 3, 4}}});
  return out;
}

TEST(ParameterLayout, GroupsAreAdjacentAndBeginAligned) {
  const ParameterLayout l = layout();
  EXPECT_EQ(l.find("norm").offset, 0);
  EXPECT_EQ(l.find("q").offset, 64);
  EXPECT_EQ(l.find("k").offset, 64 + 20);
  EXPECT_EQ(l.find("v").offset, 64 + 30);
  EXPECT_EQ(l.find("down").offset % 64, 0);
  EXPECT_EQ(l.size(), l.find("down").offset + 24);
  EXPECT_EQ(l.num_parameters(), 3 + 20 + 10 + 10 + 24);
  EXPECT_FALSE(l.find("norm").decay);
  EXPECT_TRUE(l.find("q").decay);
}

TEST(ParameterLayout, RefusesASecondOfTheSameNameAndUnknownNames) {
  ParameterLayout l = layout();
  EXPECT_THROW(l.add_group({{"k", {1}}}), std::invalid_argument);
  EXPECT_THROW(l.find("missing"), std::invalid_argument);
  EXPECT_FALSE(l.contains("missing"));
}

TEST(Parameters, ViewsShareTheBuffer) {
  Parameters parameters(layout(), at::kFloat, at::kCPU);
  EXPECT_FALSE(parameters.flat_grad().defined());
  EXPECT_FALSE(parameters.grad("q").defined());
  parameters.weight("k").fill_(2.0);
  EXPECT_EQ(parameters.flat().sum().item<float>(), 20.0F);
  EXPECT_EQ(parameters.flat().narrow(0, 84, 10).sum().item<float>(), 20.0F);
  parameters.allocate_gradients();
  parameters.grad("down").fill_(1.0);
  EXPECT_EQ(parameters.flat_grad().sum().item<float>(), 24.0F);
  EXPECT_EQ(parameters.flat().sum().item<float>(), 20.0F);
  parameters.allocate_gradients();  // a second call keeps them
  EXPECT_EQ(parameters.flat_grad().sum().item<float>(), 24.0F);
  parameters.zero_gradients();
  EXPECT_EQ(parameters.flat_grad().abs().sum().item<float>(), 0.0F);
}

TEST(Parameters, JoinedIsOneMatrixOfAdjacentOnes) {
  Parameters parameters(layout(), at::kFloat, at::kCPU);
  const at::Tensor qkv = parameters.joined(parameters.flat(), {"q", "k", "v"});
  EXPECT_EQ(qkv.sizes(), (std::vector<int64_t>{8, 5}));
  qkv.narrow(0, 4, 2).fill_(3.0);
  EXPECT_EQ(parameters.weight("k").sum().item<float>(), 30.0F);
  EXPECT_EQ(parameters.weight("q").abs().sum().item<float>(), 0.0F);
  EXPECT_THROW(parameters.joined(parameters.flat(), {"q", "v"}), std::invalid_argument);
  EXPECT_THROW(parameters.joined(parameters.flat(), {"q", "down"}), std::invalid_argument);
  EXPECT_FALSE(parameters.joined(parameters.flat_grad(), {"q", "k"}).defined());
}

}  // namespace
}  // namespace headrace
