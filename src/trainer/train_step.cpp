#include "trainer/train_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "headrace/error.h"

namespace headrace {

AdamW make_optimizer(const Decoder& decoder, const OptimizerSection& settings, uint64_t seed) {
  // Neighbours with the same setting become one segment, the gaps between them (always zero) included: fewer launches.
  std::vector<DecaySegment> segments;
  for (const ParameterInfo& info : decoder.parameters().layout().entries()) {
    const bool decay = info.decay && settings.weight_decay != 0.0;
    if (segments.empty() || segments.back().decay != decay) segments.push_back({info.offset, info.offset, decay});
    segments.back().end = info.offset + info.numel();
  }
  return AdamW(decoder.parameters().flat(), std::move(segments), settings, seed);
}

TokenBatch to_device(TokenBatch batch, at::Device device) {
  if (device.is_cpu()) return batch;
  for (at::Tensor* tensor : {&batch.input_ids, &batch.targets, &batch.position_ids, &batch.cu_seqlens}) {
    *tensor = tensor->pin_memory().to(device, /*non_blocking=*/true);
  }
  return batch;
}

namespace {

// What the device knows at the end of a step, read with one wait.
StepResult read_result(const at::Tensor& loss_sum, const at::Tensor& balance_sum, const at::Tensor& norm, int64_t trained) {
  const at::Tensor values = at::stack({loss_sum, balance_sum, norm}).cpu();
  const float* value = values.const_data_ptr<float>();
  StepResult result;
  result.loss = static_cast<double>(value[0]) / std::max<double>(1.0, static_cast<double>(trained));
  result.balance_loss = value[1];
  result.grad_norm = value[2];
  result.finite = std::isfinite(result.loss) && std::isfinite(result.balance_loss) && std::isfinite(result.grad_norm);
  return result;
}

}  // namespace

StepResult train_step(Decoder& decoder, AdamW& optimizer, const StepBatches& batches, Recompute recompute, double lr) {
  const bool fused = optimizer.settings().fused_backward;
  check_argument(!fused || batches.micro_batches.size() <= 1, "fused_backward takes one micro-batch a step, not {}",
                 batches.micro_batches.size());
  Parameters& parameters = decoder.parameters();
  parameters.release_gradients();  // of the last step
  if (std::ranges::none_of(batches.micro_batches, [](const TokenBatch& batch) { return batch.num_tokens() > 0; })) return {};
  const auto float_options = at::TensorOptions().dtype(at::kFloat).device(decoder.device());
  at::Tensor loss_sum = at::zeros({}, float_options), balance_sum = at::zeros({}, float_options);
  at::Tensor squares = at::zeros({}, float_options);  // of the gradient elements applied so far
  optimizer.begin_step(lr);
  for (const TokenBatch& batch : batches.micro_batches) {
    if (batch.num_tokens() == 0) continue;
    DecoderRun run;
    run.recompute = recompute;
    run.grad_scale = batches.global_trained_tokens > 0 ? 1.0 / static_cast<double>(batches.global_trained_tokens) : 0.0;
    run.balance_scale = static_cast<double>(batch.num_tokens()) / static_cast<double>(batches.global_tokens);
    if (fused) {
      run.apply_gradients = [&](const FlatBuffer& gradients) {
        squares.add_(optimizer.gradient_norm(gradients.elements).square_());
        optimizer.update(parameters.flat(), gradients.elements, gradients.begin, optimizer.gradient_scale(squares));
      };
    }
    const StepLoss loss = decoder.forward_backward(to_device(batch, decoder.device()), run);
    loss_sum.add_(loss.loss_sum);
    if (loss.balance_loss.defined()) balance_sum.add_(loss.balance_loss, run.balance_scale);
  }
  if (fused) {
    StepResult result = read_result(loss_sum, balance_sum, squares.sqrt(), batches.global_trained_tokens);
    result.partly_updated = !result.finite;
    return result;
  }
  std::vector<at::Tensor> gradients;
  for (const FlatBuffer& stage : parameters.gradients()) gradients.push_back(stage.elements);
  const at::Tensor norm = optimizer.gradient_norm(gradients);
  // A loss that is not finite makes the scale NaN, whatever the gradients are: nothing is updated then.
  const at::Tensor scale = optimizer.gradient_scale(norm).add_((loss_sum + balance_sum).mul_(0.0));
  for (const FlatBuffer& stage : parameters.gradients()) {
    optimizer.update(parameters.flat(), stage.elements, stage.begin, scale);
  }
  const StepResult result = read_result(loss_sum, balance_sum, norm, batches.global_trained_tokens);
  if (!result.finite) optimizer.cancel_step();
  return result;
}

EvalResult evaluate(const Decoder& decoder, Batches& batches) {
  EvalResult result;
  batches.seek(0, 0);
  const int64_t steps = batches.steps_per_epoch();
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(decoder.device()));
  for (int64_t step = 0; step < steps; ++step) {
    for (const TokenBatch& batch : batches.next().micro_batches) {
      if (batch.num_tokens() == 0) continue;
      loss_sum.add_(decoder.evaluate(to_device(batch, decoder.device())).loss_sum);
      result.num_trained_tokens += batch.num_trained_tokens;
    }
  }
  result.loss = loss_sum.item<double>() / std::max<double>(1.0, static_cast<double>(result.num_trained_tokens));
  return result;
}

}  // namespace headrace
