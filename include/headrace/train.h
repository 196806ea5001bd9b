// Training, for users of the library: load a model, open prepared data, train. The program `headrace finetune` is these calls.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "headrace/recipe.h"
#include "headrace/world.h"

namespace headrace {

struct LoadedModel;  // models/load_model.h

/// A model in memory: weights on the world's device, and what saving it as a Hugging Face folder needs. Movable.
class Model {
 public:
  explicit Model(std::unique_ptr<LoadedModel> parts);
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  int64_t num_parameters() const;
  std::string dtype() const;  // "float32" | "bfloat16"
  LoadedModel& parts() { return *parts_; }
  const LoadedModel& parts() const { return *parts_; }

 private:
  std::unique_ptr<LoadedModel> parts_;
};

/// Where a run continues: the checkpoint that recipe.checkpoint.restore_from means (`auto`: the latest of output_dir), or
/// nullopt.
std::optional<std::filesystem::path> find_resume(const Recipe& recipe);

/// Throws UserError when config.json of `folder` is not of a model that can be trained; reads nothing else.
void check_model_config(const std::filesystem::path& folder);

/// config.json + safetensors of `folder` -> weights. Throws UserError for everything wrong with the folder.
Model load_model(const Recipe& recipe, const std::filesystem::path& folder, const World& world);

struct TrainSummary {
  int64_t steps = 0;
  double first_loss = 0, last_loss = 0;                 // training loss of the first and last step
  std::optional<double> first_val_loss, last_val_loss;  // held-out loss before the first and after the last step
  std::filesystem::path checkpoint;                     // the last one written; empty when checkpoint.enabled is false
  bool stopped_by_signal = false;
};

/// Trains `model` on the token shards in `data_folder` (written by `headrace prepare`) as the recipe says, writing
/// training.jsonl, validation.jsonl and checkpoints to recipe.output_dir. With `resume`, continues from that checkpoint, from
/// which `model` must have been loaded: bit for bit as the unbroken run (on CPUs). Throws UserError: data that does not fit the
/// model, a step whose loss or gradient norm is not finite (recipe.nonfinite: stop), a checkpoint of another run.
/// `before_writing` is called once, when everything has been checked and output_dir is there, before the first file of the run
/// is written.
TrainSummary train(const Recipe& recipe, const World& world, Model& model, const std::filesystem::path& data_folder,
                   const std::optional<std::filesystem::path>& resume = std::nullopt,
                   const std::function<void()>& before_writing = {});

}  // namespace headrace
