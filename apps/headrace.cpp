// headrace: the program. One function per command; each reads like the main path.
//   headrace finetune recipe.yaml [--a.b=value ...]     prepare the data, load the model, train, save
//   headrace prepare recipe.yaml [--a.b=value ...]      only the data
//   headrace info CHECKPOINT                            what a Hugging Face folder holds
//   headrace upcycle DENSE OUT --num-experts N --top-k K  a Mixture-of-Experts from a dense checkpoint
// Exit codes: 0 done (also after SIGTERM, with a checkpoint), 2 the user's fault, 1 a fault of ours.
#include <CLI/CLI.hpp>
#include <iostream>

#include "apps/info.h"
#include "base/file.h"
#include "base/log.h"
#include "checkpoint/upcycle.h"
#include "data/prepare.h"
#include "headrace/error.h"
#include "headrace/recipe.h"
#include "headrace/train.h"
#include "headrace/world.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;

// loss.png is a convenience: a failure to draw it must not fail a finished run.
void draw_loss(const Recipe& recipe, const PythonInterpreter& python) {
  try {
    run_python_module(python, "headrace.plot", {recipe.output_dir});
  } catch (const UserError& error) {
    log_warning(fmt::format("loss.png was not drawn: {}", error.what()));
  }
}

void print_what_next(const TrainSummary& summary, const PythonInterpreter& python) {
  if (summary.first_val_loss && summary.last_val_loss) {
    fmt::print("held-out loss {:.4f} -> {:.4f} in {} steps\n", *summary.first_val_loss, *summary.last_val_loss, summary.steps);
  }
  if (summary.checkpoint.empty()) return;
  fmt::print(
      "checkpoint: {0}\n"
      "Generate from it with transformers:\n"
      "  {1} -c \"\n"
      "from transformers import pipeline\n"
      "chat = pipeline('text-generation', '{0}')\n"
      "print(chat([{{'role': 'user', 'content': 'How do I copy a file in Python?'}}], "
      "max_new_tokens=80)[0]['generated_text'][-1])\"\n",
      summary.checkpoint.string(), python.executable);
}

void finetune(const std::string& recipe_path, const std::vector<std::string>& overrides) {
  Recipe recipe = read_recipe(recipe_path, overrides);
  require(recipe.distributed.nproc_per_node == 1,
          "distributed.nproc_per_node is {}, but this version trains on one process. Set it to 1.",
          recipe.distributed.nproc_per_node);
  const World world = World::from_environment(recipe.device, recipe.num_threads);
  recipe = resolve_for_world(std::move(recipe), world.size);
  const PythonInterpreter python = PythonInterpreter::recorded();
  const auto resume = find_resume(recipe);
  const fs::path model_path = resume.value_or(recipe.model.pretrained_model_name_or_path);
  check_model_config(model_path);  // before the data, which may take long
  const fs::path data = prepare_data(recipe, model_path, python);
  Model model = load_model(recipe, model_path, world);
  log_info(fmt::format("model {}: {:.1f} million parameters, {}, on {}", model_path.string(),
                       static_cast<double>(model.num_parameters()) / 1e6, model.dtype(), world.device.str()));
  const auto write_recipe = [&] { write_file_atomically(fs::path(recipe.output_dir) / "recipe.yaml", to_yaml(recipe)); };
  const TrainSummary summary = train(recipe, world, model, data, resume, write_recipe);
  draw_loss(recipe, python);
  print_what_next(summary, python);
}

void prepare(const std::string& recipe_path, const std::vector<std::string>& overrides) {
  const Recipe recipe = read_recipe(recipe_path, overrides);
  fmt::print("{}\n", prepare_data(recipe, recipe.model.pretrained_model_name_or_path, PythonInterpreter::recorded()).string());
}

int run(int argc, char** argv) {
  CLI::App app("Fine-tunes Mixture-of-Experts transformers from Hugging Face checkpoints.", "headrace");
  app.require_subcommand(1);

  std::string recipe_path;
  const auto recipe_command = [&](const char* name, const char* text) {
    CLI::App* command = app.add_subcommand(name, text);
    command->add_option("recipe", recipe_path, "YAML file; docs/recipe.md lists the keys")->required();
    command->allow_extras();  // --a.b=value and --a.b value: checked by the recipe reader, which knows the keys
    command->footer("Any recipe key can be given on top: --optimizer.lr=1e-5 --max_steps=100");
    return command;
  };
  CLI::App* finetune_command = recipe_command("finetune", "prepare the data, load the model, train, save");
  CLI::App* prepare_command = recipe_command("prepare", "only turn the dataset into token shards; prints their folder");

  fs::path folder;
  CLI::App* info_command = app.add_subcommand("info", "what a Hugging Face checkpoint folder holds");
  info_command->add_option("checkpoint", folder, "folder with config.json and safetensors files")->required();

  fs::path dense, out;
  UpcycleSettings upcycle_settings;
  CLI::App* upcycle_command =
      app.add_subcommand("upcycle", "a Mixture-of-Experts checkpoint from a dense one (llama, mistral, qwen3)");
  upcycle_command->add_option("dense", dense, "folder of the dense checkpoint")->required();
  upcycle_command->add_option("out", out, "folder to write; must not exist")->required();
  upcycle_command->add_option("--num-experts", upcycle_settings.num_experts, "copies of each MLP")->capture_default_str();
  upcycle_command->add_option("--top-k", upcycle_settings.top_k, "experts per token")->capture_default_str();
  upcycle_command->add_option("--seed", upcycle_settings.seed, "of the routers' random weights")->capture_default_str();

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (finetune_command->parsed()) finetune(recipe_path, overrides_of_arguments(finetune_command->remaining()));
  if (prepare_command->parsed()) prepare(recipe_path, overrides_of_arguments(prepare_command->remaining()));
  if (info_command->parsed()) print_info(folder, std::cout);
  if (upcycle_command->parsed()) upcycle(dense, out, upcycle_settings);
  return 0;
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  try {
    return headrace::run(argc, argv);
  } catch (const headrace::ReportedError&) {
    return 2;
  } catch (const headrace::UserError& error) {
    std::cerr << "headrace: " << error.what() << "\n";
    return 2;
  } catch (const std::filesystem::filesystem_error& error) {  // a folder that cannot be made, read or removed
    std::cerr << "headrace: " << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "headrace: internal error: " << error.what() << "\n";
    return 1;
  }
}
