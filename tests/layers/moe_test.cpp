#include "layers/moe.h"

#include "layers/mlp.h"
#include "tests/layers/gradients.h"

namespace headrace {
using namespace testing;

namespace {

struct Case {
  int64_t num_tokens, hidden_size, width, num_experts, top_k;
  bool norm_topk_prob;
  double balance;  // coefficient of the balancing loss in the reference; 0 = none
};

class Moe : public ::testing::TestWithParam<Case> {};

// One expert after the other over all tokens, weighted by a dense [num_tokens, num_experts] matrix: differentiable and plain.
at::Tensor plain_moe(const at::Tensor& x, const MoeConfig& c, const MoeTensors& w, const at::Tensor& expert_ids,
                     at::Tensor* balance) {
  const at::Tensor p = at::matmul(x, w.router.t()).softmax(-1);
  const at::Tensor chosen = at::zeros_like(p.detach()).scatter_(-1, expert_ids, 1.0);
  at::Tensor weights = p * chosen;
  if (c.router.norm_topk_prob) weights = weights / weights.sum(-1, true);
  at::Tensor y = at::zeros_like(x);
  const int64_t width = c.moe_intermediate_size;
  for (int64_t e = 0; e < c.router.num_experts; ++e) {
    const at::Tensor z = at::matmul(x, w.gate_up[e].t());
    const at::Tensor a = at::silu(z.narrow(1, 0, width)) * z.narrow(1, width, width);
    y = y + at::matmul(a, w.down[e].t()) * weights.narrow(1, e, 1);
  }
  *balance = (chosen.mean(0) * p.mean(0)).sum() * static_cast<double>(c.router.num_experts);
  return y;
}

}  // namespace

TEST_P(Moe, MatchesAutogradOfThePlainForm) {
  const Case& p = GetParam();
  MoeConfig config{p.hidden_size, p.width, {p.num_experts, p.top_k, p.norm_topk_prob, false}};
  MoeTensors w{leaf(random({p.num_experts, p.hidden_size}, 1)),
               leaf(random({p.num_experts, 2 * p.width, p.hidden_size}, 2, 0.3)),
               leaf(random({p.num_experts, p.hidden_size, p.width}, 3, 0.3))};
  if (p.num_experts > 2) {  // an expert that nobody chooses
    at::Tensor router = w.router.detach().clone();
    router[1].zero_();
    w.router = leaf(router);
  }
  const at::Tensor x = leaf(random({p.num_tokens, p.hidden_size}, 4).abs()), dy = random({p.num_tokens, p.hidden_size}, 5);
  const MoeTensors plain{w.router.detach(), w.gate_up.detach(), w.down.detach()};
  const MoeTensors grads{at::zeros_like(plain.router), at::zeros_like(plain.gate_up), at::zeros_like(plain.down)};

  const MoeForward forward = moe_forward(x.detach(), config, plain);
  at::Tensor balance;
  const at::Tensor y = plain_moe(x, config, w, forward.saved.routing.expert_ids, &balance);
  EXPECT_LT(relative_error(forward.y, y), kTolerance);

  BalanceLoss measured(p.num_experts);
  measured.add(forward.saved.routing);
  at::Tensor objective = (y * dy).sum(), balance_grad;
  if (p.balance > 0) {
    if (p.num_tokens > 0) EXPECT_NEAR(measured.value().item<double>(), balance.item<double>(), 1e-5);
    objective = objective + balance * p.balance;
    balance_grad = measured.grad(p.balance);
  }
  const auto expected = reference_gradients(objective, at::ones({}), {x, w.router, w.gate_up, w.down});
  for (const bool recompute : {false, true}) {
    grads.router.zero_();
    // Overwritten expert gradients need not be zero before.
    const bool overwrite = recompute;
    for (const at::Tensor& grad : {grads.gate_up, grads.down}) grad.fill_(overwrite ? 7.0 : 0.0);
    MoeSaved saved = forward.saved;
    if (recompute) saved.gate_up.reset();
    const at::Tensor dx = moe_backward(dy, balance_grad, x.detach(), saved, config, plain, grads, overwrite);
    EXPECT_LT(relative_error(dx, expected[0]), kTolerance);
    EXPECT_LT(relative_error(grads.router, expected[1]), kTolerance);
    EXPECT_LT(relative_error(grads.gate_up, expected[2]), kTolerance);
    EXPECT_LT(relative_error(grads.down, expected[3]), kTolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Moe,
                         ::testing::Values(Case{13, 8, 6, 5, 2, true, 0}, Case{13, 8, 6, 5, 2, false, 0},
                                           Case{0, 8, 6, 5, 2, true, 0}, Case{1, 7, 5, 3, 3, true, 0},
                                           Case{9, 7, 5, 1, 1, true, 0}, Case{9, 7, 5, 1, 1, false, 0},
                                           Case{64, 16, 24, 16, 4, true, 0.5}, Case{11, 9, 3, 4, 2, false, 2.0}));

TEST(Router, TiesGoToTheLowerExpert) {
  const at::Tensor x = at::ones({3, 4});
  const Routing routing = router_forward(x, at::ones({6, 4}), {6, 3, true, true});
  EXPECT_TRUE(at::equal(routing.expert_ids, at::arange(3, at::kLong).expand({3, 3})));
  EXPECT_LT(relative_error(routing.weights, at::full({3, 3}, 1.0 / 3.0)), 1e-6);
}

// Fault kind "aux formula differs by version": transformers 5.17's value for a uniform router is top_k.
TEST(BalanceLoss, UniformRouterGivesTopK) {
  BalanceLoss loss(8);
  for (int layer = 0; layer < 2; ++layer) loss.add(router_forward(random({32, 4}, 1), at::zeros({8, 4}), {8, 2, true, false}));
  // All probabilities are 1/8, so the value is 8 * sum_e f[e] / 8 = top_k, however the ties fell.
  EXPECT_NEAR(loss.value().item<double>(), 2.0, 1e-6);
}

TEST(Dispatch, IsAStablePermutationAndCombineUndoesIt) {
  const at::Tensor ids = at::tensor({2, 0, 0, 2, 2, 1, 0, 2}, at::kLong).view({4, 2});
  const DispatchPlan plan = make_dispatch_plan(ids, 4);
  EXPECT_EQ(plan.host_ends, (std::vector<int64_t>{3, 4, 8, 8}));
  EXPECT_TRUE(at::equal(plan.pair_of_row, at::tensor({1, 2, 6, 5, 0, 3, 4, 7}, at::kLong)));
  const at::Tensor x = random({4, 3}, 1);
  EXPECT_LT(relative_error(combine(dispatch(x, plan), {}, plan), x * 2), 1e-6);
  const at::Tensor weights = random({4, 2}, 2);
  EXPECT_LT(relative_error(combine(dispatch(x, plan), weights, plan), x * weights.sum(1, true)), 1e-6);
}

TEST(Mlp, BackwardMatchesAutograd) {
  const at::Tensor x = leaf(random({5, 7}, 1)), dy = random({5, 7}, 2);
  const MlpTensors w{leaf(random({18, 7}, 3)), leaf(random({18}, 4)), leaf(random({7, 9}, 5)), leaf(random({7}, 6))};
  const at::Tensor z = at::matmul(x, w.gate_up.t()) + w.gate_up_bias;
  const at::Tensor y = at::matmul(at::silu(z.narrow(1, 0, 9)) * z.narrow(1, 9, 9), w.down.t()) + w.down_bias;
  const auto expected = reference_gradients(y, dy, {x, w.gate_up, w.gate_up_bias, w.down, w.down_bias});
  const MlpTensors plain{w.gate_up.detach(), w.gate_up_bias.detach(), w.down.detach(), w.down_bias.detach()};
  const MlpTensors grads{at::zeros({18, 7}), at::zeros({18}), at::zeros({7, 9}), at::zeros({7})};
  const MlpForward forward = mlp_forward(x.detach(), plain);
  EXPECT_LT(relative_error(forward.y, y), kTolerance);
  EXPECT_LT(relative_error(mlp_backward(dy, x.detach(), forward.saved, plain, grads), expected[0]), kTolerance);
  EXPECT_LT(relative_error(grads.gate_up, expected[1]), kTolerance);
  EXPECT_LT(relative_error(grads.gate_up_bias, expected[2]), kTolerance);
  EXPECT_LT(relative_error(grads.down, expected[3]), kTolerance);
  EXPECT_LT(relative_error(grads.down_bias, expected[4]), kTolerance);
}

}  // namespace headrace
