// The recipe reader: names, overrides, every refusal with its sentence, the round trip, and docs/recipe.md held to the table.
#include "headrace/recipe.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "base/file.h"
#include "config/recipe_keys.h"
#include "config/recipe_peers.h"
#include "headrace/error.h"

namespace headrace {
namespace {

const std::string kBase = "model_name_or_path: m\ndataset: d.jsonl\n";  // the two keys without a default

Recipe read(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return parse_recipe(kBase + text, "r.yaml", overrides);
}

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}, const std::string& base = kBase) {
  try {
    parse_recipe(base + text, "r.yaml", overrides);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

void expect_error(const std::string& text, const std::vector<std::string>& parts,
                  const std::vector<std::string>& overrides = {}) {
  const std::string message = error_of(text, overrides);
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << text << "\n  said: " << message << "\n  not: " << part;
}

std::filesystem::path source_file(const std::string& name) {
  return std::filesystem::path(std::getenv("HEADRACE_SOURCE_DIR")) / name;
}

}  // namespace

TEST(Recipe, DefaultsAreTheStructs) {
  Recipe expected;
  expected.model.pretrained_model_name_or_path = "m";
  expected.dataset.path = {"d.jsonl"};
  EXPECT_EQ(read(""), expected);
}

TEST(Recipe, NestedKeys) {
  const Recipe r = read(R"(
validation_dataset: {path: [v1.jsonl, v2.jsonl], limit: 7}
packed_sequence: {packed_sequence_size: 4096, packing: no}
step_scheduler:
  global_batch_size: 32
  local_batch_size: 4
  num_epochs: 3
  max_steps: 100
  ckpt_every_steps: 50
  val_every_steps: 25
  log_every_steps: 2
optimizer: {lr: 2e-5, betas: [0.8, 0.95], eps: 1.0e-6, weight_decay: 0.1, max_grad_norm: 0, stochastic_rounding: yes}
lr_scheduler: {type: cosine, warmup_steps: 0.03, min_lr: 1e-6}
checkpoint: {enabled: true, save_total_limit: 3, restore_from: auto}
distributed: {ep_size: 8, nproc_per_node: 8, activation_checkpointing: selective}
output_dir: o
seed: 18446744073709551615
shuffle: false
nonfinite: skip
)");
  EXPECT_EQ(r.validation_dataset.path, (std::vector<std::string>{"v1.jsonl", "v2.jsonl"}));
  EXPECT_EQ(r.validation_dataset.limit, 7);
  EXPECT_EQ(r.packed_sequence.packed_sequence_size, 4096);
  EXPECT_FALSE(r.packed_sequence.packing);
  EXPECT_EQ(r.step_scheduler.global_batch_size, 32);
  EXPECT_EQ(r.step_scheduler.local_batch_size, 4);
  EXPECT_EQ(r.step_scheduler.gradient_accumulation_steps, 0);
  EXPECT_EQ(r.step_scheduler.num_epochs, 3);
  EXPECT_EQ(r.step_scheduler.max_steps, 100);
  EXPECT_EQ(r.step_scheduler.ckpt_every_steps, 50);
  EXPECT_EQ(r.step_scheduler.val_every_steps, 25);
  EXPECT_EQ(r.step_scheduler.log_every_steps, 2);
  EXPECT_EQ(r.optimizer.lr, 2e-5);
  EXPECT_EQ(r.optimizer.beta1, 0.8);
  EXPECT_EQ(r.optimizer.beta2, 0.95);
  EXPECT_EQ(r.optimizer.eps, 1e-6);
  EXPECT_EQ(r.optimizer.weight_decay, 0.1);
  EXPECT_EQ(r.optimizer.max_grad_norm, 0.0);
  EXPECT_EQ(r.optimizer.stochastic_rounding, "true");
  EXPECT_EQ(r.lr_scheduler.type, "cosine");
  EXPECT_EQ(r.lr_scheduler.warmup_steps, 0.03);
  EXPECT_EQ(r.lr_scheduler.min_lr, 1e-6);
  EXPECT_EQ(r.checkpoint.save_total_limit, 3);
  EXPECT_EQ(r.checkpoint.restore_from, "auto");
  EXPECT_EQ(r.distributed.ep_size, 8);
  EXPECT_EQ(r.distributed.activation_checkpointing, "selective");
  EXPECT_EQ(r.seed, 18446744073709551615ULL);
  EXPECT_FALSE(r.shuffle);
  EXPECT_EQ(r.nonfinite, "skip");
}

TEST(Recipe, HuggingFaceNames) {
  const Recipe r = parse_recipe(R"(
model_name_or_path: m
train_file: d.jsonl
validation_file: v.jsonl
torch_dtype: bfloat16
bf16: true
output_router_logits: false
router_aux_loss_coef: 0.001
learning_rate: 1e-5
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
num_train_epochs: 3.0
max_steps: -1
lr_scheduler_type: constant_with_warmup
warmup_ratio: 0.1
weight_decay: 0.01
adam_beta1: 0.85
adam_beta2: 0.98
adam_epsilon: 1e-7
max_grad_norm: 0.5
logging_steps: 10
eval_steps: 20
save_steps: 30
eval_strategy: steps
save_total_limit: 2
resume_from_checkpoint: out/checkpoint-30
seed: 7
max_length: 1024
packing: false
gradient_checkpointing: true
completion_only_loss: false
optim: adamw_torch_fused
report_to: none
)",
                                "hf.yaml", {});
  EXPECT_EQ(r.validation_dataset.path, std::vector<std::string>{"v.jsonl"});
  EXPECT_EQ(r.model.torch_dtype, "bfloat16");
  EXPECT_TRUE(r.model.output_router_logits_set);
  EXPECT_FALSE(r.model.output_router_logits);
  EXPECT_EQ(r.model.router_aux_loss_coef, 0.001);
  EXPECT_EQ(r.optimizer.lr, 1e-5);
  EXPECT_EQ(r.step_scheduler.local_batch_size, 2);
  EXPECT_EQ(r.step_scheduler.gradient_accumulation_steps, 4);
  EXPECT_EQ(r.step_scheduler.num_epochs, 3);
  EXPECT_EQ(r.lr_scheduler.type, "constant_with_warmup");
  EXPECT_EQ(r.lr_scheduler.warmup_steps, 0.1);
  EXPECT_EQ(r.optimizer.beta1, 0.85);
  EXPECT_EQ(r.optimizer.beta2, 0.98);
  EXPECT_EQ(r.optimizer.eps, 1e-7);
  EXPECT_EQ(r.optimizer.max_grad_norm, 0.5);
  EXPECT_EQ(r.step_scheduler.log_every_steps, 10);
  EXPECT_EQ(r.step_scheduler.val_every_steps, 20);
  EXPECT_EQ(r.step_scheduler.ckpt_every_steps, 30);
  EXPECT_EQ(r.checkpoint.restore_from, "out/checkpoint-30");
  EXPECT_EQ(r.packed_sequence.packed_sequence_size, 1024);
  EXPECT_FALSE(r.packed_sequence.packing);
  EXPECT_EQ(r.distributed.activation_checkpointing, "full");
  EXPECT_TRUE(r.dataset.train_on_prompt);
  EXPECT_EQ(resolve_for_world(r, 2).step_scheduler.global_batch_size, 16);
}

