"""What is loaded and what is written: whole checkpoints or one sentence, tied and untied heads, what transformers reads."""

import json
import resource
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import assert_same_checkpoints, edit_json, edit_weights, engine_logits, timeless

IDS = torch.tensor([5, 77, 200, 3, 3, 150, 42, 9, 120])


def transformers_logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with torch.no_grad():
        return model(IDS[None]).logits[0]


def assert_logits_equal_transformers(folder, tmp_path):
    ours, theirs = engine_logits(folder, IDS, tmp_path), transformers_logits(folder)
    assert (ours - theirs).norm() / theirs.norm() < 1e-5  # float32, other order of sums


# ---- tied and untied heads


@pytest.mark.parametrize(
    "family, tied",
    [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True), ("mixtral", False), ("llama", True), ("qwen3", False)],
)
def test_head_is_trained_as_configured_and_read_by_transformers(bench, family, tied):
    bench.make_model(family, tie_word_embeddings=tied)
    bench.finetune(step_scheduler__max_steps=3).ok()
    folder = bench.checkpoint(3)
    weights = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in weights) == (not tied)
    before = load_file(bench.model / "model.safetensors")
    assert weights.keys() == before.keys()
    # Of the experts only those that a token chose.
    unchanged = [name for name in weights if torch.equal(weights[name], before[name])]
    assert not [name for name in unchanged if ".experts." not in name], unchanged
    assert len(unchanged) < 0.5 * len(weights)
    if not tied:
        assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    config, original = (json.loads((f / "config.json").read_text()) for f in (folder, bench.model))
    assert config["tie_word_embeddings"] is tied
    assert {**original, "dtype": config["dtype"]} == config
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    assert_logits_equal_transformers(folder, bench.folder)


def test_tied_head_does_not_drift_over_a_resume(bench):
    bench.make_model(tie_word_embeddings=True)
    settings = dict(dataset__limit=2, packed_sequence__packing=False, shuffle=False)  # the same batch at each step
    bench.finetune("unbroken", step_scheduler__max_steps=4, **settings).ok()
    bench.finetune("resumed", step_scheduler__max_steps=3, **settings).ok()
    bench.finetune("resumed", ["--resume_from_checkpoint=auto"], step_scheduler__max_steps=4, **settings).ok()
    assert_same_checkpoints(bench.checkpoint(4, "unbroken"), bench.checkpoint(4, "resumed"))
    assert timeless(bench.lines("unbroken")) == timeless(bench.lines("resumed"))
    assert bench.losses("resumed")[3] < bench.losses("resumed")[0]


