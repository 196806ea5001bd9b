// The training loop, in reading order: open the data, settle the number of steps, restore, then step, validate and save.
// Flow: Model + token shards -> [train] -> checkpoints and logs. One step: trainer/train_step.cpp.
#include "headrace/train.h"

#include <chrono>
#include <ctime>

#include "base/file.h"
#include "base/log.h"
#include "base/stop_signal.h"
#include "data/batches.h"
#include "headrace/error.h"
#include "optim/schedule.h"
#include "trainer/memory.h"
#include "trainer/metrics.h"
#include "trainer/progress.h"
#include "trainer/schedule_plan.h"
#include "trainer/train_state.h"
#include "trainer/train_step.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;

BatchSettings batch_settings(const Recipe& recipe, const World& world) {
  BatchSettings settings;
  settings.sequence_length = recipe.packed_sequence.packed_sequence_size;
  settings.pack = recipe.packed_sequence.packing;
  settings.local_batch_size = recipe.step_scheduler.local_batch_size;
  settings.global_batch_size = recipe.step_scheduler.global_batch_size;
  settings.shuffle = recipe.shuffle;
  settings.seed = recipe.seed;
  settings.rank = world.rank;
  settings.world_size = world.size;
  return settings;
}

Recompute recompute_policy(const Recipe& recipe) {
  const std::string& name = recipe.distributed.activation_checkpointing;
  return name == "full" ? Recompute::full : name == "selective" ? Recompute::selective : Recompute::none;
}

RunIdentity run_identity(const Recipe& recipe, const TokenShards& shards) {
  return {shards.digest(),
          recipe.seed,
          recipe.packed_sequence.packed_sequence_size,
          recipe.step_scheduler.global_batch_size,
          recipe.packed_sequence.packing,
          recipe.shuffle};
}

// The held-out split, where the prepared data has one.
struct Validation {
  std::optional<TokenShards> shards;
  std::optional<Batches> batches;
};

void open_validation(Validation& validation, const Recipe& recipe, const World& world, const fs::path& data_folder) {
  if (recipe.validation_dataset.path.empty() && recipe.val_set_size == 0) return;
  validation.shards.emplace(data_folder, "validation");
  BatchSettings settings = batch_settings(recipe, world);
  settings.shuffle = false;
  settings.global_batch_size = settings.local_batch_size * world.size;
  validation.batches.emplace(*validation.shards, settings);
}

void require_fitting_vocabulary(const TokenShards& shards, const Decoder& decoder, const fs::path& data_folder) {
  require(
      shards.vocab_size() <= decoder.spec().vocab_size,
      "{} was tokenised with {} token ids, but the model's vocabulary has {}. Prepare the data with this model's tokenizer.",
      data_folder.string(), shards.vocab_size(), decoder.spec().vocab_size);
}

// One run, step by step.
class Run {
 public:
  Run(const Recipe& recipe, const World& world, LoadedModel& model, const fs::path& data_folder)
      : recipe_(recipe),
        model_(model),
        shards_(data_folder, "train"),
        batches_(shards_, batch_settings(recipe, world)),
        identity_(run_identity(recipe, shards_)),
        optimizer_(make_optimizer(model.decoder, recipe.optimizer, recipe.seed)),
        plan_(make_schedule_plan(recipe.step_scheduler, [this](int64_t epoch) { return batches_.steps_in_epoch(epoch); })),
        schedule_(make_lr_schedule(recipe.lr_scheduler, recipe.optimizer.lr, plan_.total_steps)) {
    require_fitting_vocabulary(shards_, model.decoder, data_folder);
    open_validation(validation_, recipe, world, data_folder);
  }

