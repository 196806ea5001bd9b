// Recipe: everything a run can be told, typed, with defaults. A recipe is data: unknown keys are errors, nothing is executed.
// Keys follow NeMo AutoModel's nesting; Hugging Face's, axolotl's and LLaMA-Factory's flat names are aliases (docs/recipe.md).
// Flow: recipe.yaml + --key=value -> [Recipe] -> everything else. The table of keys: src/config/recipe_keys.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headrace {

struct ModelSection {
  std::string pretrained_model_name_or_path;  // a local folder
  std::string torch_dtype = "auto";           // auto (the checkpoint's) | float32 | bfloat16
  bool output_router_logits = false;          // add the load-balancing loss; default: config.json's value
  bool output_router_logits_set = false;      // the recipe said so
  double router_aux_loss_coef = -1.0;         // < 0: config.json's value
  bool operator==(const ModelSection&) const = default;
};

struct DatasetSection {
  std::vector<std::string> path;  // json or jsonl files; one string or a list
  std::string format = "auto";    // auto | messages | prompt_completion | text | tokenized
  std::string split;              // reserved for hub names
  int64_t limit = 0;              // use at most this many records; 0 = all
  bool train_on_prompt = false;   // default: loss on answers only
  std::string chat_template;      // path of a template; empty: the tokenizer's own
  bool operator==(const DatasetSection&) const = default;
};

struct StepSchedulerSection {
  int64_t global_batch_size = 8;  // rows of an optimizer step over all ranks; 0: follows from gradient_accumulation_steps
  int64_t local_batch_size = 1;   // rows of a micro-batch on one rank
  int64_t gradient_accumulation_steps = 0;  // when given (> 0), global_batch_size = local_batch_size * this * world_size
  int64_t num_epochs = 1;
  int64_t max_steps = -1;        // > 0 ends the run earlier or later than num_epochs
  int64_t ckpt_every_steps = 0;  // 0: only at the end
  int64_t val_every_steps = 0;   // 0: at the end only (when there is validation data)
  int64_t log_every_steps = 1;
  bool operator==(const StepSchedulerSection&) const = default;
};

struct PackedSequenceSection {
  int64_t packed_sequence_size = 2048;  // tokens a row holds at most; documents are cut there
  bool packing = true;
  bool operator==(const PackedSequenceSection&) const = default;
};

struct OptimizerSection {
  double lr = 1e-5;
  double beta1 = 0.9, beta2 = 0.999;  // `betas: [b1, b2]` in YAML
  double eps = 1e-8;
  double weight_decay = 0.0;                 // on matrices and embeddings, not on norms and biases (as transformers' Trainer)
  double max_grad_norm = 1.0;                // 0 turns clipping off
  std::string stochastic_rounding = "auto";  // auto: on when the weights are bfloat16 | true | false
  bool master_weights = false;               // keep bfloat16 weights exactly in float32 (2 more bytes a parameter)
  bool fused_backward = false;               // apply each layer's gradients as soon as they are final; a full set never exists
  bool operator==(const OptimizerSection&) const = default;
};

struct LrSchedulerSection {
  std::string type = "linear";  // linear | cosine | constant | constant_with_warmup
  double warmup_steps = 0;      // a value below 1 is a share of all steps
  double min_lr = 0.0;          // where linear and cosine end
  bool operator==(const LrSchedulerSection&) const = default;
};

struct CheckpointSection {
  bool enabled = true;
  int64_t save_total_limit = 0;  // keep the newest so many; 0 = all (the best one is always kept)
  std::string restore_from;      // a checkpoint-<step> folder, `auto` (the latest in output_dir) or empty
  bool operator==(const CheckpointSection&) const = default;
};

struct DistributedSection {
  int64_t ep_size = 1;
  int64_t nproc_per_node = 1;
  std::string activation_checkpointing = "none";  // none | selective | full (true = full, false = none)
  bool operator==(const DistributedSection&) const = default;
};

struct Recipe {
  ModelSection model;
  DatasetSection dataset;
  DatasetSection validation_dataset;
  double val_set_size = 0.0;  // held out of dataset when there is no validation_dataset: below 1 a share, from 1 a count
  PackedSequenceSection packed_sequence;
  StepSchedulerSection step_scheduler;
  OptimizerSection optimizer;
  LrSchedulerSection lr_scheduler;
  CheckpointSection checkpoint;
  DistributedSection distributed;
  std::string output_dir = "out";
  std::string device = "auto";  // auto | cpu | cuda
  int64_t num_threads = 0;      // CPU threads; 0 = all cores
  uint64_t seed = 42;
  bool shuffle = true;
  bool deterministic = false;      // on a GPU too, the same run gives the same bits (slower attention backward)
  std::string nonfinite = "stop";  // a step whose loss or gradient norm is not finite: stop | skip
  bool operator==(const Recipe&) const = default;
};

/// Reads a YAML (or, when the name ends in .json, JSON) file and puts `overrides` ("a.b=value", a leading "--" is allowed, also
/// flat aliases) on top. An override replaces what the file says under any alias; of two overrides with the same name the later
/// one wins; an override without a value ("a.b=") restores the default.
/// Throws UserError: unreadable or not YAML; an unknown key (with the nearest known name); a known peer's key that is not
/// supported yet; a key given twice; two aliases that disagree; a value of the wrong type or outside its range (with the
/// range); values that do not go together; `_target_` or a YAML tag that asks for code.
Recipe read_recipe(const std::string& path, const std::vector<std::string>& overrides);

/// The same for text in memory (YAML or JSON); `origin` names it in errors.
Recipe parse_recipe(const std::string& text, const std::string& origin, const std::vector<std::string>& overrides);

/// Command-line arguments as overrides: "--a.b=c" stays, "--a.b" "c" becomes "--a.b=c", and "--a.b" alone becomes "--a.b=true".
/// Throws UserError for an argument that belongs to no key.
std::vector<std::string> overrides_of_arguments(const std::vector<std::string>& arguments);

/// Settles what depends on the number of ranks: afterwards global_batch_size > 0 holds and gradient_accumulation_steps is 0, so
/// that the recipe means the same run on any number of ranks. Throws UserError when global_batch_size is no multiple of
/// local_batch_size * world_size, disagrees with gradient_accumulation_steps, or ep_size does not divide world_size.
Recipe resolve_for_world(Recipe recipe, int64_t world_size);

/// The recipe as YAML: nested keys, every value, ready to be read again with the same result (also by PyYAML).
std::string to_yaml(const Recipe& recipe);

/// The key table of docs/recipe.md as Markdown.
std::string recipe_key_table();

}  // namespace headrace
