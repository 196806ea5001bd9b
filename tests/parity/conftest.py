"""Shared by the parity tests: tiny random models of each family, batches, and the engine's answer for them."""

import os
import pathlib
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ENGINE_TOOL = os.environ.get("HEADRACE_ENGINE_TOOL", pathlib.Path(__file__).parents[2] / "build/tests/parity/engine_tool")
VOCAB = 97
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.15,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
QWEN3_MOE = dict(SMALL, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40)

# name -> (class, config): the switches of each family, tied and untied heads, the balancing loss.
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama-tied-bias-llama3": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, rope_parameters=YARN_ROPE)),
    "qwen3-tied-window": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SMALL, head_dim=16, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=6, num_experts_per_tok=2)),
    "mixtral-tied-window-aux": (
        MixtralForCausalLM,
        MixtralConfig(
            **SMALL,
            num_local_experts=4,
            sliding_window=6,
            tie_word_embeddings=True,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        ),
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True)),
    "qwen3_moe-aux-pad": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=False, output_router_logits=True, router_aux_loss_coef=0.3, pad_token_id=0),
    ),
    "qwen3_moe-tied-mixed-layers": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**QWEN3_MOE, tie_word_embeddings=True, decoder_sparse_step=2, mlp_only_layers=[0], attention_bias=True),
    ),
}


def make_model(name, dtype=torch.float32):
    model_class, config = MODELS[name]
    torch.manual_seed(len(name))
    config._attn_implementation = "sdpa"
    model = model_class(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if key.endswith("mlp.gate.weight"):
                parameter.mul_(4.0)  # decided routers, so that float32 rounding flips no choice
    return model.to(dtype).train()


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """saved_model(name, dtype) -> folder written by transformers' save_pretrained, made once."""
    made = {}

    def get(name, dtype=torch.float32):
        key = (name, dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            make_model(name, dtype).save_pretrained(made[key])
        return made[key]

    return get


def rows_batch(kind, seed=0):
    """Transformers' arguments for one kind of batch: plain, right- or left-padded, packed documents."""
    generator = torch.Generator().manual_seed(seed)
    batch, length = 3, 17
    ids = torch.randint(1, VOCAB, (batch, length), generator=generator)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    kwargs = dict(input_ids=ids, labels=labels, use_cache=False)
    if kind in ("right-padded", "left-padded"):
        mask = torch.ones_like(ids)
        for row, pads in enumerate((0, 5, 11)):
            where = slice(length - pads, length) if kind == "right-padded" else slice(0, pads)
            mask[row, where] = 0
        ids[mask == 0] = 0
        labels[mask == 0] = -100
        # Transformers would predict the first real token from a padding position; nothing real comes before it.
        labels[torch.arange(batch), mask.argmax(1)] = -100
        kwargs["attention_mask"] = mask
    if kind == "packed":
        positions = torch.cat([torch.arange(6), torch.arange(1), torch.arange(10)]).expand(batch, length)
        labels[:, 0] = labels[:, 6] = labels[:, 7] = -100  # a document's first token has nothing before it
        kwargs["position_ids"] = positions
    return kwargs


def engine_batch(kwargs):
    """The same batch as the engine's documents: real tokens only; also their places in the [B * S] rows."""
    ids, labels = kwargs["input_ids"], kwargs["labels"]
    batch, length = ids.shape
    mask = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
    positions = kwargs.get("position_ids", torch.arange(length).expand(batch, length))
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    bounds, places = [0], []
    for row in range(batch):
        real = mask[row].nonzero().squeeze(1)
        starts = [i for i in range(len(real)) if i == 0 or positions[row, real[i]] != positions[row, real[i - 1]] + 1]
        bounds += [bounds[-1] + end - starts[0] for end in starts[1:] + [len(real)]]
        places.append(real + row * length)
    places = torch.cat(places)
    take = lambda x: x.reshape(-1)[places].contiguous()
    return dict(input_ids=take(ids), targets=take(targets), position_ids=take(positions), bounds=torch.tensor(bounds)), places


def run_engine(folder, tmp_path, batches, dtype="float32", recompute="none", steps=None):
    tensors = {}
    for i, batch in enumerate(batches):
        tensors.update({key + (f".{i}" if i else ""): value.clone() for key, value in batch.items()})
    save_file(tensors, tmp_path / "batch.safetensors")
    command = [ENGINE_TOOL, folder, tmp_path / "batch.safetensors", tmp_path / "out.safetensors", dtype, recompute]
    result = subprocess.run([str(a) for a in command + list(steps or [])], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return load_file(tmp_path / "out.safetensors")


def relative_error(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    assert ours.shape == theirs.shape
    norm = theirs.norm()
    error = (ours - theirs).norm()
    return (error / norm if norm > 0 else error).item()
