// Parameters: offsets, views and adjacency of the flat buffers.
#include "models/parameters.h"

#include <ATen/ops/arange.h>
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

TEST(Parameters, GradientsThatAreStoredFirstAreNotZeroed) {
  ParameterLayout l = layout();
  l.add_group({{"experts", {2, 40}, true, true, /*stored_first=*/true}});
  l.add_group({{"last", {5}}});
  Parameters parameters(l, at::kFloat, at::kCPU);
  parameters.allocate_gradients();
  for (const int64_t begin : {int64_t{0}, l.find("down").offset, l.find("experts").offset, l.find("last").offset}) {
    parameters.flat_grad().fill_(1.0);
    parameters.zero_added_gradients(FlatBuffer(parameters.flat_grad().narrow(0, begin, l.size() - begin), begin));
    EXPECT_EQ(parameters.flat_grad().narrow(0, 0, begin).sum().item<float>(), static_cast<float>(begin));
    const bool within = begin <= l.find("experts").offset;  // the experts' 80 are all that is left, gaps are zero too
    EXPECT_EQ(parameters.flat_grad().narrow(0, begin, l.size() - begin).sum().item<float>(), within ? 80.0F : 0.0F);
  }
  EXPECT_EQ(parameters.grad("experts").sum().item<float>(), 80.0F);
}

TEST(Parameters, ViewsOfAPartOfTheLayout) {
  const Parameters parameters(layout(), at::kFloat, at::kCPU);
  const int64_t begin = parameters.layout().find("q").offset;
  const FlatBuffer part(at::arange(40, at::kFloat), begin);
  EXPECT_EQ(parameters.view(part, "k")[0][0].item<float>(), 20.0F);
  EXPECT_EQ(parameters.joined(part, {"k", "v"}).sizes(), (std::vector<int64_t>{4, 5}));
  EXPECT_ANY_THROW(parameters.view(part, "norm"));  // before it
  EXPECT_ANY_THROW(parameters.view(part, "down"));  // behind it
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
