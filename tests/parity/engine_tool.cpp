// Runs the engine on a checkpoint and a batch for the comparison with transformers (tests/parity/test_parity.py).
//   engine_tool CHECKPOINT BATCH.safetensors OUT.safetensors DTYPE RECOMPUTE [STEPS LR WEIGHT_DECAY MAX_GRAD_NORM]
// BATCH: input_ids, targets, position_ids I64 [num_tokens], bounds I64 [num_documents + 1]; the same once more per further
// micro-batch as input_ids.1 and so on. OUT: logits, router_logits.N, loss, balance_loss, grad.<parameter>; with STEPS also
// losses [STEPS].
#include <ATen/ATen.h>

#include <iostream>

#include "headrace/error.h"
#include "models/load_model.h"
#include "trainer/train_step.h"

namespace headrace {
namespace {

at::Tensor read_tensor(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* info = file.find(name);
  require(info != nullptr, "{} has no {}", file.path().string(), name);
  return at::from_blob(const_cast<std::byte*>(file.bytes(*info).data()), info->shape, *scalar_type(info->dtype)).clone();
}

TokenBatch read_batch(const SafetensorsFile& file, const std::string& suffix) {
  TokenBatch batch;
  batch.input_ids = read_tensor(file, "input_ids" + suffix);
  batch.targets = read_tensor(file, "targets" + suffix);
  batch.position_ids = read_tensor(file, "position_ids" + suffix);
  const at::Tensor bounds = read_tensor(file, "bounds" + suffix);
  batch.cu_seqlens = bounds.to(at::kInt);
  batch.document_bounds.assign(bounds.const_data_ptr<int64_t>(), bounds.const_data_ptr<int64_t>() + bounds.size(0));
  batch.max_document_length = bounds.diff().max().item<int64_t>();
  batch.num_trained_tokens = batch.targets.ne(-100).sum().item<int64_t>();
  return batch;
}

StepBatches read_step(const std::string& path) {
  const SafetensorsFile file(path);
  StepBatches step;
  for (int i = 0; i == 0 || file.find("input_ids." + std::to_string(i)) != nullptr; ++i) {
    step.micro_batches.push_back(read_batch(file, i == 0 ? "" : "." + std::to_string(i)));
    step.global_tokens += step.micro_batches.back().num_tokens();
    step.global_trained_tokens += step.micro_batches.back().num_trained_tokens;
  }
  return step;
}

void run(const std::vector<std::string>& args) {
  LoadedModel model = load_model(args[0], {args[3], {}, {}}, at::kCPU);
  Decoder& decoder = model.decoder;
  const StepBatches step = read_step(args[1]);
  const Recompute recompute = args[4] == "full"        ? Recompute::full
                              : args[4] == "selective" ? Recompute::selective
                                                       : Recompute::none;

  std::map<std::string, at::Tensor> out;
  std::vector<at::Tensor> router_logits;
  out["logits"] = decoder.logits(step.micro_batches[0], &router_logits);
  for (std::size_t n = 0; n < router_logits.size(); ++n) out["router_logits." + std::to_string(n)] = router_logits[n];

  OptimizerSection settings;
  settings.lr = args.size() > 5 ? std::stod(args[6]) : 0.0;
  settings.weight_decay = args.size() > 5 ? std::stod(args[7]) : 0.0;
  settings.max_grad_norm = args.size() > 5 ? std::stod(args[8]) : 0.0;
  settings.stochastic_rounding = "false";
  AdamW optimizer = make_optimizer(decoder, settings, /*seed=*/1);
  std::vector<double> losses;
  const int64_t steps = args.size() > 5 ? std::stol(args[5]) : 1;
  for (int64_t i = 0; i < steps; ++i) {
    const StepResult result = train_step(decoder, optimizer, step, recompute, settings.lr);
    require(result.finite, "step {} is not finite", i);
    const double balance = decoder.spec().router_aux_loss_coef * result.balance_loss;
    losses.push_back(result.loss + balance);  // transformers' loss holds both
    if (i > 0) continue;
    out["loss"] = at::scalar_tensor(losses[0], at::kDouble);
    out["balance_loss"] = at::scalar_tensor(result.balance_loss, at::kDouble);
    out["grad_norm"] = at::scalar_tensor(result.grad_norm, at::kDouble);
    for (const ParameterInfo& info : decoder.parameters().layout().entries()) {
      out["grad." + info.name] = decoder.parameters().grad(info.name).clone();
    }
  }
  out["losses"] = at::tensor(losses, at::kDouble);

  std::vector<TensorToWrite> tensors;
  for (const auto& [name, value] : out) {
    tensors.push_back(
        {name, safetensors_dtype(value.scalar_type()), value.sizes().vec(), [t = value.contiguous()](const auto& sink) {
           sink({static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()});
         }});
  }
  write_safetensors(args[2], std::move(tensors));
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  try {
    headrace::run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
