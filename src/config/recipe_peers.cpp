#include "config/recipe_peers.h"

#include <algorithm>
#include <cctype>

#include "headrace/error.h"

namespace headrace {
namespace {

using Translated = std::vector<std::pair<std::string, RecipeNode>>;

RecipeNode scalar(const std::string& text, int line) { return {.kind = RecipeNode::Kind::kScalar, .text = text, .line = line}; }

bool need_bool(const RecipeNode& value, const std::string& place) {
  const int read = value.kind == RecipeNode::Kind::kScalar ? read_bool_text(value.text) : -1;
  require(read >= 0, "{} must be true or false", place);
  return read == 1;
}

Translated betas(const RecipeNode& value, const std::string& place) {
  require(value.kind == RecipeNode::Kind::kList && value.items.size() == 2,
          "{} must be a list of two numbers, such as [0.9, 0.999]", place);
  return {{"optimizer.beta1", value.items[0]}, {"optimizer.beta2", value.items[1]}};
}

Translated bf16(const RecipeNode& value, const std::string& place) {
  if (lowercase(value.text) == "auto") return {};
  return need_bool(value, place) ? Translated{{"model.torch_dtype", scalar("bfloat16", value.line)}} : Translated{};
}

Translated warmup_ratio(const RecipeNode& value, const std::string& place) {
  // A ratio of 1 or more would be read as a number of steps.
  double ratio = -1;
  if (value.kind == RecipeNode::Kind::kScalar) {
    try {
      ratio = std::stod(value.text);
    } catch (const std::exception&) {
      ratio = -1;
    }
  }
  require(ratio >= 0 && ratio < 1, "{} must be a number from 0 to below 1", place);
  return {{"lr_scheduler.warmup_steps", value}};
}

Translated answers_only(const RecipeNode& value, const std::string& place) {
  return {{"dataset.train_on_prompt", scalar(need_bool(value, place) ? "false" : "true", value.line)}};
}

bool matches(const std::string& pattern, const std::string& name) {
  if (pattern.ends_with('*')) return name.starts_with(pattern.substr(0, pattern.size() - 1));
  return name == pattern;
}

}  // namespace

const std::vector<PeerForm>& peer_forms() {
  static const std::vector<PeerForm> table = {
      {"optimizer.betas", "`[beta1, beta2]`", betas},
      {"betas", "`[beta1, beta2]`", betas},
      {"bf16", "`true` is `model.torch_dtype: bfloat16`; `false` and `auto` say nothing", bf16},
      {"warmup_ratio", "from 0 to below 1: `lr_scheduler.warmup_steps` as a share", warmup_ratio},
      {"completion_only_loss", "the opposite of `dataset.train_on_prompt`", answers_only},
      {"assistant_only_loss", "the opposite of `dataset.train_on_prompt`", answers_only},
  };
  return table;
}

const PeerForm* find_peer_form(const std::string& name) {
  for (const PeerForm& form : peer_forms()) {
    if (form.name == name) return &form;
  }
  return nullptr;
}

const std::vector<PeerKey>& peer_keys() {
  static const std::vector<PeerKey> table = {
      // Ways to train
      {"peft*", "LoRA adapters", {}},
      {"lora_*", "LoRA adapters", {}},
      {"use_peft", "LoRA adapters", {"false"}},
      {"adapter", "LoRA adapters", {}},
      {"target_modules", "LoRA adapters", {}},
      {"finetuning_type", "adapters and freezing", {"full"}},
      {"tuner_type", "adapters and freezing", {"full"}},
      {"train_type", "adapters and freezing", {"full"}},
      {"freeze_*", "freezing", {}},
      {"stage", "training other than supervised fine-tuning", {"sft"}},
      {"rl*", "training other than supervised fine-tuning", {}},
      {"dpo_*", "preference training", {}},
      {"do_train", "runs without training", {"true"}},
      {"label_smoothing_factor", "label smoothing", {"0", "0.0"}},
      {"neftune_noise_alpha", "NEFTune", {}},
      // Number formats and kernels
      {"fp8*", "FP8 training", {"false"}},
      {"fp16", "float16 training", {"false"}},
      {"load_in_8bit", "quantised weights", {"false"}},
      {"load_in_4bit", "quantised weights", {"false"}},
      {"quantization*", "quantised weights", {}},
      {"torch_compile*", "torch.compile", {"false"}},
      {"compile", "torch.compile", {}},
      {"liger_*", "Liger kernels", {"false"}},
      {"use_liger_kernel", "Liger kernels", {"false"}},
      {"enable_liger_kernel", "Liger kernels", {"false"}},
      {"attn_implementation", "a choice of attention kernels", {"auto", "sdpa"}},
      {"model.attn_implementation", "a choice of attention kernels", {"auto", "sdpa"}},
      {"flash_attn", "a choice of attention kernels", {"auto", "sdpa"}},
      {"flash_attention", "a choice of attention kernels", {}},
      {"optim", "an optimizer other than AdamW", {"adamw", "adamw_torch", "adamw_torch_fused"}},
      {"optimizer", "an optimizer other than AdamW", {"adamw", "adamw_torch", "adamw_torch_fused"}},
      {"optim_*", "options of other optimizers", {}},
      // Ranks
      {"deepspeed", "DeepSpeed", {}},
      {"fsdp*", "a choice of FSDP settings", {}},
      {"distributed.strategy", "a choice of the sharding strategy", {}},
      {"distributed.tp_size", "tensor parallelism", {"1", "none"}},
      {"distributed.cp_size", "context parallelism", {"1", "none"}},
      {"distributed.pp_size", "pipeline parallelism", {"1", "none"}},
      {"tensor_parallel_size", "tensor parallelism", {"1"}},
      {"context_parallel_size", "context parallelism", {"1"}},
      {"pipeline_parallel_size", "pipeline parallelism", {"1"}},
      {"distributed.sequence_parallel", "sequence parallelism", {"false"}},
      // When to do things
      {"eval_strategy", "validation other than by steps", {"steps"}},
      {"evaluation_strategy", "validation other than by steps", {"steps"}},
      {"save_strategy", "checkpoints other than by steps", {"steps"}},
      {"logging_strategy", "log lines other than by steps", {"steps"}},
      {"logging_first_step", "a log line of the first step", {"false"}},
      {"load_best_model_at_end", "loading the best checkpoint at the end", {"false"}},
      {"early_stopping_patience", "early stopping", {}},
      {"per_device_eval_batch_size", "another batch size for validation", {}},
      {"eval_batch_size", "another batch size for validation", {}},
      {"data_seed", "a seed of its own for the data", {}},
      // Files and reports
      {"checkpoint.save_consolidated", "sharded checkpoints", {"true", "final", "every"}},
      {"checkpoint.model_save_format", "another checkpoint format", {"safetensors"}},
      {"save_safetensors", "another checkpoint format", {"true"}},
      {"save_only_model", "checkpoints without the training state", {"false"}},
      {"overwrite_output_dir", "overwriting", {"false"}},
      {"report_to", "reports to other services", {"none"}},
      {"wandb*", "reports to other services", {}},
      {"mlflow*", "reports to other services", {}},
      {"push_to_hub", "uploads", {"false"}},
      {"hub_*", "uploads", {}},
      {"trust_remote_code", "code from a checkpoint", {"false"}},
      {"model.trust_remote_code", "code from a checkpoint", {"false"}},
      // Data
      {"template", "templates by name (the tokenizer's own or dataset.chat_template is used)", {}},
      {"dataset_dir", "a registry of data sets (give the files in dataset.path)", {}},
      {"dataset_text_field", "another name of the text field", {"text"}},
      {"streaming", "streamed data", {"false"}},
      {"group_by_length", "grouping by length (rows are packed)", {"false"}},
      {"pad_to_sequence_len", "padding (there is none)", {"false"}},
      {"special_tokens", "new tokens", {}},
      {"tokens", "new tokens", {}},
      {"dataloader", "a choice of the data loader", {}},
      {"dataloader_*", "a choice of the data loader", {}},
  };
  return table;
}

const PeerKey* find_peer_key(const std::string& name) {
  const auto found =
      std::find_if(peer_keys().begin(), peer_keys().end(), [&](const PeerKey& key) { return matches(key.pattern, name); });
  return found == peer_keys().end() ? nullptr : &*found;
}

std::string lowercase(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

int read_bool_text(const std::string& text) {
  const std::string word = lowercase(text);
  if (word == "true" || word == "yes" || word == "on") return 1;
  if (word == "false" || word == "no" || word == "off") return 0;
  return -1;
}

}  // namespace headrace