def test_head_that_differs_from_its_embedding_unties(bench):
    bench.make_model(tie_word_embeddings=True)
    edit_weights(
        bench.model, lambda w: w.update({"lm_head.weight": torch.flip(w["model.embed_tokens.weight"], [0]).contiguous()})
    )
    result = bench.finetune(step_scheduler__max_steps=1).ok()
    assert "warning" in result.err and "loaded untied" in result.err
    weights = load_file(bench.checkpoint(1) / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert json.loads((bench.checkpoint(1) / "config.json").read_text())["tie_word_embeddings"] is False
    assert_logits_equal_transformers(bench.checkpoint(1), bench.folder)


def test_tied_file_with_a_copy_of_the_head_stays_tied(bench):
    bench.make_model(tie_word_embeddings=True)
    edit_weights(bench.model, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    result = bench.finetune(step_scheduler__max_steps=1).ok()
    assert "warning" not in result.err
    assert "lm_head.weight" not in load_file(bench.checkpoint(1) / "model.safetensors")
    assert "lm_head" not in bench.program("info", bench.model).ok().out


# ---- loads that must fail


def rename_experts(weights):
    for name in [name for name in weights if ".experts." in name]:
        weights[name.replace(".experts.", ".specialists.")] = weights.pop(name)


def drop(name):
    return lambda weights: weights.pop(name)


def cut_columns(name):
    return lambda weights: weights.update({name: weights[name][:, :-1].contiguous()})


NORM, EXPERT = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.experts.2.down_proj.weight"
BROKEN = {
    "renamed experts": (rename_experts, ["experts.0.gate_proj.weight", "specialists.0"]),
    "missing norm": (drop(NORM), [NORM]),
    "missing expert": (drop(EXPERT), [EXPERT]),
    "missing untied head": (drop("lm_head.weight"), ["lm_head.weight"]),
    "wrong shape": (cut_columns(EXPERT), [EXPERT, "model.safetensors", "[32, 23]", "[32, 24]"]),
    "integers": (lambda w: w.update({NORM: w[NORM].to(torch.int8)}), [NORM, "I8"]),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_tensors_never_written_fail_the_load(bench, fault):
    bench.make_model()
    change, texts = BROKEN[fault]
    edit_weights(bench.model, change)
    bench.finetune().refused(str(bench.model), *texts)
    bench.program("info", bench.model).refused(*texts)
    assert bench.checkpoints() == [] and not (bench.folder / "out/training.jsonl").exists()


def test_damaged_files_fail_the_load(bench):
    bench.make_model()
    file = bench.model / "model.safetensors"
    whole = file.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:100], b"", whole + b"more"):
        file.write_bytes(part)
        bench.finetune().refused("model.safetensors")
    file.unlink()
    bench.finetune().refused(str(bench.model))
    (bench.model / "config.json").write_text("{")
    bench.finetune().refused("config.json")
    (bench.model / "config.json").unlink()
    bench.finetune().refused("config.json")
    assert bench.checkpoints() == []


def test_missing_shard_fails_the_load(bench):
    bench.make_model()
    model = AutoModelForCausalLM.from_pretrained(bench.model)
    (bench.model / "model.safetensors").unlink()
    model.save_pretrained(bench.model, max_shard_size="60KB")
    bench.finetune(step_scheduler__max_steps=1).ok()
    shards = sorted(bench.model.glob("model-0000*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    bench.finetune("other").refused(shards[1].name)
    assert bench.checkpoints("other") == []


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(model_type="gpt5"), "gpt5"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(num_experts_per_tok=9), "9"),
        (dict(num_attention_heads=3), "num_attention_heads"),
        (dict(num_hidden_layers="two"), "num_hidden_layers"),
        (dict(mlp_only_layers="all"), "mlp_only_layers"),
        (dict(attention_dropout=0.1), "attention_dropout"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (dict(vocab_size=100), "99"),
    ],
)
def test_config_that_cannot_be_trained_is_refused(bench, change, text):
    bench.make_model()
    edit_json(bench.model / "config.json", **change)
    bench.finetune().refused(text)
    assert bench.checkpoints() == []


# ---- saves


def test_transformers_generates_from_a_checkpoint(bench):
    bench.make_model()
    (bench.model / "generation_config.json").write_text(json.dumps({"eos_token_id": 259, "max_new_tokens": 5}))
    (bench.model / "README.md").write_text("a model")
    bench.finetune(step_scheduler__max_steps=1).ok()
    folder = bench.checkpoint(1)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        assert (folder / name).read_bytes() == (bench.model / name).read_bytes(), name
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "copy"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_unknown_tensors_are_carried(bench):
    bench.make_model()
    extra = torch.arange(7, dtype=torch.int64)
    edit_weights(bench.model, lambda w: w.update({"vision.table": extra}))
    result = bench.finetune(save_steps=1, step_scheduler__max_steps=2).ok()
    assert "vision.table" in result.err and "vision.table" in bench.program("info", bench.model).ok().out
    assert torch.equal(load_file(bench.checkpoint(2) / "model.safetensors")["vision.table"], extra)


def test_limit_keeps_the_newest_and_the_best(bench):
    bench.make_model()
    # A learning rate that grows out of hand: the first checkpoint stays the best.
    settings = dict(save_steps=1, eval_steps=1, val_set_size=2, optimizer__lr=0.3, optimizer__max_grad_norm=0, nonfinite="skip")
    bench.finetune(step_scheduler__max_steps=5, save_total_limit=2, **settings).ok()
    validations = {line["step"]: line["val_loss"] for line in bench.lines(name="validation.jsonl")}
    assert list(validations) == [0, 1, 2, 3, 4, 5]
    best = min((loss, step) for step, loss in validations.items() if step > 0 and loss is not None)[1]
    out = bench.folder / "out"
    assert (out / "latest").resolve() == bench.checkpoint(5) and (out / "best").resolve() == bench.checkpoint(best)
    assert set(bench.checkpoints()) == {"checkpoint-5", f"checkpoint-{best}" if best != 5 else "checkpoint-4"}
    assert (out / "latest").is_symlink() and not (out / "latest").readlink().is_absolute()


def test_best_is_a_checkpoint_even_when_most_validations_are_not_saved(bench):
    bench.make_model()
    bench.finetune(save_steps=2, eval_steps=1, val_set_size=2, step_scheduler__max_steps=4).ok()
    losses = {line["step"]: line["val_loss"] for line in bench.lines(name="validation.jsonl")}
    best = min((2, 4), key=lambda step: losses[step])
    assert (bench.folder / "out/best").resolve() == bench.checkpoint(best)


def small_files_only():
    """As a full disk: writes beyond 60 kB of a file fail."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def test_full_disk_leaves_earlier_checkpoints_intact(bench):
    bench.make_model()
    bench.finetune(step_scheduler__max_steps=2).ok()
    files = {file: file.read_bytes() for file in bench.checkpoint(2).rglob("*") if file.is_file()}
    resume = ["--resume_from_checkpoint=auto"]
    assert max(len(content) for content in files.values()) > 60_000
    bench.finetune(arguments=resume, popen=dict(preexec_fn=small_files_only)).refused("model.safetensors", "cannot write")
    assert bench.checkpoints() == ["checkpoint-2"]
    assert {file: file.read_bytes() for file in files} == files
    assert (bench.folder / "out/latest").resolve() == bench.checkpoint(2)
    bench.finetune(arguments=resume).ok()
    assert (bench.folder / "out/latest").resolve() == bench.checkpoint(4)


def test_output_folder_that_cannot_be_made_is_refused(bench):
    bench.make_model()
    (bench.folder / "file").write_text("")
    for place in (bench.folder / "file", bench.folder / "file/out", "/proc/headrace"):
        bench.finetune(output_dir=str(place)).refused(str(place))
    assert (bench.folder / "file").read_text() == ""


def test_unfinished_save_is_never_picked_up(bench):
    bench.make_model()
    bench.finetune("unbroken").ok()
    bench.finetune(step_scheduler__max_steps=2).ok()
    # As kill -9 leaves it: the folder of the save under its temporary name, its weights cut.
    partial = bench.folder / "out/.checkpoint-4.partial"
    shutil.copytree(bench.checkpoint(2), partial)
    (partial / "model.safetensors").write_bytes((partial / "model.safetensors").read_bytes()[:1000])
    (bench.folder / "out/latest").unlink()
    result = bench.finetune(arguments=["--resume_from_checkpoint=auto"]).ok()
    assert "at step 2" in result.err
    assert_same_checkpoints(bench.checkpoint(4), bench.checkpoint(4, "unbroken"))
    assert bench.checkpoints() == ["checkpoint-2", "checkpoint-4"]


def test_disabled_checkpoints(bench):
    bench.make_model()
    bench.finetune(checkpoint__enabled=False).ok()
    assert bench.checkpoints() == [] and len(bench.lines()) == 4
