// Router: chooses top_k experts for each token and the weight of each choice, and measures the load for the balancing loss.
// Flow: norm -> [router] -> permute -> experts -> combine. Reference: transformers Qwen3MoeTopKRouter, MixtralTopKRouter.
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

struct RouterConfig {
  int64_t num_experts = 0, top_k = 0;
  bool norm_topk_prob = true;       // divide the chosen weights by their sum
  bool weights_in_float32 = false;  // mixtral multiplies with float32 weights; the others round them to the model's dtype
};

/// A choice is made once: a recomputed forward takes it as it is, so that ties can never fall differently.
struct Routing {
  at::Tensor expert_ids;  // [num_tokens, top_k] int64, by descending probability; equal probabilities: the lower id first
  at::Tensor weights;     // [num_tokens, top_k] float32, rounded through the model's dtype unless weights_in_float32
  at::Tensor logits;      // [num_tokens, num_experts], model dtype
};

/// x [num_tokens, hidden_size], weight [num_experts, hidden_size]. Softmax in float32 over all experts, then top_k.
Routing router_forward(const at::Tensor& x, const at::Tensor& weight, const RouterConfig& config);

/// Adds to weight_grad and returns dx. dweights [num_tokens, top_k] float32: gradient of Routing::weights.
/// balance_grad [num_experts] float32 or undefined: gradient of the balancing loss by each token's probability of each expert
/// (the same for every token; see BalanceLoss).
at::Tensor router_backward(const at::Tensor& dweights, const at::Tensor& balance_grad, const at::Tensor& x,
                           const Routing& routing, const at::Tensor& weight, const at::Tensor& weight_grad,
                           const RouterConfig& config);

/// The load-balancing loss of transformers' load_balancing_loss_func over all sparse layers together:
///   num_experts * sum_e f[e] * P[e],   f[e] = picks of e / rows,   P[e] = sum of p[row, e] / rows,   rows = layers *
///   num_tokens
/// with p = softmax of the logits in their own dtype and float32 sums. Perfectly even routing gives top_k.
class BalanceLoss {
 public:
  explicit BalanceLoss(int64_t num_experts) : num_experts_(num_experts) {}
  /// Counts one layer's routing.
  void add(const Routing& routing);
  /// The loss, a float32 scalar tensor on the device; 0 when nothing was counted.
  at::Tensor value() const;
  /// d(scale * loss) / dp[row, e]: the same for every row, [num_experts] float32.
  at::Tensor grad(double scale) const;

 private:
  int64_t num_experts_;
  int64_t rows_ = 0;
  at::Tensor picks_, probabilities_;  // [num_experts] float32 sums
};

}  // namespace headrace
