"""Load and save of whole tiny models against transformers' own save_pretrained: same files, same bytes, same index."""

import json
import pathlib

import pytest
import torch
import transformers
from tool import run

SMALL = dict(
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_hidden_layers=11,
    vocab_size=40,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)


def make(family, dtype=torch.bfloat16, **changes):
    torch.manual_seed(3)
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **{**SMALL, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2, **changes}
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.MixtralConfig(
            **{**SMALL, "intermediate_size": 12, "num_local_experts": 3, "num_experts_per_tok": 2, **changes}
        )
        model = transformers.MixtralForCausalLM(config)
    return model.to(dtype)


def weight_files(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir() if ".safetensors" in path.name}


# Limits around the sizes of the blocks: an expert block is 3 * 12 * 16 * 2 = 1152 bytes, the embedding 40 * 16 * 2 = 1280.
LIMITS = [10**9, 30000, 5000, 2432, 2431, 1280, 1279, 1152, 1151, 500, 32]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("limit", LIMITS)
def test_same_files_as_save_pretrained(tmp_path, family, limit):
    model = make(family)
    model.save_pretrained(tmp_path / "source")
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    run("round-trip", tmp_path / "source", tmp_path / "ours", limit)
    theirs, ours = weight_files(tmp_path / "theirs"), weight_files(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    assert ours == theirs
    # and from the shards back into one file
    run("round-trip", tmp_path / "ours", tmp_path / "again", 10**9)
    assert weight_files(tmp_path / "again") == weight_files(tmp_path / "source")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fused_form_stays_fused(tmp_path, family):
    make(family).save_pretrained(tmp_path / "source", save_original_format=False, max_shard_size=4000)
    assert (
        "model.layers.0.mlp.experts.gate_up_proj"
        in json.loads((tmp_path / "source/model.safetensors.index.json").read_text())["weight_map"]
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size=4000)
    run("round-trip", tmp_path / "source", tmp_path / "ours", 4000)
    assert weight_files(tmp_path / "ours") == weight_files(tmp_path / "theirs")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_tied_head_and_what_transformers_loads(tmp_path, family):
    width = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    # 16: torch's grouped GEMM wants rows of 16 bytes
    make(family, tie_word_embeddings=True, **{width: 16}).save_pretrained(tmp_path / "theirs", max_shard_size=3000)
    run("round-trip", tmp_path / "theirs", tmp_path / "ours", 3000)
    assert weight_files(tmp_path / "ours") == weight_files(tmp_path / "theirs")
    assert (tmp_path / "ours/generation_config.json").read_bytes() == (tmp_path / "theirs/generation_config.json").read_bytes()
    ours, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ids = torch.tensor([[1, 5, 9, 2, 30]])
    assert torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits)


def test_float32_checkpoint_in_a_bfloat16_config(tmp_path):
    """The file's dtype is not the model's: the values are rounded once, as transformers does it."""
    make("qwen3_moe", torch.float32).save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    run("round-trip", tmp_path / "source", tmp_path / "ours", 10**9)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype="auto").save_pretrained(tmp_path / "theirs")
    assert weight_files(tmp_path / "ours") == weight_files(tmp_path / "theirs")
