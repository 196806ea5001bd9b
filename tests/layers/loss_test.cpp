#include "layers/embedding.h"
#include "layers/linear_cross_entropy.h"
#include "tests/layers/gradients.h"

namespace headrace {
using namespace testing;

TEST(LinearCrossEntropy, MatchesAutogradForEveryChunkSize) {
  const at::Tensor h = leaf(random({11, 6}, 1)), w = leaf(random({17, 6}, 2));
  at::Tensor targets = at::tensor({3, -100, 16, 0, -100, 5, 5, 9, -100, 1, 2}, at::kLong);
  const at::Tensor loss = at::cross_entropy_loss(at::matmul(h, w.t()), targets, {}, at::Reduction::Sum, -100);
  const auto expected = reference_gradients(loss * 0.125, at::ones({}), {h, w});
  for (const int64_t chunk : {1, 3, 8, 100}) {
    const at::Tensor dw = at::ones({17, 6});
    const auto result = linear_cross_entropy_forward_backward(h.detach(), w.detach(), targets, 8, 0.125, dw, false, {chunk});
    EXPECT_LT(relative_error(result.loss_sum, loss), kTolerance);
    EXPECT_LT(relative_error(result.dh, expected[0]), kTolerance);
    EXPECT_LT(relative_error(dw - 1.0, expected[1]), kTolerance);
    EXPECT_TRUE(at::equal(linear_cross_entropy_forward(h.detach(), w.detach(), targets, 8, {chunk}).loss_sum, result.loss_sum));
  }
}

// Fault kind "batch without a trained token": loss 0 and finite (zero) gradients.
TEST(LinearCrossEntropy, NoTrainedTokenGivesZero) {
  const at::Tensor dw = at::zeros({9, 4});
  const auto result =
      linear_cross_entropy_forward_backward(random({5, 4}, 1), random({9, 4}, 2), at::full({5}, -100, at::kLong), 0, 1.0, dw);
  EXPECT_EQ(result.loss_sum.item<float>(), 0.0F);
  EXPECT_TRUE(at::equal(result.dh, at::zeros({5, 4})));
  EXPECT_TRUE(at::equal(dw, at::zeros({9, 4})));
}

TEST(Embedding, PaddingRowGetsNothingAndRepeatsAdd) {
  const at::Tensor ids = at::tensor({2, 0, 2, 1}, at::kLong), dy = random({4, 3}, 1), grad = at::zeros({4, 3});
  embedding_backward(dy, ids, grad, /*padding_idx=*/0);
  EXPECT_TRUE(at::equal(grad[0], at::zeros({3})));
  EXPECT_LT(relative_error(grad[2], dy[0] + dy[2]), 1e-6);
  EXPECT_TRUE(at::equal(grad[3], at::zeros({3})));
  EXPECT_TRUE(at::equal(embedding_forward(ids, dy), dy.index_select(0, ids)));
}

}  // namespace headrace
