// Parameters: offsets, views and adjacency of the flat buffers.
#include "models/parameters.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
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
  const Parameters parameters(layout(), at::kFloat, at::kCPU);
  parameters.weight("k").fill_(2.0);
  EXPECT_EQ(parameters.flat().sum().item<float>(), 20.0F);
  EXPECT_EQ(parameters.flat().narrow(0, 84, 10).sum().item<float>(), 20.0F);
}

TEST(Parameters, GradientsStayOpenUntilTheyAreReleased) {
  Parameters parameters(layout(), at::kFloat, at::kCPU);
  const FlatRange front = {0, 64}, back = {64, parameters.layout().size()};
  EXPECT_FALSE(parameters.grad("q").defined());
  EXPECT_TRUE(parameters.open_gradients(back).is_new);
  EXPECT_FALSE(parameters.grad("norm").defined());
  EXPECT_EQ(parameters.grad("q").abs().sum().item<float>(), 0.0F);
  parameters.grad("q").fill_(1.0);
  EXPECT_FALSE(parameters.open_gradients(back).is_new);  // kept
  EXPECT_EQ(parameters.open_gradients(back).buffer.elements.sum().item<float>(), 20.0F);
  EXPECT_TRUE(parameters.open_gradients(front).is_new);
  EXPECT_EQ(parameters.gradients().size(), 2U);
  EXPECT_THROW(parameters.open_gradients({32, 128}), std::invalid_argument);  // neither the one nor the other
  parameters.release_gradients(back);
  EXPECT_FALSE(parameters.grad("q").defined());
  EXPECT_TRUE(parameters.grad("norm").defined());
  parameters.release_gradients();
  EXPECT_TRUE(parameters.gradients().empty());
}

TEST(Parameters, NewGradientsAreZeroButThoseThatAreStored) {
  ParameterLayout l = layout();
  l.add_group({{"experts", {2, 40}, true, true, /*stored_first=*/true}});
  l.add_group({{"last", {5}}});
  for (const int64_t begin : {int64_t{0}, l.find("down").offset, l.find("experts").offset, l.find("last").offset}) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);  // fills new memory with NaN
    Parameters parameters(l, at::kFloat, at::kCPU);
    const at::Tensor elements = parameters.open_gradients({begin, l.size()}).buffer.elements;
    at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/true);
    const bool within = begin <= l.find("experts").offset;
    EXPECT_EQ(elements.isnan().sum().item<int64_t>(), within ? 80 : 0);
    EXPECT_EQ(elements.eq(0.0).sum().item<int64_t>(), l.size() - begin - (within ? 80 : 0));  // gaps too
    if (within) EXPECT_TRUE(parameters.grad("experts").isnan().all().item<bool>());
  }
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
  EXPECT_FALSE(parameters.joined(at::Tensor(), {"q", "k"}).defined());
}

}  // namespace
}  // namespace headrace
