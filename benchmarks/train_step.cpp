// Benchmark of one full fine-tuning step: forward, backward and optimizer on random tokens, as one JSON line on standard
// output.
//   train_step --shape qwen3_30b_a3b --layers 8 --micro-batch 4 --seq 4096 --dtype bfloat16
// tokens_per_s_per_gpu is from whole steps, timed one by one (median) with the device idle before and after each. The phases
// are from further steps that also wait between phases; the forward includes the loss head's gradient (see
// linear_cross_entropy.h). The peer prints the same line: benchmarks/peers/transformers_v5.py. Both in one run:
// benchmarks/compare.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randint.h>

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
  std::string shapes = HEADRACE_SHAPES, shape = "tiny_qwen3_moe", dtype = "float32", recompute = "none", device = "auto";
  int64_t layers = 0, micro_batch = 1, seq = 512, warmup = 2, steps = 5, threads = 0;
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

// micro_batch rows of seq random tokens, each a document; every position but the last of a row is trained, as labels =
// input_ids gives.
TokenBatch random_batch(const Options& options, int64_t vocab_size) {
  TokenBatch batch;
  const int64_t tokens = options.micro_batch * options.seq;
  batch.input_ids = at::randint(vocab_size, {tokens}, at::kLong);
  const at::Tensor rows = batch.input_ids.view({options.micro_batch, options.seq});
  at::Tensor targets = at::full_like(rows, -100);
  targets.narrow(1, 0, options.seq - 1).copy_(rows.narrow(1, 1, options.seq - 1));
  batch.targets = targets.view({tokens});
  batch.position_ids = at::arange(options.seq, at::kLong).repeat({options.micro_batch});
  batch.cu_seqlens = at::arange(0, tokens + 1, options.seq, at::kInt);
  for (int64_t row = 0; row <= options.micro_batch; ++row) batch.document_bounds.push_back(row * options.seq);
  batch.max_document_length = options.seq;
  batch.num_trained_tokens = options.micro_batch * (options.seq - 1);
  return batch;
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
  decoder.parameters().allocate_gradients();
  OptimizerSection settings;
  settings.max_grad_norm = 0;
  AdamW optimizer = make_optimizer(decoder, settings, options.seed);
  const TokenBatch batch = to_device(random_batch(options, spec.vocab_size), world.device);
  const Recompute recompute = options.recompute == "full"        ? Recompute::full
                              : options.recompute == "selective" ? Recompute::selective
                                                                 : Recompute::none;
  reset_peak_memory(world.device);

  double loss = 0, forward_ms = 0, backward_ms = 0, optimizer_ms = 0;
  const auto step = [&](bool phases) {
    const auto now = [&] {
      if (phases) synchronize_device(world.device);
      return Clock::now();
    };
    decoder.parameters().zero_gradients(/*experts=*/false);
    auto begin = now();
    DecoderRun decoder_run;
    decoder_run.recompute = recompute;
    decoder_run.first_micro_batch = true;
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
    optimizer.step(decoder.parameters().flat(), decoder.parameters().flat_grad(), step_loss.loss_sum, 1e-5);
    if (phases) synchronize_device(world.device), optimizer_ms = milliseconds_since(begin);
    return step_loss.loss_sum;
  };

  std::vector<double> whole, forward, backward, update;
  for (int64_t i = 0; i < options.warmup; ++i) step(false);
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
                     {"fused_backward", false},
                     {"routing", "model"},
                     {"tokens_per_s_per_gpu", std::lround(static_cast<double>(batch.num_tokens()) / median(whole) * 1000.0)},
                     {"step_ms", rounded(median(whole), 2)},
                     {"fwd_ms", rounded(median(forward), 2)},
                     {"bwd_ms", rounded(median(backward), 2)},
                     {"opt_ms", rounded(median(update), 2)},
                     {"peak_gib", rounded(peak_memory_gib(world.device), 2)},
                     {"device_gib", rounded(device_memory_gib(world.device), 2)},
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
