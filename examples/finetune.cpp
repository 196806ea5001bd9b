// Fine-tuning from your own C++ program, with the public headers alone.
//   finetune_example recipe.yaml TOKEN_SHARDS      (TOKEN_SHARDS: the folder that `headrace prepare recipe.yaml` prints)
#include <headrace/error.h>
#include <headrace/recipe.h>
#include <headrace/train.h>
#include <headrace/world.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: finetune_example recipe.yaml TOKEN_SHARDS\n";
    return 2;
  }
  try {
    headrace::Recipe recipe = headrace::read_recipe(argv[1], {"output_dir=out/example"});
    const headrace::World world = headrace::World::from_environment(recipe.device, recipe.num_threads);
    recipe = headrace::resolve_for_world(recipe, world.size);

    headrace::Model model = headrace::load_model(recipe, recipe.model.pretrained_model_name_or_path, world);
    std::cout << model.num_parameters() << " parameters in " << model.dtype() << "\n";

    const headrace::TrainSummary summary = headrace::train(recipe, world, model, argv[2]);
    std::cout << "loss " << summary.first_loss << " -> " << summary.last_loss << ", saved " << summary.checkpoint.string()
              << "\n";
    return 0;
  } catch (const headrace::UserError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
