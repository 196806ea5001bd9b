"""Writes rope_golden.json: config.json texts and the inverse frequencies transformers gives for them. Run by hand:

    python tests/config/make_rope_golden.py > tests/config/rope_golden.json

Each case goes the way of a real model: the config is read by transformers as from a file, and frequencies come from the model's own rotary
module, with sequence_length handed over as the forward pass does (a tensor) where the type depends on it.
"""

import json

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

BASE = {
    "model_type": "glm4_moe",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SHORT = [1.0 + 0.05 * i for i in range(32)]
LONG = [1.0 + 1.7 * i for i in range(32)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096}

CASES = {
    "default, nothing given": ({}, None),
    "default, old form": ({"rope_theta": 1000000.0, "rope_scaling": None, "head_dim": 128}, None),
    "default, new form": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, None),
    "default, integer theta": ({"rope_theta": 1000000}, None),
    "default, half of the head": ({"rope_theta": 1e6, "partial_rotary_factor": 0.5, "head_dim": 128}, None),
    "default, factor in the dict wins": ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}, None),
    "linear, old name of the type": ({"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}}, None),
    "rope_scaling wins": ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, None),
    "theta in the dict wins": ({"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 20000.0}}, None),
    "dynamic, short": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}, 100),
    "dynamic, long": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}, 5001),
    "yarn, qwen3": ({"rope_theta": 1e6, "rope_scaling": YARN, "head_dim": 128, "max_position_embeddings": 131072}, None),
    "yarn, deepseek": (
        {
            "rope_theta": 10000,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
            "max_position_embeddings": 163840,
        },
        None,
    ),
    "yarn, gpt_oss": (
        {"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}},
        None,
    ),
    "yarn, mscale ratio": ({"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}, "max_position_embeddings": 131072}, None),
    "yarn, attention factor": ({"rope_scaling": {**YARN, "attention_factor": 0.75}, "max_position_embeddings": 131072}, None),
    "yarn, null factor": ({"rope_scaling": {**YARN, "factor": None}, "max_position_embeddings": 163840}, None),
    "yarn, no original length": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 8192}, None),
    "llama3": ({"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 131072, "head_dim": 128}, None),
    "llama3, other factors": ({"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "factor": 32.0, "high_freq_factor": 3.5}, "max_position_embeddings": 131072}, None),
    "longrope, short": ({"rope_scaling": LONGROPE, "max_position_embeddings": 131072}, 4096),
    "longrope, long": ({"rope_scaling": LONGROPE, "max_position_embeddings": 131072}, 4097),
    "longrope, original length at top": ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 2048, "max_position_embeddings": 131072}, 4000),
    "longrope, factor": ({"rope_scaling": {**LONGROPE, "factor": 16.0}, "max_position_embeddings": 131072}, 10),
}  # fmt: skip


def golden(changes, sequence_length):
    text = {**BASE, **changes}
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(text)))
    rotary = Glm4MoeRotaryEmbedding(config)
    frequencies, factor = rotary.inv_freq, rotary.attention_scaling
    if sequence_length is not None:
        init = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
        if config.rope_parameters["rope_type"] == "longrope" or sequence_length > config.max_position_embeddings:
            frequencies, factor = init(config, "cpu", seq_len=torch.tensor(sequence_length))
    assert frequencies.dtype == torch.float32
    return {
        "config": text,
        "sequence_length": sequence_length or 1,
        "inverse_frequencies": [float(x).hex() for x in frequencies],
        "attention_factor": float(factor),
    }


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(golden(*case))}" for name, case in CASES.items()]
    print("{\n" + ",\n".join(lines) + "\n}")
