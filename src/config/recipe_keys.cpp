#include "config/recipe_keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

namespace headrace {
namespace {

template <auto Section, auto Field>
auto& section_field(Recipe& recipe) {
  return (recipe.*Section).*Field;
}
template <auto Field>
auto& field(Recipe& recipe) {
  return recipe.*Field;
}

KeyRange any() { return {}; }
KeyRange at_least(double low) { return {.low = low}; }
KeyRange above(double low) { return {.low = low, .low_excluded = true}; }
KeyRange from_to_below(double low, double high) { return {.low = low, .high = high, .high_excluded = true}; }
KeyRange one_of(std::vector<KeyChoice> choices) { return {.choices = std::move(choices)}; }

std::vector<RecipeKey> make_table() {
  using M = ModelSection;
  using D = DatasetSection;
  using P = PackedSequenceSection;
  using S = StepSchedulerSection;
  using O = OptimizerSection;
  using L = LrSchedulerSection;
  using C = CheckpointSection;
  using N = DistributedSection;
  constexpr auto kModel = &Recipe::model;
  constexpr auto kDataset = &Recipe::dataset;
  constexpr auto kValidation = &Recipe::validation_dataset;
  constexpr auto kPacked = &Recipe::packed_sequence;
  constexpr auto kSteps = &Recipe::step_scheduler;
  constexpr auto kOptimizer = &Recipe::optimizer;
  constexpr auto kSchedule = &Recipe::lr_scheduler;
  constexpr auto kCheckpoint = &Recipe::checkpoint;
  constexpr auto kDistributed = &Recipe::distributed;
  const KeyRange formats = one_of({{"auto", {}},
                                   {"messages", {"chatml", "openai"}},
                                   {"prompt_completion", {}},
                                   {"text", {"completion", "pretrain"}},
                                   {"tokenized", {}}});

  // clang-format off
  return {
      // ---- model
      {"model.pretrained_model_name_or_path", section_field<kModel, &M::pretrained_model_name_or_path>, any(),
       "Folder of the Hugging Face checkpoint to start from.", {"model_name_or_path", "base_model", "model", "pretrained_model_name_or_path"}},
      {"model.torch_dtype", section_field<kModel, &M::torch_dtype>,
       one_of({{"auto", {}}, {"float32", {"fp32", "float", "torch.float32"}}, {"bfloat16", {"bf16", "torch.bfloat16"}}}),
       "Type of weights and gradients; auto is the checkpoint's own.", {"torch_dtype", "dtype", "model.dtype"}},
      {"model.output_router_logits", section_field<kModel, &M::output_router_logits>, any(),
       "Add the load-balancing loss of the router; without it config.json decides.", {"output_router_logits"},
       [](const Recipe& r) { return r.model.output_router_logits_set; }, [](Recipe& r) { r.model.output_router_logits_set = true; }},
      {"model.router_aux_loss_coef", section_field<kModel, &M::router_aux_loss_coef>, at_least(0),
       "Weight of the load-balancing loss, where output_router_logits turns it on; without it config.json decides.",
       {"router_aux_loss_coef"}, [](const Recipe& r) { return r.model.router_aux_loss_coef >= 0; }},

      // ---- data
      {"dataset.path", section_field<kDataset, &D::path>, any(), "Files with the training records (json or jsonl): one or a list.",
       {"dataset", "datasets", "train_file", "dataset.path_or_dataset", "dataset.path_or_dataset_id"}},
      {"dataset.format", section_field<kDataset, &D::format>, formats,
       "Form of the records; auto looks at the keys of the first one.", {"dataset.type"}},
      {"dataset.split", section_field<kDataset, &D::split>, any(), "Reserved for data sets of the hub; leave it empty.", {}},
      {"dataset.limit", section_field<kDataset, &D::limit>, at_least(0), "Use at most this many records; 0 is all.",
       {"max_samples", "max_train_samples", "dataset.limit_dataset_samples"}},
      {"dataset.train_on_prompt", section_field<kDataset, &D::train_on_prompt>, any(),
       "Train on the prompt too; otherwise on answers only.", {"train_on_prompt", "train_on_inputs"}},
      {"dataset.chat_template", section_field<kDataset, &D::chat_template>, any(),
       "Path of a chat template; empty is the tokenizer's own.", {"chat_template", "chat_template_path"}},

      {"validation_dataset.path", section_field<kValidation, &D::path>, any(), "Files with the validation records.",
       {"validation_dataset", "eval_dataset", "validation_file", "test_datasets", "validation_dataset.path_or_dataset",
        "validation_dataset.path_or_dataset_id"}},
      {"validation_dataset.format", section_field<kValidation, &D::format>, formats, "As dataset.format; its value when not given.", {"validation_dataset.type"}},
      {"validation_dataset.split", section_field<kValidation, &D::split>, any(), "Reserved; leave it empty.", {}},
      {"validation_dataset.limit", section_field<kValidation, &D::limit>, at_least(0), "As dataset.limit.",
       {"max_eval_samples", "validation_dataset.limit_dataset_samples"}},
      {"validation_dataset.train_on_prompt", section_field<kValidation, &D::train_on_prompt>, any(),
       "As dataset.train_on_prompt; its value when not given.", {}},
      {"validation_dataset.chat_template", section_field<kValidation, &D::chat_template>, any(), "As dataset.chat_template; its value when not given.", {}},

      {"packed_sequence.packed_sequence_size", section_field<kPacked, &P::packed_sequence_size>, at_least(2),
       "Tokens a row holds at most; longer documents are cut there.",
       {"cutoff_len", "max_length", "sequence_len", "max_seq_length", "max_seq_len", "seq_length", "packed_sequence_size"}},
      {"packed_sequence.packing", section_field<kPacked, &P::packing>, any(),
       "Put several documents into a row (attention never crosses a document).", {"packing", "sample_packing"}},

      // ---- training
      {"step_scheduler.global_batch_size", section_field<kSteps, &S::global_batch_size>, at_least(0),
       "Rows of an optimizer step over all ranks; 0 follows from gradient_accumulation_steps.", {"global_batch_size"}},
      {"step_scheduler.local_batch_size", section_field<kSteps, &S::local_batch_size>, at_least(1),
       "Rows that a rank computes at once. Given alone, it implies gradient_accumulation_steps 1, as in Hugging Face's Trainer.",
       {"per_device_train_batch_size", "micro_batch_size", "local_batch_size"}},
      {"step_scheduler.gradient_accumulation_steps", section_field<kSteps, &S::gradient_accumulation_steps>, at_least(0),
       "Micro-batches of a rank per optimizer step; 0 follows from global_batch_size.", {"gradient_accumulation_steps"}},
      {"step_scheduler.num_epochs", section_field<kSteps, &S::num_epochs>, at_least(0), "Passes over the training data.",
       {"num_train_epochs", "num_epochs"}},
      {"step_scheduler.max_steps", section_field<kSteps, &S::max_steps>, at_least(-1),
       "Optimizer steps of the run, instead of num_epochs; -1 leaves it to num_epochs.", {"max_steps"}},
      {"step_scheduler.ckpt_every_steps", section_field<kSteps, &S::ckpt_every_steps>, at_least(0),
       "Steps between checkpoints; 0 saves at the end only.", {"save_steps", "ckpt_every_steps"}},
      {"step_scheduler.val_every_steps", section_field<kSteps, &S::val_every_steps>, at_least(0),
       "Steps between validations; 0 validates at the end only.", {"eval_steps", "val_every_steps"}},
      {"step_scheduler.log_every_steps", section_field<kSteps, &S::log_every_steps>, at_least(1),
       "Steps between lines of the log and of training.jsonl.", {"logging_steps", "log_every_steps", "step_scheduler.log_remote_every_steps"}},

      {"optimizer.lr", section_field<kOptimizer, &O::lr>, above(0), "Highest learning rate of AdamW.", {"learning_rate", "lr"}},
      {"optimizer.beta1", section_field<kOptimizer, &O::beta1>, from_to_below(0, 1), "Decay of the mean gradient.", {"adam_beta1"}},
      {"optimizer.beta2", section_field<kOptimizer, &O::beta2>, from_to_below(0, 1), "Decay of the mean squared gradient.",
       {"adam_beta2"}},
      {"optimizer.eps", section_field<kOptimizer, &O::eps>, above(0), "Added to the root of the mean squared gradient.",
       {"adam_epsilon"}},
      {"optimizer.weight_decay", section_field<kOptimizer, &O::weight_decay>, at_least(0),
       "Decoupled decay of matrices and embeddings; norms and biases are not decayed.", {"weight_decay"}},
      {"optimizer.max_grad_norm", section_field<kOptimizer, &O::max_grad_norm>, at_least(0),
       "Gradients are scaled down to this global norm; 0 turns clipping off.",
       {"max_grad_norm", "gradient_clipping", "clip_grad_norm.max_norm"}},
      {"optimizer.stochastic_rounding", section_field<kOptimizer, &O::stochastic_rounding>,
       one_of({{"auto", {}}, {"true", {}}, {"false", {}}}), "Round updates of bfloat16 weights stochastically; auto: when the weights are bfloat16.",
       {"stochastic_rounding"}},
      {"optimizer.master_weights", section_field<kOptimizer, &O::master_weights>, any(),
       "Keep exact float32 weights behind bfloat16 ones: 2 more bytes a parameter; checkpoints of the model stay bfloat16.",
       {"master_weights"}},
      {"optimizer.fused_backward", section_field<kOptimizer, &O::fused_backward>, any(),
       "Update each layer during the backward and forget its gradients: less memory, no accumulation, no clipping.",
       {"fused_backward", "optimizer_in_bwd"}},

      {"lr_scheduler.type", section_field<kSchedule, &L::type>,
       one_of({{"linear", {}}, {"cosine", {"cosine_with_min_lr"}}, {"constant", {}}, {"constant_with_warmup", {}}}),
       "Course of the learning rate, as transformers' get_scheduler.", {"lr_scheduler_type", "lr_scheduler", "lr_scheduler.lr_decay_style"}},
      {"lr_scheduler.warmup_steps", section_field<kSchedule, &L::warmup_steps>, at_least(0),
       "Steps in which the learning rate grows from 0; a value below 1 is a share of all steps.",
       {"warmup_steps", "lr_scheduler.lr_warmup_steps"}},
      {"lr_scheduler.min_lr", section_field<kSchedule, &L::min_lr>, at_least(0), "Learning rate at which linear and cosine end.",
       {"min_lr", "lr_scheduler_kwargs.min_lr"}},

      // ---- saving, machines
      {"checkpoint.enabled", section_field<kCheckpoint, &C::enabled>, any(), "Write checkpoints.", {}},
      {"checkpoint.save_total_limit", section_field<kCheckpoint, &C::save_total_limit>, at_least(0),
       "Keep the newest so many checkpoints, and the best; 0 keeps all.",
       {"save_total_limit", "max_recent_checkpoints", "checkpoint.max_recent_checkpoints"}},
      {"checkpoint.restore_from", section_field<kCheckpoint, &C::restore_from>, any(),
       "Resume from this checkpoint-<step> folder, or auto: the latest in output_dir.", {"resume_from_checkpoint", "restore_from"}},

      {"distributed.ep_size", section_field<kDistributed, &N::ep_size>, at_least(1), "Ranks that share the experts of a layer.",
       {"ep_size", "expert_parallel_size", "expert_model_parallel_size"}},
      {"distributed.nproc_per_node", section_field<kDistributed, &N::nproc_per_node>, at_least(1), "Processes on this machine.",
       {"nproc_per_node"}},
      {"distributed.activation_checkpointing", section_field<kDistributed, &N::activation_checkpointing>,
       one_of({{"none", {"false"}}, {"selective", {}}, {"full", {"true"}}}), "What backward computes again instead of keeping it.",
       {"gradient_checkpointing", "activation_checkpointing"}},

      {"val_set_size", field<&Recipe::val_set_size>, at_least(0),
       "Records taken from dataset for validation: below 1 a share, from 1 a count.", {"val_size"}},
      {"output_dir", field<&Recipe::output_dir>, any(), "Folder of checkpoints, metrics and the resolved recipe.",
       {"checkpoint.checkpoint_dir"}},
      {"device", field<&Recipe::device>, one_of({{"auto", {}}, {"cpu", {}}, {"cuda", {"gpu"}}}), "Where to compute; auto takes GPUs when there are any.",
       {}},
      {"num_threads", field<&Recipe::num_threads>, at_least(0), "CPU threads of a process; 0 is all cores.", {}},
      {"seed", field<&Recipe::seed>, at_least(0), "Seed of the data order and of stochastic rounding.", {"rng.seed"}},
      {"shuffle", field<&Recipe::shuffle>, any(), "New order of the documents in every epoch.", {}},
      {"deterministic", field<&Recipe::deterministic>, any(),
       "Same bits from the same run on a GPU too, by a slower attention backward; on CPUs results always repeat.",
       {"full_determinism"}},
      {"nonfinite", field<&Recipe::nonfinite>, one_of({{"stop", {}}, {"skip", {}}}),
       "What to do with a step whose loss or gradient norm is not finite.", {}},
  };
  // clang-format on
}

}  // namespace

bool KeyRange::holds(double value) const {
  return (low_excluded ? value > low : value >= low) && (high_excluded ? value < high : value <= high);
}

std::string KeyRange::text() const {
  if (!choices.empty()) {
    std::vector<std::string> names;
    for (const KeyChoice& choice : choices) names.push_back(choice.name);
    return fmt::format("one of {}", fmt::join(names, ", "));
  }
  std::string out;
  if (low > -std::numeric_limits<double>::infinity()) {
    out = fmt::format("{} {}",
                      high < std::numeric_limits<double>::infinity() ? "from"
                      : low_excluded                                 ? "above"
                                                                     : "at least",
                      low);
  }
  if (high < std::numeric_limits<double>::infinity()) out += fmt::format(" to {}{}", high_excluded ? "below " : "", high);
  return out;
}

KeyValue RecipeKey::value(const Recipe& recipe) const {
  // The accessors hand out references for both reading and writing; here nothing is written.
  return std::visit([&](auto access) -> KeyValue { return access(const_cast<Recipe&>(recipe)); }, member);
}

void RecipeKey::assign(Recipe& recipe, const KeyValue& value) const {
  std::visit(
      [&](auto access) {
        auto& target = access(recipe);
        target = std::get<std::decay_t<decltype(target)>>(value);
      },
      member);
  if (mark_set != nullptr) mark_set(recipe);
}

std::string RecipeKey::type_text() const {
  struct Names {
    std::string operator()(bool& (*)(Recipe&)) const { return "true or false"; }
    std::string operator()(int64_t& (*)(Recipe&)) const { return "a whole number"; }
    std::string operator()(uint64_t& (*)(Recipe&)) const { return "a whole number"; }
    std::string operator()(double& (*)(Recipe&)) const { return "a number"; }
    std::string operator()(std::string& (*)(Recipe&)) const { return "a text"; }
    std::string operator()(std::vector<std::string>& (*)(Recipe&)) const { return "a text or a list of texts"; }
  };
  return std::visit(Names{}, member);
}

std::string RecipeKey::needed() const {
  if (!range.choices.empty()) return range.text();
  const std::string limits = range.text();
  return limits.empty() ? type_text() : type_text() + " " + limits;
}

const std::vector<RecipeKey>& recipe_keys() {
  static const std::vector<RecipeKey> table = make_table();
  return table;
}

const RecipeKey* find_recipe_key(const std::string& name) {
  static const std::map<std::string, const RecipeKey*> by_name = [] {
    std::map<std::string, const RecipeKey*> out;
    for (const RecipeKey& key : recipe_keys()) {
      out.emplace(key.name, &key);
      for (const std::string& alias : key.aliases) out.emplace(alias, &key);
    }
    return out;
  }();
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

}  // namespace headrace