TEST(Recipe, AxolotlAndLlamaFactoryNames) {
  const Recipe axolotl = parse_recipe(
      "base_model: m\ndatasets:\n  - path: a.jsonl\n  - path: b.jsonl\nval_set_size: 0.05\nsequence_len: 512\nsample_packing: "
      "true\n"
      "micro_batch_size: 2\nnum_epochs: 4\nlr_scheduler: cosine\noptimizer: adamw_torch\nexpert_parallel_size: "
      "2\ntrain_on_inputs: true\n"
      "bf16: auto\nwandb_project:\n",
      "axolotl.yaml", {});
  EXPECT_EQ(axolotl.dataset.path, (std::vector<std::string>{"a.jsonl", "b.jsonl"}));
  EXPECT_EQ(axolotl.val_set_size, 0.05);
  EXPECT_EQ(axolotl.lr_scheduler.type, "cosine");
  EXPECT_EQ(axolotl.distributed.ep_size, 2);
  EXPECT_TRUE(axolotl.dataset.train_on_prompt);
  EXPECT_EQ(axolotl.model.torch_dtype, "auto");
  const Recipe factory = parse_recipe(
      "model_name_or_path: m\ndataset: d.jsonl\nstage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 99\n",
      "factory.yaml", {});
  EXPECT_EQ(factory.packed_sequence.packed_sequence_size, 99);
}

