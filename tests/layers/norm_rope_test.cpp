#include "layers/norm.h"
#include "layers/rope.h"
#include "tests/layers/gradients.h"

namespace headrace {
using namespace testing;

TEST(RmsNorm, BackwardMatchesAutograd) {
  for (const int64_t rows : {0, 1, 7}) {
    const at::Tensor x = leaf(random({rows, 33}, 1)), w = leaf(random({33}, 2)), dy = random({rows, 33}, 3);
    const at::Tensor y = x * at::rsqrt(x.square().mean(-1, true) + 1e-6) * w;
    const auto expected = reference_gradients(y, dy, {x, w});
    const NormForward forward = rms_norm_forward(x.detach(), w.detach(), 1e-6);
    EXPECT_LT(relative_error(forward.y, y), kTolerance);
    EXPECT_TRUE(at::equal(rms_norm_apply(x.detach(), w.detach(), forward.saved), forward.y));
    const at::Tensor dw = at::ones({33});
    EXPECT_LT(relative_error(rms_norm_backward(dy, x.detach(), w.detach(), forward.saved, dw), expected[0]), kTolerance);
    EXPECT_LT(relative_error(dw - 1.0, expected[1]), kTolerance) << "gradients are added, not stored";
  }
}

TEST(RmsNorm, BfloatRoundsBeforeTheWeight) {
  const at::Tensor x = random({5, 16}, 4).to(at::kBFloat16), w = random({16}, 5).to(at::kBFloat16);
  const at::Tensor u = x.to(at::kFloat);
  const at::Tensor expected = (u * at::rsqrt(u.square().mean(-1, true) + 1e-6)).to(at::kBFloat16) * w;
  EXPECT_TRUE(at::equal(rms_norm_forward(x, w, 1e-6).y, expected));
}

TEST(RmsNorm, AddIsTheSumItNorms) {
  const at::Tensor x = random({4, 8}, 6), delta = random({4, 8}, 7), w = random({8}, 8);
  const AddNormForward forward = add_rms_norm_forward(x, delta, w, 1e-6);
  EXPECT_TRUE(at::equal(forward.sum, x + delta));
  EXPECT_TRUE(at::equal(forward.y, rms_norm_forward(x + delta, w, 1e-6).y));
}

TEST(Rope, BackwardIsTheTransposedRotation) {
  RopeFrequencies frequencies{{1.0F, 0.5F, 0.25F}, 1.2F};
  const at::Tensor positions = at::arange(5, at::kLong);
  const RopeTables tables = rope_tables(frequencies, positions, at::kFloat);
  const at::Tensor x = random({5, 2, 8}, 9), dy = random({5, 2, 8}, 10);  // 6 components rotated, 2 pass through
  const at::Tensor y = rope_forward(x, tables);
  EXPECT_TRUE(at::equal(y.narrow(-1, 6, 2), x.narrow(-1, 6, 2)));
  EXPECT_TRUE(at::allclose(y[0].narrow(-1, 0, 6), x[0].narrow(-1, 0, 6) * 1.2));
  const double forward = (y * dy).sum().item<double>(), backward = (x * rope_backward(dy, tables)).sum().item<double>();
  EXPECT_NEAR(forward, backward, 1e-4);
}

}  // namespace headrace
