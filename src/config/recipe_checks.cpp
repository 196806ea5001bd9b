#include "config/recipe_checks.h"

#include <cmath>

#include "headrace/error.h"

namespace headrace {
namespace {

void check_data(const Recipe& recipe, const std::string& origin) {
  require(!recipe.model.pretrained_model_name_or_path.empty(),
          "{}: model.pretrained_model_name_or_path is missing; give the folder of a Hugging Face checkpoint", origin);
  require(!recipe.dataset.path.empty(), "{}: dataset.path is missing; give a json or jsonl file or a list of them", origin);
  for (const auto* section : {&recipe.dataset, &recipe.validation_dataset}) {
    const char* name = section == &recipe.dataset ? "dataset" : "validation_dataset";
    for (const std::string& path : section->path)
      require(!path.empty(), "{}: {}.path holds an empty name; give a file", origin, name);
    require(section->split.empty(),
            "{}: {}.split is \"{}\", but data sets of the hub are not supported yet; give files in {}.path and remove it",
            origin, name, section->split, name);
  }
  const bool has_validation = !recipe.validation_dataset.path.empty();
  require(!(has_validation && recipe.val_set_size > 0),
          "{}: both validation_dataset and val_set_size ({}) say where the validation data comes from; remove one", origin,
          recipe.val_set_size);
  require(recipe.val_set_size < 1 || recipe.val_set_size == std::floor(recipe.val_set_size),
          "{}: val_set_size is {}, but from 1 on it is a count of records: a whole number (or a share below 1)", origin,
          recipe.val_set_size);
  require(
      recipe.step_scheduler.val_every_steps == 0 || has_validation || recipe.val_set_size > 0,
      "{}: step_scheduler.val_every_steps is {}, but there is no validation data; give validation_dataset.path or val_set_size",
      origin, recipe.step_scheduler.val_every_steps);
  require(!recipe.output_dir.empty(), "{}: output_dir is empty; give a folder", origin);
}

void check_steps(const StepSchedulerSection& steps, const std::string& origin) {
  require(steps.max_steps > 0 || steps.num_epochs > 0,
          "{}: the run has no length: num_epochs is {} and max_steps is {}; one of them must be above 0", origin,
          steps.num_epochs, steps.max_steps);
  require(steps.global_batch_size > 0 || steps.gradient_accumulation_steps > 0,
          "{}: step_scheduler.global_batch_size and gradient_accumulation_steps are both 0; give one of them", origin);
  // The rest of this rule needs the number of ranks: resolve_for_world.
  const int64_t part = steps.local_batch_size * std::max<int64_t>(1, steps.gradient_accumulation_steps);
  require(steps.global_batch_size % part == 0,
          "{}: step_scheduler.global_batch_size is {}, but it must be a multiple of local_batch_size ({}){}; try {}", origin,
          steps.global_batch_size, steps.local_batch_size,
          steps.gradient_accumulation_steps > 0
              ? fmt::format(" times gradient_accumulation_steps ({})", steps.gradient_accumulation_steps)
              : "",
          (steps.global_batch_size / part + 1) * part);
}

void check_schedule(const Recipe& recipe, const std::string& origin) {
  const LrSchedulerSection& schedule = recipe.lr_scheduler;
  require(schedule.warmup_steps < 1 || schedule.warmup_steps == std::floor(schedule.warmup_steps),
          "{}: lr_scheduler.warmup_steps is {}, but from 1 on it is a number of steps: a whole number (or a share below 1)",
          origin, schedule.warmup_steps);
  require(
      schedule.type != "constant" || schedule.warmup_steps == 0,
      "{}: lr_scheduler.type is constant, which has no warm-up, but warmup_steps is {}; use constant_with_warmup or remove it",
      origin, schedule.warmup_steps);
  require(schedule.min_lr <= recipe.optimizer.lr, "{}: lr_scheduler.min_lr is {}, but it must be at most optimizer.lr ({})",
          origin, schedule.min_lr, recipe.optimizer.lr);
}

// A gradient that is applied at once can neither wait for others of its step nor for the global norm.
void check_fused_backward(const Recipe& recipe, const std::string& origin) {
  if (!recipe.optimizer.fused_backward) return;
  require(
      recipe.optimizer.max_grad_norm == 0,
      "{}: optimizer.fused_backward updates each layer before the global gradient norm is known, but optimizer.max_grad_norm "
      "is {}; set max_grad_norm to 0, or leave fused_backward out",
      origin, recipe.optimizer.max_grad_norm);
  require(recipe.nonfinite == "stop",
          "{}: optimizer.fused_backward finds a gradient that is not finite after other layers were updated, so such a step "
          "cannot be skipped; set nonfinite to stop, or leave fused_backward out",
          origin);
}

}  // namespace

void check_recipe(const Recipe& recipe, const std::string& origin) {
  check_data(recipe, origin);
  check_steps(recipe.step_scheduler, origin);
  check_schedule(recipe, origin);
  check_fused_backward(recipe, origin);
}

Recipe resolve_for_world(Recipe recipe, int64_t world_size) {
  check_argument(world_size > 0, "resolve_for_world: world_size is {}, but it must be above 0", world_size);
  StepSchedulerSection& steps = recipe.step_scheduler;
  const int64_t rows_at_once = steps.local_batch_size * world_size;
  if (steps.gradient_accumulation_steps > 0) {
    const int64_t product = rows_at_once * steps.gradient_accumulation_steps;
    require(steps.global_batch_size == 0 || steps.global_batch_size == product,
            "step_scheduler.global_batch_size is {}, but local_batch_size ({}) times gradient_accumulation_steps ({}) times {} "
            "ranks is {}; "
            "remove one of global_batch_size and gradient_accumulation_steps",
            steps.global_batch_size, steps.local_batch_size, steps.gradient_accumulation_steps, world_size, product);
    steps.global_batch_size = product;
    steps.gradient_accumulation_steps = 0;
  }
  require(steps.global_batch_size > 0 && steps.global_batch_size % rows_at_once == 0,
          "step_scheduler.global_batch_size is {}, but it must be a multiple of local_batch_size ({}) times {} ranks; try {}",
          steps.global_batch_size, steps.local_batch_size, world_size,
          (steps.global_batch_size / rows_at_once + 1) * rows_at_once);
  require(!recipe.optimizer.fused_backward || steps.global_batch_size == rows_at_once,
          "optimizer.fused_backward cannot accumulate gradients, but step_scheduler.global_batch_size ({}) is {} times "
          "local_batch_size ({}) times {} ranks; make them equal, or leave fused_backward out",
          steps.global_batch_size, steps.global_batch_size / rows_at_once, steps.local_batch_size, world_size);
  require(world_size % recipe.distributed.ep_size == 0,
          "distributed.ep_size is {}, but it must divide the number of ranks ({})", recipe.distributed.ep_size, world_size);
  return recipe;
}

}  // namespace headrace
