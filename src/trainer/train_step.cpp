#include "trainer/train_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

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

StepResult train_step(Decoder& decoder, AdamW& optimizer, const StepBatches& batches, Recompute recompute, double lr) {
  decoder.parameters().allocate_gradients();
  decoder.parameters().zero_gradients(/*experts=*/false);
  bool first = true;
  const auto float_options = at::TensorOptions().dtype(at::kFloat).device(decoder.device());
  at::Tensor loss_sum = at::zeros({}, float_options), balance_sum = at::zeros({}, float_options);
  for (const TokenBatch& batch : batches.micro_batches) {
    if (batch.num_tokens() == 0) continue;
    DecoderRun run;
    run.recompute = recompute;
    run.grad_scale = batches.global_trained_tokens > 0 ? 1.0 / static_cast<double>(batches.global_trained_tokens) : 0.0;
    run.balance_scale = static_cast<double>(batch.num_tokens()) / static_cast<double>(batches.global_tokens);
    run.first_micro_batch = std::exchange(first, false);
    const StepLoss loss = decoder.forward_backward(to_device(batch, decoder.device()), run);
    loss_sum.add_(loss.loss_sum);
    if (loss.balance_loss.defined()) balance_sum.add_(loss.balance_loss, run.balance_scale);
  }
  if (first) decoder.parameters().zero_gradients();  // no micro-batch ran
  const at::Tensor norm = optimizer.gradient_norm(decoder.parameters().flat_grad());

  StepResult result;
  const double trained = std::max<double>(1.0, static_cast<double>(batches.global_trained_tokens));
  result.balance_loss = balance_sum.item<double>();
  result.loss = loss_sum.item<double>() / trained;
  result.grad_norm = norm.item<double>();
  result.finite = std::isfinite(result.loss) && std::isfinite(result.balance_loss) && std::isfinite(result.grad_norm);
  if (result.finite) optimizer.step(decoder.parameters().flat(), decoder.parameters().flat_grad(), norm, lr);
  return result;
}

EvalResult evaluate(const Decoder& decoder, Batches& batches) {
  EvalResult result;
  batches.seek(0, 0);
  const int64_t steps = batches.steps_per_epoch();
  double loss_sum = 0;
  for (int64_t step = 0; step < steps; ++step) {
    for (const TokenBatch& batch : batches.next().micro_batches) {
      if (batch.num_tokens() == 0) continue;
      loss_sum += decoder.evaluate(to_device(batch, decoder.device())).loss_sum.item<double>();
      result.num_trained_tokens += batch.num_trained_tokens;
    }
  }
  result.loss = loss_sum / std::max<double>(1.0, static_cast<double>(result.num_trained_tokens));
  return result;
}

}  // namespace headrace