// Every alias of the table reaches its row: an override by the alias gives the same recipe as one by the name.
TEST(Recipe, EveryAliasMeansItsKey) {
  for (const RecipeKey& key : recipe_keys()) {
    if (key.name.ends_with(".split")) continue;  // must stay empty
    std::string value = "3";
    if (std::holds_alternative<bool& (*)(Recipe&)>(key.member)) value = "true";
    if (std::holds_alternative<double& (*)(Recipe&)>(key.member)) value = "0.5";
    if (!key.range.choices.empty()) value = key.range.choices.back().name;
    const std::string file = "optimizer.lr: 0.6\nglobal_batch_size: 24\n" +
                             std::string(key.name == "val_set_size" ? "" : "validation_dataset: v\n") +
                             (key.name == "optimizer.fused_backward" ? "max_grad_norm: 0\n" : "");
    const Recipe by_name = read(file, {key.name + "=" + value});
    if (value != "true") EXPECT_NE(by_name, read(file)) << key.name;
    for (const std::string& alias : key.aliases) EXPECT_EQ(read(file, {alias + "=" + value}), by_name) << alias;
  }
}

TEST(Recipe, NoNameMeansTwoKeys) {
  std::set<std::string> names;
  for (const RecipeKey& key : recipe_keys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    for (const std::string& alias : key.aliases) EXPECT_TRUE(names.insert(alias).second) << alias;
  }
  for (const PeerForm& form : peer_forms()) EXPECT_TRUE(names.insert(form.name).second) << form.name;
  for (const std::string& name : names) {
    const PeerKey* peer = find_peer_key(name);
    EXPECT_TRUE(peer == nullptr) << name << " is also listed as not supported";
  }
}

TEST(Recipe, NumbersInEveryWriting) {
  for (const char* text : {"1e-5", "1.0e-5", "0.00001", "\"1e-5\"", "'1.0E-05'", "+1e-5"}) {
    EXPECT_EQ(read("learning_rate: " + std::string(text)).optimizer.lr, 1e-5) << text;
  }
  for (const char* text : {"3", "3.0", "\"3\"", "+3", "3e0"})
    EXPECT_EQ(read("num_epochs: " + std::string(text)).step_scheduler.num_epochs, 3) << text;
  for (const char* text : {"fast", "1e-5x", "0x10", "nan", ".nan", "inf", "1e999", "[1]", "{a: 1}", "1,5", "\"\"", "true"}) {
    expect_error("learning_rate: " + std::string(text), {"learning_rate", "a number above 0"});
  }
  for (const char* text : {"3.5", "010", "three", "1e30", "9223372036854775808", "''"}) {
    expect_error("num_epochs: " + std::string(text), {"num_epochs", "a whole number at least 0"});
  }
  expect_error("seed: -1", {"seed is \"-1\"", "a whole number at least 0"});
  expect_error("seed: 18446744073709551616", {"a whole number"});
  expect_error("packing: 2", {"true or false"});
}

TEST(Recipe, RangesAreSaid) {
  expect_error("optimizer: {lr: 0}", {"r.yaml line 3: optimizer.lr is \"0\"", "a number above 0"});
  expect_error("adam_beta1: 1", {"adam_beta1 (optimizer.beta1) is \"1\"", "a number from 0 to below 1"});
  expect_error("betas: [0.9]", {"list of two numbers"});
  expect_error("betas: [0.9, 1.5]", {"from 0 to below 1"});
  expect_error("cutoff_len: 1", {"a whole number at least 2"});
  expect_error("lr_scheduler_type: polynomial", {"\"polynomial\"", "one of linear, cosine, constant, constant_with_warmup"});
  expect_error("nonfinite: ignore", {"one of stop, skip"});
  expect_error("warmup_ratio: 1.5", {"from 0 to below 1"});
  expect_error("max_steps: -2", {"at least -1"});
  expect_error("output_dir: [a]", {"a list of 1", "a text"});
  expect_error("validation_dataset: {path: [{path: a, type: alpaca}]}",
               {"validation_dataset.path", "a text or a list of texts"});
}

