// AdamW: the optimizer over a model's flat buffers, its clipping and its state. Flow: backward -> [optimizer] -> next step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "headrace/recipe.h"

namespace headrace {

/// A stretch of the flat buffer with one weight-decay setting.
struct DecaySegment {
  int64_t begin = 0, end = 0;  // elements; begin a multiple of 8, for 16-byte accesses
  bool decay = true;
};

class AdamW {
 public:
  /// States are allocated zero, in the weights' dtype. stochastic_rounding "auto" means: on for bfloat16. master_weights: see
  /// kernels/adamw.h; for bfloat16 only (float32 weights are their own masters).
  AdamW(const at::Tensor& flat_weights, std::vector<DecaySegment> segments, const OptimizerSection& settings, uint64_t seed);

  /// Norm over all of `gradients` together, float32 scalar on the device. No host synchronisation.
  at::Tensor gradient_norm(at::TensorList gradients) const;

  /// What update() multiplies gradients by, float32 scalar on the device: max_grad_norm / (norm + 1e-6), at most 1, as torch's
  /// clip_grad_norm_; 1 without clipping; NaN when the norm is not finite.
  at::Tensor gradient_scale(const at::Tensor& norm) const;

  /// Starts a step with learning rate `lr`; update() may then be called for any parts of the buffer, each once.
  void begin_step(double lr);
  /// Updates elements [first, first + gradients.numel()) of flat_weights; gradients are of those elements, first a
  /// multiple of 8. Changes nothing when
  /// gradient_scale is NaN.
  void update(const at::Tensor& flat_weights, const at::Tensor& gradients, int64_t first, const at::Tensor& gradient_scale);
  /// The step that was begun changed nothing: it does not count.
  void cancel_step() { --steps_done_; }

  /// One whole step: begin_step, then update of everything with gradient_scale(norm).
  void step(const at::Tensor& flat_weights, const at::Tensor& flat_gradients, const at::Tensor& norm, double lr);

  const OptimizerSection& settings() const { return settings_; }
  int64_t steps_done() const { return steps_done_; }
  const at::Tensor& first_moments() const { return first_moments_; }
  const at::Tensor& second_moments() const { return second_moments_; }
  const at::Tensor& master_remainders() const { return master_remainders_; }  // int16; undefined without master weights
  /// Continues as if `steps_done` steps had been made; moments and remainders are filled by the caller.
  void set_steps_done(int64_t steps_done) { steps_done_ = steps_done; }

 private:
  std::vector<DecaySegment> segments_;
  OptimizerSection settings_;
  uint64_t seed_;
  bool stochastic_rounding_;
  at::Tensor first_moments_, second_moments_, master_remainders_;
  int64_t steps_done_ = 0;
  double lr_ = 0;  // of the step that was begun
};

}  // namespace headrace
