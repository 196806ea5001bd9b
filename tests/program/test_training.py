"""What a run computes: the same loss however a step is split or rows are packed, and no step that is not finite."""

import torch
from safetensors.torch import load_file

from conftest import edit_weights, engine_logits, make_model, write_jsonl

LR = 0.003


def largest_difference(first, second):
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_accumulation_does_not_change_the_step(bench):
    bench.make_model()
    # eps as large as the gradients: at 1e-8 Adam turns float32 rounding of a tiny gradient into a whole step.
    settings = dict(
        step_scheduler__global_batch_size=4, packed_sequence__packing=False, optimizer__max_grad_norm=0.5, optimizer__eps=1e-2
    )
    for local in (4, 2, 1):
        bench.finetune(f"local{local}", local_batch_size=local, step_scheduler__max_steps=3, **settings).ok()
    whole = bench.lines("local4")
    assert all(line["grad_norm"] > 0.5 for line in whole)  # clipping is at work
    for local in (2, 1):
        for ours, theirs in zip(bench.lines(f"local{local}"), whole, strict=True):
            assert ours["num_tokens"] == theirs["num_tokens"] and ours["num_trained_tokens"] == theirs["num_trained_tokens"]
            assert abs(ours["loss"] - theirs["loss"]) < 1e-6 * theirs["loss"]
            assert abs(ours["grad_norm"] - theirs["grad_norm"]) < 1e-5 * theirs["grad_norm"]
        assert largest_difference(bench.checkpoint(3, f"local{local}"), bench.checkpoint(3, "local4")) < 1e-6


def test_packed_and_unpacked_documents_have_the_same_loss(bench):
    bench.make_model()
    # All documents in one step, so that both runs see the same ones.
    settings = dict(
        step_scheduler__global_batch_size=16, step_scheduler__max_steps=2, packed_sequence__packed_sequence_size=256
    )
    bench.finetune("packed", **settings).ok()
    bench.finetune("unpacked", packed_sequence__packing=False, **settings).ok()
    for ours, theirs in zip(bench.lines("packed"), bench.lines("unpacked"), strict=True):
        assert (
            ours["num_trained_tokens"] == theirs["num_trained_tokens"]
            and abs(ours["loss"] - theirs["loss"]) < 2e-6 * theirs["loss"]
        )


def test_batch_without_a_trained_token_has_loss_zero(bench):
    bench.make_model()
    lines = [{"input_ids": [10 + i, 20, 30, 40], "labels": [-100] * 4 if i == 3 else [-100, 20, 30, 40]} for i in range(4)]
    data = write_jsonl(bench.folder / "tokens.jsonl", lines)
    settings = dict(dataset__path=data, validation_dataset__path=data, packed_sequence__packing=False, shuffle=False)
    settings |= dict(step_scheduler__global_batch_size=1, step_scheduler__max_steps=3)
    # Preparation drops such a record and says so; a shard may still hold one (written by other means).
    dropped = bench.finetune("dropped", **settings).ok()
    assert "1 records without a token to train were dropped" in dropped.err
    prepared = bench.folder / "dropped/data"
    manifest = next(file for file in prepared.glob("*/manifest.json") if str(data) in file.read_text())
    for split, empty in (("train", slice(4, 8)), ("validation", slice(0, 12))):
        mask = bytearray((manifest.parent / f"{split}-00000.loss_mask").read_bytes())
        mask[empty] = bytes(len(mask[empty]))
        (manifest.parent / f"{split}-00000.loss_mask").write_bytes(mask)
    result = bench.finetune(**settings).ok()
    assert "step 2: no token of this batch is trained" in result.err
    assert "no token of the validation data is trained" in result.err
    assert [line["loss"] == 0 for line in bench.lines()] == [False, True, False]
    assert [line["grad_norm"] == 0 for line in bench.lines()] == [False, True, False]
    assert [line["val_loss"] for line in bench.lines(name="validation.jsonl")] == [0, 0]
    assert all(torch.isfinite(tensor).all() for tensor in load_file(bench.checkpoint(3) / "model.safetensors").values())