TEST(Recipe, UnknownKeysNameTheNearest) {
  expect_error("learning_rat: 1", {"r.yaml line 3: learning_rat is not a known key", "did you mean learning_rate?"});
  expect_error("optimizer: {learning_rate: 1}", {"optimizer.learning_rate", "did you mean optimizer.lr?"});
  expect_error("step_scheduler: {max_step: 1}", {"did you mean step_scheduler.max_steps?"});
  expect_error("max_grad_norn: 1", {"did you mean max_grad_norm?"});
  expect_error("eps: 1", {"did you mean optimizer.eps?"});
  expect_error("zzzzzzzzzzzzzzzzzzzz: 1", {"zzzzzzzzzzzzzzzzzzzz is not a known key;"});
  expect_error("optimizer: {zz: {y: 1}}", {"optimizer.zz is not a known key"});
  expect_error("", {"--optimizer.lrr is not a known key", "did you mean optimizer.lr?"}, {"--optimizer.lrr=1"});
}

TEST(Recipe, KeysOfPeersThatAreNotSupportedYet) {
  for (const char* text :
       {"lora_r: 8", "lora_target: all", "peft: {dim: 8, alpha: 32}", "fp8: true", "deepspeed: ds.json", "fsdp: full_shard",
        "fsdp_config: {a: 1}", "load_in_4bit: true", "fp16: true", "push_to_hub: true", "eval_strategy: epoch",
        "optim: adafactor", "optimizer: muon", "stage: dpo", "finetuning_type: lora", "distributed: {tp_size: 2}"}) {
    expect_error(text, {"is not supported yet"});
  }
  EXPECT_NO_THROW(read("fp16: false\nload_in_4bit: false\npush_to_hub: False\ndistributed: {tp_size: 1}\ndeepspeed:\n"));
}

TEST(Recipe, AKeyTwice) {
  expect_error("seed: 1\nseed: 2", {"\"seed\" is given twice, on lines 3 and 4"});
  expect_error("seed: 1\nseed: 1", {"given twice"});
  expect_error("optimizer:\n  lr: 1\n  eps: 1\n  lr: 2", {"\"lr\" is given twice, on lines 4 and 6"});
  expect_error("optimizer: {lr: 1}\noptimizer: {eps: 1}", {"\"optimizer\" is given twice"});
  expect_error("optimizer: {lr: 1}\noptimizer.lr: 1", {"\"optimizer.lr\" is given twice"});
  expect_error("validation_dataset: {path: [{path: a, path: b}]}", {"\"path\" is given twice"});
}

TEST(Recipe, AliasesMustAgree) {
  expect_error("learning_rate: 1e-4\noptimizer: {lr: 1e-5}", {"optimizer.lr is given twice with different values",
                                                              "r.yaml line 3: learning_rate", "r.yaml line 4: optimizer.lr"});
  EXPECT_EQ(read("learning_rate: 1e-4\noptimizer: {lr: 0.0001}").optimizer.lr, 1e-4);
  expect_error("betas: [0.9, 0.95]\nadam_beta2: 0.999",
               {"optimizer.beta2 is given twice", "line 3: betas", "line 4: adam_beta2"});
  expect_error("warmup_steps: 10\nwarmup_ratio: 0.1", {"lr_scheduler.warmup_steps is given twice"});
  expect_error("bf16: true\ntorch_dtype: float32", {"model.torch_dtype is given twice"});
  expect_error("", {"given twice", "--learning_rate", "--optimizer.lr"}, {"learning_rate=1", "optimizer.lr=2"});
}

