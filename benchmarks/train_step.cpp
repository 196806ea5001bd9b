// Benchmark of one full fine-tuning step: forward, backward and optimizer on random tokens, as one JSON line on standard
// output.
//   train_step --shape qwen3_30b_a3b --layers 8 --micro-batch 4 --seq 4096 --dtype bfloat16
// tokens_per_s_per_gpu is from whole steps, timed one by one (median) with the device idle before and after each. The phases
// are from further steps that also wait between phases; the forward includes the loss head's gradient (see
// linear_cross_entropy.h). The peer prints the same line: benchmarks/peers/transformers_v5.py. Both in one run:
// benchmarks/compare.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>

#include "base/json.h"
#include "headrace/error.h"
#include "headrace/world.h"
#include "models/load_model.h"
#include "trainer/memory.h"
#include "trainer/train_step.h"

namespace headrace {
namespace {

struct Options {
  std::string shapes = HEADRACE_SHAPES, shape = "tiny_qwen3_moe", dtype = "float32", recompute = "none", device = "auto",
              routing = "model";
  int64_t layers = 0, micro_batch = 1, seq = 512, documents = 0, warmup = 2, steps = 5, threads = 0;
  bool fused_backward = false;
  uint64_t seed = 0;
};

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.at(values.size() / 2);
}

// Lengths of the documents of all rows: whole rows, or about `documents` tokens each. The same numbers in the peer
// (document_lengths in benchmarks/peers/transformers_v5.py): quantiles of the exponential distribution in a scattered order.
std::vector<int64_t> document_lengths(const Options& options) {
  if (options.documents == 0) return std::vector<int64_t>(static_cast<std::size_t>(options.micro_batch), options.seq);
  std::vector<int64_t> lengths;
  double u = 0;
  for (int64_t row = 0; row < options.micro_batch; ++row) {
    for (int64_t left = options.seq; left > 0; left -= lengths.back()) {
      u = std::fmod(u + 0.6180339887498949, 1.0);
      const auto length = static_cast<int64_t>(-static_cast<double>(options.documents) * std::log(1.0 - u));
      lengths.push_back(std::clamp<int64_t>(length, 2, std::max<int64_t>(left, 2)));
      if (left - lengths.back() == 1) ++lengths.back();  // a document of one token trains nothing
    }
  }
  return lengths;
}

// Random tokens; every position but the last of a document is trained, as labels = input_ids gives.
TokenBatch random_batch(const Options& options, int64_t vocab_size) {
  TokenBatch batch;
  const int64_t tokens = options.micro_batch * options.seq;
  batch.input_ids = at::randint(vocab_size, {tokens}, at::kLong);
  batch.targets = batch.input_ids.roll(-1);
  batch.document_bounds = {0};
  std::vector<at::Tensor> positions;
  for (const int64_t length : document_lengths(options)) {
    batch.document_bounds.push_back(batch.document_bounds.back() + length);
    batch.max_document_length = std::max(batch.max_document_length, length);
    batch.targets[batch.document_bounds.back() - 1] = -100;
    batch.num_trained_tokens += length - 1;
    positions.push_back(at::arange(length, at::kLong));
  }
  batch.position_ids = at::cat(positions);
  batch.cu_seqlens = at::tensor(batch.document_bounds, at::kLong).to(at::kInt);
  return batch;
}

// Multiplies the router's rows by a ramp that makes the busiest of 128 experts get 4 times the mean; as the peer does.
void skew_routing(const Decoder& decoder) {
  for (const ParameterInfo& info : decoder.parameters().layout().entries()) {
    if (!info.name.ends_with("mlp.gate.weight")) continue;
    const at::Tensor weight = decoder.parameters().weight(info.name);
    const auto experts = static_cast<double>(weight.size(0));
    const at::Tensor ramp = at::arange(weight.size(0), weight.options().dtype(at::kFloat)).div(experts - 1.0).pow(8);
    weight.mul_(ramp.mul(1.75).add(1.0).unsqueeze(1).to(weight.scalar_type()));
  }
}

// Rows of the busiest expert over the mean, the mean of all layers, on the batch's first tokens. 0 without experts.
double busiest_over_mean(const Decoder& decoder, const TokenBatch& batch) {
  if (decoder.spec().num_experts() == 0) return 0;
  const int64_t tokens = batch.document_bounds.at(1);
  TokenBatch first;
  first.input_ids = batch.input_ids.narrow(0, 0, tokens), first.targets = batch.targets.narrow(0, 0, tokens);
  first.position_ids = batch.position_ids.narrow(0, 0, tokens), first.cu_seqlens = batch.cu_seqlens.narrow(0, 0, 2);
  first.document_bounds = {0, tokens}, first.max_document_length = tokens;
  std::vector<at::Tensor> router_logits;
  decoder.logits(first, &router_logits);
  double sum = 0, layers = 0;
  for (std::size_t n = 0; n < decoder.spec().layers.size(); ++n) {
    if (!decoder.spec().layers[n].is_moe()) continue;
    const at::Tensor ids =
        std::get<1>(router_logits.at(static_cast<std::size_t>(layers)).topk(decoder.spec().layers[n].moe().router.top_k));
    const at::Tensor counts = at::bincount(ids.flatten(), {}, decoder.spec().num_experts()).to(at::kDouble);
    sum += (counts.max() / counts.mean()).item<double>();
    layers += 1;
  }
  return sum / layers;
}

void run(const Options& options) {
  const World world = World::from_environment(options.device, options.threads);
  Json config = read_json_file(options.shapes).value(options.shape, Json());
  require(!config.is_null(), "there is no shape \"{}\" in {}", options.shape, options.shapes);
  if (options.layers > 0) config["num_hidden_layers"] = options.layers;
  const ModelConfig model_config(config, options.shape);
  DecoderSpec spec = find_family(model_config).spec(model_config);
  at::manual_seed(options.seed);
  Decoder decoder(spec, scalar_type_of(options.dtype, "--dtype"), world.device);
  initialize_parameters(decoder.spec(), decoder.parameters());
  if (options.routing == "skewed") skew_routing(decoder);
  OptimizerSection settings;
  settings.max_grad_norm = 0;
  AdamW optimizer = make_optimizer(decoder, settings, options.seed);
  const TokenBatch batch = to_device(random_batch(options, spec.vocab_size), world.device);
  const Recompute recompute = options.recompute == "full"        ? Recompute::full
                              : options.recompute == "selective" ? Recompute::selective
                                                                 : Recompute::none;
  const double busiest = busiest_over_mean(decoder, batch);
  release_cached_memory(world.device);
  reset_peak_memory(world.device);

  double loss = 0, forward_ms = 0, backward_ms = 0, optimizer_ms = 0;
  const auto step = [&](bool phases) {
    const auto now = [&] {
      if (phases) synchronize_device(world.device);
      return Clock::now();
    };
    decoder.parameters().release_gradients();
    auto begin = now();
    optimizer.begin_step(1e-5);
    DecoderRun decoder_run;
    if (options.fused_backward) {
      decoder_run.apply_gradients = [&](const FlatBuffer& gradients) {
        const at::Tensor scale = optimizer.gradient_scale(optimizer.gradient_norm(gradients.elements));
        optimizer.update(decoder.parameters().flat(), gradients.elements, gradients.begin, scale);
      };
    }
    decoder_run.recompute = recompute;
    decoder_run.grad_scale = 1.0 / static_cast<double>(batch.num_trained_tokens);
    decoder_run.after_forward = [&] {
      if (!phases) return;
      synchronize_device(world.device);
      forward_ms = milliseconds_since(begin);
      begin = Clock::now();
    };
    const StepLoss step_loss = decoder.forward_backward(batch, decoder_run);
    if (phases) synchronize_device(world.device), backward_ms = milliseconds_since(begin);
    begin = now();
    const at::Tensor scale = optimizer.gradient_scale(step_loss.loss_sum);
    for (const FlatBuffer& stage : decoder.parameters().gradients()) {  // none are left with fused_backward
      optimizer.update(decoder.parameters().flat(), stage.elements, stage.begin, scale);
    }
    if (phases) synchronize_device(world.device), optimizer_ms = milliseconds_since(begin);
    return step_loss.loss_sum;
  };

  std::vector<double> whole, forward, backward, update;
  double first_loss = 0;  // of untrained weights: both systems start from the same distribution
  for (int64_t i = 0; i < options.warmup; ++i) {
    const at::Tensor loss_sum = step(false);
    if (i == 0) first_loss = loss_sum.item<double>() / static_cast<double>(batch.num_trained_tokens);
  }
  for (int64_t i = 0; i < options.steps; ++i) {
    synchronize_device(world.device);
    const auto begin = Clock::now();
    const at::Tensor loss_sum = step(false);
    synchronize_device(world.device);
    whole.push_back(milliseconds_since(begin));
    loss = loss_sum.item<double>() / static_cast<double>(batch.num_trained_tokens);
  }
  for (int64_t i = 0; i < options.steps; ++i) {
    step(true);
    forward.push_back(forward_ms), backward.push_back(backward_ms), update.push_back(optimizer_ms);
  }

  const auto rounded = [](double value, double digits) {
    return std::round(value * std::pow(10.0, digits)) / std::pow(10.0, digits);
  };
  const Json line = {{"system", "headrace"},
                     {"shape", options.shape},
                     {"layers", static_cast<int64_t>(spec.layers.size())},
                     {"world", world.size},
                     {"ep_size", 1},
                     {"micro_batch", options.micro_batch},
                     {"seq", options.seq},
                     {"dtype", options.dtype},
                     {"recompute", options.recompute},
                     {"fused_backward", options.fused_backward},
                     {"routing", options.routing},
                     {"busiest_over_mean", rounded(busiest, 2)},
                     {"num_documents", static_cast<int64_t>(batch.document_bounds.size()) - 1},
                     {"num_trained_tokens", batch.num_trained_tokens},
                     {"tokens_per_s_per_gpu", std::lround(static_cast<double>(batch.num_tokens()) / median(whole) * 1000.0)},
                     {"step_ms", rounded(median(whole), 2)},
                     {"fwd_ms", rounded(median(forward), 2)},
                     {"bwd_ms", rounded(median(backward), 2)},
                     {"opt_ms", rounded(median(update), 2)},
                     {"peak_gib", rounded(peak_memory_gib(world.device), 2)},
                     {"device_gib", rounded(device_memory_gib(world.device), 2)},
                     {"first_loss", rounded(first_loss, 4)},
                     {"loss", rounded(loss, 4)}};
  std::cout << line.dump() << "\n";
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  headrace::Options options;
  CLI::App app("One full training step, measured; prints one JSON line.");
  app.add_option("--shapes", options.shapes, "file of shapes");
  app.add_option("--shape", options.shape, "name in the file of shapes");
  app.add_option("--layers", options.layers, "decoder layers; 0 = the shape's own");
  app.add_option("--micro-batch", options.micro_batch, "rows");
  app.add_option("--seq", options.seq, "tokens a row");
  app.add_option("--dtype", options.dtype, "float32 | bfloat16");
  app.add_option("--recompute", options.recompute, "none | selective | full");
  app.add_option("--routing", options.routing, "model: the router as initialised | skewed: its busiest expert gets 4x the mean")
      ->check(CLI::IsMember({"model", "skewed"}));
  app.add_option("--documents", options.documents, "mean tokens of the documents packed into a row; 0 = a document a row");
  app.add_flag("--fused-backward", options.fused_backward, "apply each layer's gradients during the backward");
  app.add_option("--device", options.device, "auto | cpu | cuda");
  app.add_option("--threads", options.threads, "CPU threads; 0 = all");
  app.add_option("--warmup", options.warmup, "untimed steps");
  app.add_option("--steps", options.steps, "timed steps");
  CLI11_PARSE(app, argc, argv);
  try {
    headrace::run(options);
    return 0;
  } catch (const headrace::UserError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
