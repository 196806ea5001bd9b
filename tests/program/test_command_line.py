"""The program's face: recipes and overrides, files of a run, one sentence and exit code 2 for what is wrong, info."""

import json

import pytest
import yaml
from safetensors.torch import load_file

from conftest import MODELS, records, write_jsonl


def test_run_writes_its_files(bench):
    bench.make_model()
    held_out = write_jsonl(bench.folder / "held_out.jsonl", records(3, seed=9))
    result = bench.finetune(validation_dataset__path=held_out, eval_steps=2).ok()
    out = bench.folder / "out"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = bench.lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for key in ("epoch", "loss", "grad_norm", "lr", "tokens_per_s", "mem_gib", "num_tokens", "num_trained_tokens", "time"):
        assert all(key in line for line in lines), key
    validations = bench.lines(name="validation.jsonl")
    assert [line["step"] for line in validations] == [0, 2, 4] and all(line["val_loss"] > 0 for line in validations)
    assert "step 4/4 | epoch 1.00 | loss " in result.err and " | ETA 0:00:00" in result.err
    assert f"held-out loss {validations[0]['val_loss']:.4f} -> {validations[2]['val_loss']:.4f}" in result.out
    assert str(bench.checkpoint(4)) in result.out and "pipeline" in result.out
    assert sorted(entry.name for entry in out.iterdir()) == sorted(
        ["best", "checkpoint-4", "data", "latest", "loss.png", "recipe.yaml", "training.jsonl", "validation.jsonl"]
    )


def test_resolved_recipe_resolves_to_itself(bench):
    bench.make_model()
    settings = dict(step_scheduler__global_batch_size=None, gradient_accumulation_steps=2, step_scheduler__max_steps=1)
    bench.finetune(**settings).ok()
    first = (bench.folder / "out/recipe.yaml").read_text()
    assert yaml.safe_load(first)["step_scheduler"]["global_batch_size"] == 2
    copy = bench.folder / "again.yaml"
    copy.write_text(first)
    bench.program("finetune", copy).ok()
    assert (bench.folder / "out/recipe.yaml").read_text() == first


def test_overrides_in_both_forms_and_flags(bench):
    bench.make_model()
    arguments = ["--learning_rate", "0.25", "--step_scheduler.max_steps=1", "--seed", "7", "--gradient_checkpointing"]
    bench.finetune(arguments=arguments).ok()
    recipe = yaml.safe_load((bench.folder / "out/recipe.yaml").read_text())
    assert recipe["optimizer"]["lr"] == 0.25 and recipe["seed"] == 7 and recipe["step_scheduler"]["max_steps"] == 1
    assert recipe["distributed"]["activation_checkpointing"] == "full"
    assert bench.lines()[0]["lr"] == 0.25


@pytest.mark.parametrize(
    "arguments, texts",
    [
        (["--optimizer.lrr=1"], ["optimizer.lrr", "optimizer.lr"]),
        (["--unknown.flag"], ["unknown.flag"]),
        (["stray"], ["stray"]),
        (["--optimizer.lr=fast"], ["optimizer.lr", "fast"]),
        (["--max_steps=-1", "--num_epochs=0"], ["num_epochs", "max_steps"]),
        (["--model.pretrained_model_name_or_path=nowhere"], ["nowhere"]),
        (["--dataset.path=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--global_batch_size=3", "--local_batch_size=2"], ["3", "2"]),
        (["--device=cuda", "--_target_=os.system"], ["_target_"]),
        (["--nproc_per_node=0"], ["nproc_per_node"]),
        (["--nproc_per_node=2"], ["nproc_per_node", "one process"]),
    ],
)
def test_wrong_arguments_are_one_sentence(bench, arguments, texts):
    bench.make_model()
    bench.finetune(arguments=arguments).refused(*texts)
    out = bench.folder / "out"
    assert bench.checkpoints() == [] and not (out / "recipe.yaml").exists() and not (out / "training.jsonl").exists()


def test_recipes_are_data(bench):
    bench.make_model()
    text = bench.write_recipe().read_text()
    marker = bench.folder / "executed"
    for addition, what in (
        (f"dataset2:\n  _target_: os.system\n  command: touch {marker}\n", "_target_"),
        (f"seed: !!python/object/apply:os.system ['touch {marker}']\n", "python"),
        ("optimiser:\n  lr: 1\n", "optimizer"),
        ("[", "recipe.yaml"),
    ):
        bench.recipe.write_text(text + addition)
        bench.program("finetune", bench.recipe).refused(what)
    assert not marker.exists()
    bench.program("finetune", bench.folder / "none.yaml").refused("none.yaml")


def test_broken_data_is_one_sentence(bench):
    bench.make_model()
    for text, what in (
        ("", "train.jsonl"),
        ("{\n", "line 1"),
        ('{"unheard": 1}\n', "train.jsonl"),
        ('{"input_ids": [1, 100000], "labels": [1, 2]}\n', "100000"),
    ):
        (bench.folder / "train.jsonl").write_text(text)
        bench.finetune().refused(what)
    assert not (bench.folder / "out/training.jsonl").exists()
    assert not list(bench.prepared.glob("*prepare*"))


def test_usage_errors_exit_with_2(bench):
    for arguments in ([], ["finetune"], ["train", "x"], ["info"], ["info", "nowhere"]):
        assert bench.program(*arguments).code == 2, arguments
    assert bench.program("--help").code == 0 and "finetune" in bench.program("--help").out


def test_prepare_alone_makes_the_shards(bench):
    bench.make_model()
    recipe = bench.write_recipe()
    folder = bench.program("prepare", recipe, "--seed", "42").ok().out.strip()
    assert (
        json.loads((bench.prepared / folder.rsplit("/", 1)[1] / "manifest.json").read_text())["splits"]["train"][
            "num_documents"
        ]
        == 10
    )
    assert bench.program("prepare", recipe).ok().out.strip() == folder and bench.checkpoints() == []


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_info_agrees_with_the_checkpoint(bench, family, tied):
    bench.make_model(family, tie_word_embeddings=tied)
    weights = load_file(bench.model / "model.safetensors")
    out = bench.program("info", bench.model).ok().out
    total = sum(tensor.numel() for tensor in weights.values())
    idle = sum(tensor.numel() for name, tensor in weights.items() if ".experts." in name) // 2  # 2 of 4
    assert f"family        {family} (" in out and ("tied embeddings" in out) == tied
    assert f"parameters    {total / 1e6:.3f} million, {(total - idle) / 1e6:.3f} million active" in out
    assert f"{len(weights)} ({len(weights)} x F32)" in out and "loads         as float32" in out
    assert ("experts       4 of width" in out) == (idle > 0)
    assert "not used" not in out and "lm_head" not in out