TEST(Recipe, OverridesReplaceTheFile) {
  const std::string file = "learning_rate: 1e-4\nmax_steps: 5\nresume_from_checkpoint: auto\n";
  EXPECT_EQ(read(file, {"optimizer.lr=2e-5"}).optimizer.lr, 2e-5);
  EXPECT_EQ(read(file, {"--optimizer.lr=2e-5", "--lr_scheduler.type=cosine"}).lr_scheduler.type, "cosine");
  EXPECT_EQ(read(file, {"--max-steps=7"}).step_scheduler.max_steps, 7);
  EXPECT_EQ(read(file, {"max_steps=7", "max_steps=8"}).step_scheduler.max_steps, 8);
  EXPECT_EQ(read(file, {"max_steps="}).step_scheduler.max_steps, -1);
  EXPECT_EQ(read(file, {"checkpoint.restore_from="}).checkpoint.restore_from, "");
  EXPECT_EQ(read(file, {"dataset.path=[x.jsonl, 'y=z.jsonl']"}).dataset.path,
            (std::vector<std::string>{"x.jsonl", "y=z.jsonl"}));
  EXPECT_EQ(read(file, {"dataset.path=a=b.jsonl"}).dataset.path, std::vector<std::string>{"a=b.jsonl"});
  EXPECT_EQ(read(file, {"optimizer={lr: 3e-5, betas: [0.5, 0.6]}"}).optimizer.beta2, 0.6);
  expect_error(file, {"write it as --key=value"}, {"optimizer.lr"});
  expect_error(file, {"write it as --key=value"}, {"=3"});
  expect_error(file, {"override --optimizer.lr is not valid YAML"}, {"optimizer.lr=[1"});
  expect_error(file, {"override --optimizer.lr", "a number above 0"}, {"optimizer.lr=-1"});
}

TEST(Recipe, ArgumentsBecomeOverrides) {
  EXPECT_EQ(overrides_of_arguments(
                {"--resume_from_checkpoint", "auto", "--optimizer.lr=1e-5", "--max_steps", "-1", "--bf16", "--shuffle"}),
            (std::vector<std::string>{"--resume_from_checkpoint=auto", "--optimizer.lr=1e-5", "--max_steps=-1", "--bf16=true",
                                      "--shuffle=true"}));
  EXPECT_TRUE(overrides_of_arguments({}).empty());
  EXPECT_THROW(overrides_of_arguments({"auto"}), UserError);
  EXPECT_THROW(overrides_of_arguments({"--lr=1", "2"}), UserError);
  EXPECT_THROW(overrides_of_arguments({"--"}), UserError);
  EXPECT_EQ(read("", overrides_of_arguments({"--resume_from_checkpoint", "auto"})).checkpoint.restore_from, "auto");
}

TEST(Recipe, ARecipeIsData) {
  for (const char* text : {"optimizer: {_target_: os.system}", "_target_: os.system", "loss_fn: torch.nn.CrossEntropyLoss",
                           "peft: {_target_: a}", "validation_dataset: {path: [{_target_: a}]}"}) {
    expect_error(text, {"a recipe is data"});
  }
  expect_error("output_dir: !!python/object/apply:os.system [ls]", {"line 3", "a recipe is data"});
  expect_error("output_dir: !shell ls", {"!shell", "a recipe is data"});
  expect_error("seed: !!int 3\noutput_dir: !!str 3\nmax_steps: !!python/name:x 3", {"python/name"});
  EXPECT_EQ(read("seed: !!int 3\noutput_dir: !!str 3").seed, 3U);
  expect_error("", {"a recipe is data"}, {"optimizer._target_=os.system"});
}