  TrainSummary train(const std::optional<fs::path>& resume, const std::function<void()>& before_writing) {
    if (resume) restore(*resume);
    // From here on the run writes; a run that was refused has left its output_dir as it was.
    create_folder(recipe_.output_dir);
    if (before_writing) before_writing();
    if (!resume && find_resume_checkpoint("auto", recipe_.output_dir)) {
      log_warning(
          fmt::format("{} holds checkpoints of an earlier run, which this new run will replace step by step; "
                      "--resume_from_checkpoint auto goes on with the earlier one",
                      recipe_.output_dir));
    }
    const auto kept = resume ? std::optional(position_.step) : std::nullopt;
    training_log_.emplace(fs::path(recipe_.output_dir) / "training.jsonl", kept);
    validation_log_.emplace(fs::path(recipe_.output_dir) / "validation.jsonl", kept);
    log_info(fmt::format("{} steps of {} rows of up to {} tokens; {} steps an epoch", plan_.total_steps,
                         recipe_.step_scheduler.global_batch_size, recipe_.packed_sequence.packed_sequence_size,
                         batches_.steps_per_epoch()));
    const StopSignal stop;
    TrainSummary summary;
    if (position_.step == 0) summary.first_val_loss = validate();
    begin_ = Clock::now();
    while (position_.step < plan_.total_steps && stop.received() == 0) {
      const double loss = step();
      if (summary.steps++ == 0) summary.first_loss = loss;
      summary.last_loss = loss;
      if (plan_.is_validation_due(position_.step)) summary.last_val_loss = validate();
      if (plan_.is_checkpoint_due(position_.step)) summary.checkpoint = save();
    }
    if (stop.received() != 0 && position_.step < plan_.total_steps) {
      summary.stopped_by_signal = true;
      if (saved_at_ != position_.step) summary.checkpoint = save();
      log_info(fmt::format("signal {}: stopped after step {}{}", stop.received(), position_.step,
                           recipe_.checkpoint.enabled ? "; --resume_from_checkpoint auto goes on from there" : ""));
    }
    return summary;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  void restore(const fs::path& checkpoint) {
    position_ = restore_train_state(checkpoint, model_.decoder, optimizer_, identity_);
    batches_.seek(position_.epoch, position_.step_in_epoch);
    saved_at_ = position_.step;
    log_info(fmt::format("resumed from {} at step {}", checkpoint.string(), position_.step));
    if (position_.step >= plan_.total_steps) log_warning(fmt::format("nothing to do: the run has {} steps", plan_.total_steps));
  }

  double step() {
    const auto begin = Clock::now();
    const int64_t steps_in_epoch = batches_.steps_per_epoch();
    const StepBatches batches = batches_.next();
    const double lr = recipe_.optimizer.lr * lr_multiplier(schedule_, position_.step);
    if (batches.global_trained_tokens == 0) {
      log_warning(fmt::format("step {}: no token of this batch is trained; its loss is 0", position_.step + 1));
    }
    const StepResult result = train_step(model_.decoder, optimizer_, batches, recompute_policy(recipe_), lr);
    if (!result.finite) refuse(batches, result);
    advance(batches);
    ++steps_here_;
    epoch_ = epochs_done(batches.epoch, batches.step_in_epoch, steps_in_epoch);
    if (plan_.is_log_due(position_.step)) report(batches, result, lr, seconds_since(begin));
    return result.loss;
  }

  // Names the batch, then stops or goes on as the recipe says. Nothing was updated, or (fused_backward) only a part was.
  void refuse(const StepBatches& batches, const StepResult& result) const {
    const std::string what =
        fmt::format("step {} (epoch {}, batch {} of it) has loss {} and gradient norm {}: the update was refused",
                    position_.step + 1, batches.epoch, batches.step_in_epoch, result.loss, result.grad_norm);
    require(
        !result.partly_updated,
        "{} part-way, for optimizer.fused_backward had applied the gradients of the last layers. Lower optimizer.lr, or leave "
        "fused_backward out, and go on from the latest checkpoint with --resume_from_checkpoint auto.",
        what);
    require(recipe_.nonfinite == "skip", "{}. Lower optimizer.lr, or set nonfinite: skip to go on without such batches.", what);
    log_warning(what);
  }

  void advance(const StepBatches& batches) {
    ++position_.step;
    position_.epoch = batches_.epoch();
    position_.step_in_epoch = batches_.step_in_epoch();
    position_.tokens_seen += batches.global_tokens;
    position_.trained_tokens_seen += batches.global_trained_tokens;
  }

  void report(const StepBatches& batches, const StepResult& result, double lr, double seconds);
  std::optional<double> validate();
  fs::path save();

  const Recipe& recipe_;
  LoadedModel& model_;
  TokenShards shards_;
  Batches batches_;
  RunIdentity identity_;
  AdamW optimizer_;
  SchedulePlan plan_;
  LrSchedule schedule_;
  Validation validation_;
  TrainPosition position_;
  double epoch_ = 0;        // passes over the data done
  int64_t steps_here_ = 0;  // steps of this process, for the time that is left
  Clock::time_point begin_;
  std::optional<int64_t> saved_at_;            // step of the newest checkpoint
  std::optional<ValidationRecord> validated_;  // the newest validation
  std::optional<MetricsFile> training_log_, validation_log_;
};

void Run::report(const StepBatches& batches, const StepResult& result, double lr, double seconds) {
  TrainingRecord record;
  record.step = position_.step;
  record.epoch = epoch_;
  record.loss = result.loss;
  record.grad_norm = result.grad_norm;
  record.lr = lr;
  record.tokens_per_s = static_cast<double>(batches.global_tokens) / seconds;
  record.mem_gib = peak_memory_gib(model_.decoder.device());
  record.num_tokens = batches.global_tokens;
  record.num_trained_tokens = batches.global_trained_tokens;
  if (model_.decoder.spec().output_router_logits) record.aux_loss = result.balance_loss;
  record.time = utc_time_text(std::time(nullptr));
  training_log_->write(record);
  log_info(progress_line(record, plan_.total_steps,
                         seconds_left(steps_here_, seconds_since(begin_), plan_.total_steps - position_.step)));
}

std::optional<double> Run::validate() {
  if (!validation_.batches) return std::nullopt;
  const EvalResult result = evaluate(model_.decoder, *validation_.batches);
  if (result.num_trained_tokens == 0) log_warning("no token of the validation data is trained; its loss is 0");
  validated_ = ValidationRecord{position_.step, epoch_, result.loss, result.num_trained_tokens};
  validation_log_->write(*validated_);
  log_info(validation_line(*validated_, plan_.total_steps));
  return result.loss;
}

fs::path Run::save() {
  if (!recipe_.checkpoint.enabled) return {};
  // The best is the best of those that can be loaded: validated and saved after the same step.
  if (validated_ && validated_->step == position_.step && validated_->val_loss < position_.best_val_loss) {
    position_.best_val_loss = validated_->val_loss;
    position_.best_step = position_.step;
  }
  const fs::path folder = save_training_checkpoint(recipe_.output_dir, model_, optimizer_, position_, identity_,
                                                   recipe_.checkpoint.save_total_limit);
  // save_total_limit may delete the checkpoint that this run was resumed from; the next save takes the tokenizer's files and
  // unknown tensors from this one.
  std::error_code ignored;
  if (fs::equivalent(model_.path.parent_path(), recipe_.output_dir, ignored)) model_.path = fs::canonical(folder);
  saved_at_ = position_.step;
  log_info(fmt::format("saved {}", folder.string()));
  return folder;
}

}  // namespace

