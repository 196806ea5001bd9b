// AdamW: the optimizer over a model's flat buffers, its clipping and its state. Flow: backward -> [optimizer] -> next step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "headrace/recipe.h"

namespace headrace {

/// A stretch of the flat buffer with one weight-decay setting.
struct DecaySegment {
  int64_t begin = 0, end = 0;  // elements
  bool decay = true;
};

class AdamW {
 public:
  /// States are allocated zero, in the weights' dtype. stochastic_rounding "auto" means: on for bfloat16.
  AdamW(const at::Tensor& flat_weights, std::vector<DecaySegment> segments, const OptimizerSection& settings, uint64_t seed);

  /// Global gradient norm, float32 scalar on the device. No host synchronisation.
  at::Tensor gradient_norm(const at::Tensor& flat_gradients) const;

  /// One update with learning rate `lr`; gradients are scaled to max_grad_norm first when clipping is on (as torch's
  /// clip_grad_norm_: coefficient max / (norm + 1e-6), at most 1). `norm` is gradient_norm()'s result.
  void step(const at::Tensor& flat_weights, const at::Tensor& flat_gradients, const at::Tensor& norm, double lr);

  int64_t steps_done() const { return steps_done_; }
  const at::Tensor& first_moments() const { return first_moments_; }
  const at::Tensor& second_moments() const { return second_moments_; }
  /// Continues as if `steps_done` steps had been made; the moments are filled by the caller.
  void set_steps_done(int64_t steps_done) { steps_done_ = steps_done; }

 private:
  std::vector<DecaySegment> segments_;
  OptimizerSection settings_;
  uint64_t seed_;
  bool stochastic_rounding_;
  at::Tensor first_moments_, second_moments_;
  int64_t steps_done_ = 0;
};

}  // namespace headrace