TEST(Recipe, TextThatIsNoRecipe) {
  EXPECT_NE(error_of("a: [", {}, "").find("r.yaml is not valid YAML: line 1"), std::string::npos);
  EXPECT_NE(error_of("- a\n- b\n", {}, "").find("a recipe is a map"), std::string::npos);
  EXPECT_NE(error_of("just words", {}, "").find("a recipe is a map"), std::string::npos);
  EXPECT_NE(error_of("a: 1\n---\nb: 2\n", {}, "").find("2 YAML documents"), std::string::npos);
  EXPECT_NE(error_of("", {}, "").find("pretrained_model_name_or_path is missing"), std::string::npos);
  expect_error("optimizer: 3", {"an optimizer other than AdamW"});
  expect_error("step_scheduler: 3", {"step_scheduler is \"3\"", "it is a section"});
  expect_error("step_scheduler: [1]", {"it is a section"});
  expect_error("? [a, b]\n: 3", {"a key must be a plain name"});
  expect_error("<<: {seed: 1}", {"merge keys"});
  expect_error("output_dir: &a [*a]", {"this is no recipe"});
  EXPECT_THROW(read_recipe("/nonexistent/recipe.yaml", {}), UserError);
  std::string deep;
  for (int i = 0; i < 40; ++i) deep += "{a: ";
  EXPECT_THROW(read("x: " + deep + "1" + std::string(40, '}')), UserError);
  // Aliases of aliases: 10^8 values when written out.
  std::string bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n";
  for (int i = 1; i < 8; ++i) {
    const std::string before = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [";
    for (int j = 0; j < 10; ++j) bomb += (j > 0 ? "," : "") + before;
    bomb += "]\n";
  }
  expect_error(bomb, {"this is no recipe"});
}

TEST(Recipe, NullSaysNothing) {
  EXPECT_EQ(read("optimizer:\nmax_steps: null\nsave_total_limit: ~\nvalidation_dataset:\n"), read(""));
  EXPECT_EQ(read("output_dir: \"null\"").output_dir, "null");
}

TEST(Recipe, ValuesThatDoNotGoTogether) {
  expect_error("num_epochs: 0", {"the run has no length"});
  EXPECT_NO_THROW(read("num_epochs: 0\nmax_steps: 3"));
  expect_error("eval_steps: 10", {"val_every_steps is 10", "no validation data"});
  EXPECT_NO_THROW(read("eval_steps: 10\nval_set_size: 0.1"));
  expect_error("val_set_size: 0.1\nvalidation_dataset: v.jsonl", {"both validation_dataset and val_set_size"});
  expect_error("val_set_size: 1.5", {"a whole number"});
  expect_error("global_batch_size: 10\nmicro_batch_size: 4", {"is 10", "local_batch_size (4)", "try 12"});
  expect_error("global_batch_size: 12\nmicro_batch_size: 4\ngradient_accumulation_steps: 2",
               {"gradient_accumulation_steps (2)", "try 16"});
  expect_error("lr_scheduler_type: constant\nwarmup_steps: 5", {"constant_with_warmup"});
  expect_error("min_lr: 1", {"min_lr is 1", "at most optimizer.lr"});
  expect_error("warmup_steps: 10.5", {"a whole number"});
  expect_error("dataset.split: train", {"not supported yet"});
  expect_error("output_dir: ''", {"output_dir is empty"});
  expect_error("fused_backward: true", {"max_grad_norm is 1", "set max_grad_norm to 0"});
  expect_error("fused_backward: true\nmax_grad_norm: 0\nnonfinite: skip", {"cannot be skipped", "set nonfinite to stop"});
  EXPECT_NO_THROW(read("fused_backward: true\nmax_grad_norm: 0"));
}

TEST(Recipe, ValidationIsReadAsTrainingUnlessSaid) {
  const std::string file = "dataset: {format: text, train_on_prompt: true, chat_template: t}\nvalidation_dataset: {path: v";
  const Recipe same = parse_recipe("base_model: m\ntrain_file: d\n" + file + "}", "r.yaml", {});
  EXPECT_EQ(same.validation_dataset.format, "text");
  EXPECT_TRUE(same.validation_dataset.train_on_prompt);
  EXPECT_EQ(same.validation_dataset.chat_template, "t");
  const Recipe other = parse_recipe(
      "base_model: m\ntrain_file: d\n" + file + ", format: messages, train_on_prompt: false, chat_template: ''}", "r.yaml", {});
  EXPECT_EQ(other.validation_dataset.format, "messages");
  EXPECT_FALSE(other.validation_dataset.train_on_prompt);
  EXPECT_EQ(other.validation_dataset.chat_template, "");
  EXPECT_EQ(parse_recipe(to_yaml(other), "y", {}), other);
}

TEST(Recipe, BatchSizesForAWorld) {
  const auto global = [](const std::string& text, int64_t world_size) {
    return resolve_for_world(read(text), world_size).step_scheduler.global_batch_size;
  };
  EXPECT_EQ(global("", 1), 8);
  EXPECT_EQ(global("", 8), 8);
  EXPECT_THROW(global("", 3), UserError);
  EXPECT_EQ(global("per_device_train_batch_size: 3", 2), 6);
  EXPECT_EQ(global("gradient_accumulation_steps: 5", 2), 10);
  EXPECT_EQ(global("gradient_accumulation_steps: 5\nmicro_batch_size: 2\nglobal_batch_size: 20", 2), 20);
  EXPECT_THROW(global("gradient_accumulation_steps: 5\nmicro_batch_size: 2\nglobal_batch_size: 20", 4), UserError);
  EXPECT_THROW(global("ep_size: 4", 2), UserError);
  const std::string fused = "fused_backward: true\nmax_grad_norm: 0\nmicro_batch_size: 2\n";
  EXPECT_EQ(global(fused + "gradient_accumulation_steps: 1", 4), 8);
  EXPECT_THROW(global(fused + "gradient_accumulation_steps: 2", 4), UserError);
  const Recipe resolved = resolve_for_world(read("gradient_accumulation_steps: 4"), 2);
  EXPECT_EQ(resolve_for_world(parse_recipe(to_yaml(resolved), "again", {}), 4).step_scheduler.global_batch_size,
            8);  // another world, the same run
}

TEST(Recipe, YamlReadsBackExactly) {
  Recipe r = read("");
  EXPECT_EQ(parse_recipe(to_yaml(r), "y", {}), r);
  r.model.pretrained_model_name_or_path = "a \"b\"\\ c\n\t\x01 #: ü 🙂 'x'";
  r.model.output_router_logits_set = true;
  r.model.output_router_logits = true;
  r.model.router_aux_loss_coef = 0.1 + 0.2;
  r.dataset.path = {"yes", "null", "1e5", "-", "[x]", "", "*a", "2024-01-01", " lead", "a, b", "~"};
  r.dataset.path.erase(r.dataset.path.begin() + 5);  // an empty name is refused
  r.optimizer.lr = 1.0 / 3.0;
  r.optimizer.eps = 5e-324;
  r.optimizer.weight_decay = 1.7976931348623157e308;
  r.seed = UINT64_MAX;
  r.step_scheduler.max_steps = INT64_MAX;
  r.distributed.activation_checkpointing = "full";
  r.output_dir = "true";
  EXPECT_EQ(parse_recipe(to_yaml(r), "y", {}), r) << to_yaml(r);
  const Recipe from_aliases =
      read("per_device_train_batch_size: 4\nbetas: [0.1, 0.2]\nwarmup_ratio: 0.1\noutput_router_logits: false");
  EXPECT_EQ(parse_recipe(to_yaml(from_aliases), "y", {}), from_aliases);
}

TEST(Recipe, JsonFile) {
  const auto path = std::filesystem::path(testing::TempDir()) / "headrace_recipe.json";
  write_file_atomically(path,
                        "{\n\t\"model_name_or_path\": \"m\\/n\",\t\"dataset\": [\"d\"], \"optimizer\": {\"lr\": 1e-5, "
                        "\"betas\": [0.9, 0.95]}, \"seed\": null}");
  const Recipe r = read_recipe(path.string(), {"seed=3"});
  EXPECT_EQ(r.model.pretrained_model_name_or_path, "m/n");
  EXPECT_EQ(r.optimizer.lr, 1e-5);
  EXPECT_EQ(r.optimizer.beta2, 0.95);
  EXPECT_EQ(r.seed, 3U);
  write_file_atomically(path, R"({"optimizer": {"lr": 1, "lr": 2}})");
  EXPECT_THROW(read_recipe(path.string(), {}), UserError);
}

TEST(Recipe, ExamplesAreValid) {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator(source_file("recipes"))) {
    const Recipe r = read_recipe(file.path().string(), {});
    EXPECT_NO_THROW(resolve_for_world(r, r.distributed.nproc_per_node)) << file.path();
    ++count;
  }
  EXPECT_GE(count, 2);
}

TEST(Recipe, DocumentHoldsTheTable) {
  const std::string begin = "<!-- keys begin -->\n", end = "<!-- keys end -->";
  const auto path = source_file("docs/recipe.md");
  std::string document = read_file(path);
  const std::size_t from = document.find(begin), to = document.find(end);
  ASSERT_NE(from, std::string::npos);
  ASSERT_NE(to, std::string::npos);
  if (std::getenv("HEADRACE_UPDATE_DOCS") != nullptr) {
    document.replace(from + begin.size(), to - from - begin.size(), recipe_key_table());
    write_file_atomically(path, document);
  } else {
    EXPECT_EQ(document.substr(from + begin.size(), to - from - begin.size()), recipe_key_table())
        << "run this test with HEADRACE_UPDATE_DOCS=1 to write the table into docs/recipe.md";
  }
}

}  // namespace headrace