def poison(value):
    return lambda weights: weights["model.layers.1.self_attn.o_proj.weight"].__setitem__((3, 5), value)


def test_step_that_is_not_finite_is_refused(bench):
    bench.make_model()
    for value in (float("nan"), float("inf")):
        edit_weights(bench.model, poison(value))
        bench.finetune().refused("step 1", "epoch 0", "batch 0", "refused", "nonfinite: skip")
        assert bench.checkpoints() == [] and bench.lines() == []
    result = bench.finetune("skipped", nonfinite="skip").ok()
    assert result.err.count("the update was refused") == 4
    assert [line["loss"] for line in bench.lines("skipped")] == [None] * 4
    before, after = (load_file(f / "model.safetensors") for f in (bench.model, bench.checkpoint(4, "skipped")))
    assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)


def test_stop_keeps_the_checkpoint_before_the_broken_step(bench):
    bench.make_model()
    # Without clipping a learning rate of 1e30 makes the second step's loss infinite or not a number.
    result = bench.finetune(save_steps=1, optimizer__lr=1e30, optimizer__max_grad_norm=0)
    result.refused("step 2", "refused")
    assert bench.checkpoints() == ["checkpoint-1"] and (bench.folder / "out/latest").resolve() == bench.checkpoint(1)
    assert [line["step"] for line in bench.lines()] == [1]


def test_balancing_loss_is_trained_when_asked_for(bench):
    bench.make_model()
    settings = dict(step_scheduler__max_steps=1)
    bench.finetune("off", **settings).ok()
    bench.finetune("on", output_router_logits=True, router_aux_loss_coef=1.0, **settings).ok()
    off, on = bench.lines("off")[0], bench.lines("on")[0]
    assert "aux_loss" not in off and on["aux_loss"] > 0 and abs(on["loss"] - off["loss"]) < 1e-6 * off["loss"]
    assert on["grad_norm"] != off["grad_norm"]
    weights = [
        load_file(bench.checkpoint(1, run) / "model.safetensors")["model.layers.0.mlp.gate.weight"] for run in ("off", "on")
    ]
    assert not torch.equal(*weights)


def test_schedule_warms_up_and_decays(bench):
    bench.make_model()
    bench.finetune(lr_scheduler__type="linear", lr_scheduler__warmup_steps=2).ok()
    assert [round(line["lr"] / LR, 6) for line in bench.lines()] == [0, 0.5, 1, 0.5]


def test_loss_falls_and_bfloat16_follows_float32(bench):
    bench.make_model()
    settings = dict(step_scheduler__global_batch_size=4, step_scheduler__max_steps=12, checkpoint__enabled=False)
    bench.finetune("float32", **settings).ok()
    bench.finetune("bfloat16", torch_dtype="bfloat16", **settings).ok()
    for ours, theirs in zip(bench.losses("bfloat16"), bench.losses("float32"), strict=True):
        assert abs(ours - theirs) < 0.03 * theirs
    assert bench.losses("float32")[-1] < 0.9 * bench.losses("float32")[0]


def test_upcycled_model_begins_as_the_dense_one(bench):
    ids = torch.tensor([5, 77, 200, 3, 3, 150, 42, 9])
    for family, dtype in (("llama", torch.float32), ("qwen3", torch.float32), ("llama", torch.bfloat16)):
        dense = make_model(bench.folder / f"{family}-{dtype}", family, dtype=dtype)
        sparse = bench.folder / f"{family}-{dtype}-moe"
        bench.program("upcycle", dense, sparse, "--num-experts", 4, "--top-k", 2).ok()
        name = str(dtype).removeprefix("torch.")
        before, after = (engine_logits(folder, ids, bench.folder, dtype=name).float() for folder in (dense, sparse))
        # The routing weights of equal experts sum to 1 up to rounding.
        assert (before - after).norm() / before.norm() < (1e-6 if dtype == torch.float32 else 2e-2)
    bench.program("upcycle", dense, sparse).refused(str(sparse))
    bench.model = bench.folder / "llama-torch.float32-moe"
    bench.finetune(step_scheduler__max_steps=2).ok()
    assert bench.checkpoints() == ["checkpoint-2"]