Model::Model(std::unique_ptr<LoadedModel> parts) : parts_(std::move(parts)) {}
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;
int64_t Model::num_parameters() const { return parts_->decoder.parameters().layout().num_parameters(); }
std::string Model::dtype() const { return torch_dtype_of(parts_->decoder.dtype()); }

std::optional<fs::path> find_resume(const Recipe& recipe) {
  return find_resume_checkpoint(recipe.checkpoint.restore_from, recipe.output_dir);
}

void check_model_config(const fs::path& folder) {
  const ModelConfig config = ModelConfig::read(folder);
  find_family(config).spec(config);
}

Model load_model(const Recipe& recipe, const fs::path& folder, const World& world) {
  LoadSettings settings;
  settings.torch_dtype = recipe.model.torch_dtype;
  if (recipe.model.output_router_logits_set) settings.output_router_logits = recipe.model.output_router_logits;
  if (recipe.model.router_aux_loss_coef >= 0) settings.router_aux_loss_coef = recipe.model.router_aux_loss_coef;
  settings.deterministic = recipe.deterministic;
  auto parts = std::make_unique<LoadedModel>(load_model(folder, settings, world.device));
  return Model(std::move(parts));
}

TrainSummary train(const Recipe& recipe, const World& world, Model& model, const fs::path& data_folder,
                   const std::optional<fs::path>& resume, const std::function<void()>& before_writing) {
  return Run(recipe, world, model.parts(), data_folder).train(resume, before_writing);
}

}  // namespace headrace
