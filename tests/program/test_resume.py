"""Optimizer, schedule and data order go on where they stopped: a resumed run is the unbroken run, bit for bit."""

import json
import shutil
import signal
import subprocess

import pytest
import torch

from conftest import PROGRAM, assert_same_checkpoints, records, timeless, write_jsonl

# 10 documents, 2 rows a step, no packing: 5 steps an epoch, so steps 4 and 6 lie on both sides of an epoch boundary.
ACROSS_EPOCHS = dict(
    packed_sequence__packing=False, lr_scheduler__type="cosine", lr_scheduler__warmup_steps=2, optimizer__weight_decay=0.1
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_run_is_the_unbroken_run(bench, dtype):
    bench.make_model(dtype=dtype)
    settings = dict(ACROSS_EPOCHS, max_steps=8, step_scheduler__max_steps=None, save_steps=4, val_set_size=2, eval_steps=2)
    bench.finetune("unbroken", **settings).ok()
    # The same run after a crash behind step 4: its later checkpoint is gone, its log has lines beyond the checkpoint.
    shutil.copytree(bench.folder / "unbroken", bench.folder / "resumed", symlinks=True)
    shutil.rmtree(bench.checkpoint(8, "resumed"))
    (bench.folder / "resumed/latest").unlink()
    result = bench.finetune("resumed", ["--resume_from_checkpoint", "auto"], **settings).ok()
    assert "resumed from" in result.err and "at step 4" in result.err
    assert_same_checkpoints(bench.checkpoint(8, "unbroken"), bench.checkpoint(8, "resumed"))
    assert timeless(bench.lines("unbroken")) == timeless(bench.lines("resumed"))
    for name in ("validation.jsonl",):
        assert bench.lines("unbroken", name) == bench.lines("resumed", name)
    assert [line["step"] for line in bench.lines("resumed")] == list(range(1, 9))
    assert int(bench.lines("resumed")[3]["epoch"]) != int(bench.lines("resumed")[7]["epoch"])
    before, after = bench.checkpoint(4, "resumed"), bench.checkpoint(8, "resumed")
    assert (before / "model.safetensors").read_bytes() != (after / "model.safetensors").read_bytes()


def test_two_steps_then_two_more_are_four(bench):
    bench.make_model()
    bench.finetune("four").ok()
    bench.finetune("two", max_steps=2, step_scheduler__max_steps=None).ok()
    bench.finetune("two", ["--checkpoint.restore_from", str(bench.checkpoint(2, "two"))]).ok()
    assert_same_checkpoints(bench.checkpoint(4, "four"), bench.checkpoint(4, "two"))
    assert timeless(bench.lines("four")) == timeless(bench.lines("two"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_at_a_step_boundary_and_the_run_goes_on(bench, number):
    bench.make_model()
    settings = dict(packed_sequence__packing=False, step_scheduler__max_steps=400)
    recipe = bench.write_recipe("stopped", **{key.replace("__", "."): value for key, value in settings.items()})
    process = subprocess.Popen([PROGRAM, "finetune", str(recipe)], stderr=subprocess.PIPE, text=True, env=bench.environment())
    for line in process.stderr:
        if "step 3/400" in line:
            process.send_signal(number)
            break
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 0, err
    step = bench.lines("stopped")[-1]["step"]
    assert 3 <= step < 400 and bench.checkpoints("stopped") == [f"checkpoint-{step}"]
    assert f"stopped after step {step}" in err
    end = step + 3
    bench.finetune("stopped", ["--resume_from_checkpoint", "auto", f"--max_steps={end}"], packed_sequence__packing=False).ok()
    bench.finetune("unbroken", [f"--max_steps={end}"], packed_sequence__packing=False).ok()
    assert_same_checkpoints(bench.checkpoint(end, "unbroken"), bench.checkpoint(end, "stopped"))
    assert timeless(bench.lines("unbroken")) == timeless(bench.lines("stopped"))


def test_a_run_of_other_settings_is_refused_and_changes_nothing(bench):
    bench.make_model()
    bench.finetune(step_scheduler__max_steps=2).ok()
    folder = bench.folder / "out"
    state = lambda: {
        str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and "data/" not in str(f)
    }
    before = state()
    resume = ["--resume_from_checkpoint", "auto"]
    bench.finetune(arguments=resume, seed=7).refused("seed 42", "7", "checkpoint-2")
    bench.finetune(arguments=resume, step_scheduler__global_batch_size=4).refused("global_batch_size 2", "4")
    bench.finetune(arguments=resume, packed_sequence__packed_sequence_size=64).refused("96", "64")
    bench.finetune(arguments=resume, shuffle=False).refused("shuffle true", "false")
    other = write_jsonl(bench.folder / "other.jsonl", records(10, seed=1))
    bench.finetune(arguments=resume, dataset__path=other).refused("data_digest")
    assert state() == before


def test_restore_from_something_else_is_refused(bench):
    bench.make_model()
    bench.finetune(arguments=[f"--restore_from={bench.model}"]).refused(
        str(bench.model), "train_state", "pretrained_model_name_or_path"
    )
    missing = bench.folder / "nowhere"
    bench.finetune(arguments=[f"--restore_from={missing}"]).refused(str(missing))
    assert bench.checkpoints() == [] and not (bench.folder / "out/training.jsonl").exists()
    assert not (bench.folder / "out/recipe.yaml").exists()


def test_damaged_train_state_is_refused(bench):
    bench.make_model()
    bench.finetune(step_scheduler__max_steps=2).ok()
    folder = bench.checkpoint(2) / "train_state"
    resume = ["--resume_from_checkpoint=auto"]
    whole = (folder / "state.json").read_text()
    state = json.loads(whole)
    del state["position"]["epoch"]
    for text in (whole[: len(whole) // 2], json.dumps(state), "[]"):
        (folder / "state.json").write_text(text)
        bench.finetune(arguments=resume).refused("state.json")
    (folder / "state.json").write_text(whole)
    optimizer = (folder / "optimizer.safetensors").read_bytes()
    (folder / "optimizer.safetensors").write_bytes(optimizer[:-10])
    bench.finetune(arguments=resume).refused("optimizer.safetensors")


def test_auto_without_a_checkpoint_starts_anew(bench):
    bench.make_model()
    bench.finetune(arguments=["--resume_from_checkpoint=auto", "--max_steps=1"]).ok()
    assert bench.checkpoints() == ["checkpoint-1"]


def test_nothing_left_to_do_keeps_the_logs(bench):
    bench.make_model()
    bench.finetune(step_scheduler__max_steps=2).ok()
    before = (bench.folder / "out/training.jsonl").read_bytes()
    result = bench.finetune(arguments=["--resume_from_checkpoint=auto"], step_scheduler__max_steps=2).ok()
    assert "nothing to do" in result.err and (bench.folder / "out/training.jsonl").read_bytes() == before


def test_resumed_run_carries_the_tokenizer_when_its_checkpoint_is_deleted(bench):
    bench.make_model()
    settings = dict(save_steps=1, save_total_limit=1)
    bench.finetune(step_scheduler__max_steps=1, **settings).ok()
    bench.finetune(arguments=["--resume_from_checkpoint=auto"], step_scheduler__max_steps=4, **settings).ok()
    assert bench.checkpoints() == ["checkpoint-4"]
    assert (bench.checkpoint(4) / "tokenizer.json").read_bytes() == (bench.model / "tokenizer.json").read_bytes()
