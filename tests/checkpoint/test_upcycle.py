"""upcycle: in transformers the MoE model computes what the dense one did; every expert is a bit-for-bit copy."""

import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers
from tool import run

SMALL = dict(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=3,
    vocab_size=50,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CASES = {
    "llama": ("llama", {}),
    "llama tied, eps 1e-5": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 128, "head_dim": 8}),
    "llama, all heads": ("llama", {"num_key_value_heads": None}),
    "mistral, window": ("mistral", {"sliding_window": 5, "head_dim": 8}),
    "mistral, no window": ("mistral", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 8}),
    "qwen3 tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, windows everywhere": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8}, "max_position_embeddings": 32}),
}  # fmt: skip


def make_dense(folder, family, dtype=torch.float32, **changes):
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases too: their defaults would hide a mistake
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def upcycled(dense, out, experts=4, top_k=2, seed=7, std=0.02, limit=10**9, code=0):
    return run("upcycle", dense, out, experts, top_k, seed, std, limit, code=code)


def tensors_of(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(safetensors.torch.load_file(path))
    return tensors


def same_logits(dense, out):
    ids = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(2))
    a = transformers.AutoModelForCausalLM.from_pretrained(dense).eval()
    b, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        difference = (a(ids).logits - b.eval()(ids).logits).abs().max().item()
    assert difference < 1e-5, difference
    return b


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_dense_model(tmp_path, case):
    family, changes = CASES[case]
    dense = make_dense(tmp_path / "dense", family, **changes)
    upcycled(dense, tmp_path / "moe", limit=9000)
    model = same_logits(dense, tmp_path / "moe")
    assert type(model).__name__ == ("Qwen3MoeForCausalLM" if family == "qwen3" else "MixtralForCausalLM")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "moe"]
    assert (tmp_path / "moe/tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    assert (tmp_path / "moe/generation_config.json").read_bytes() == (dense / "generation_config.json").read_bytes()
    assert (tmp_path / "moe/model.safetensors.index.json").exists()
    # the files are what transformers itself writes for the model
    model.save_pretrained(tmp_path / "theirs", max_shard_size=9000)
    for path in (tmp_path / "theirs").glob("*.safetensors*"):
        assert (tmp_path / "moe" / path.name).read_bytes() == path.read_bytes(), path.name


OLD_FILES = {
    # Files of transformers v4, with keys left out that the classes fill in differently.
    "llama 2": ("llama", {}, {"rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "float32"}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}, {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "mistral": ("mistral", {"sliding_window": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 77777.0}}, {"rope_theta": 77777.0}),
    "qwen3": ("qwen3", {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1000000, "max_window_layers": 28, "sliding_window": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", OLD_FILES)
def test_old_config_files_with_keys_left_out(tmp_path, case):
    family, changes, keys = OLD_FILES[case]
    dense = make_dense(tmp_path / "dense", family, **changes)
    needed = {
        k: SMALL[k]
        for k in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "num_hidden_layers",
            "vocab_size",
        )
    }
    (dense / "config.json").write_text(json.dumps({"model_type": family, "architectures": ["X"], **needed, **keys}))
    upcycled(dense, tmp_path / "moe")
    same_logits(dense, tmp_path / "moe")


def mix(x):
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def normal(seed, layer, index):
    stream = mix((mix(seed) + layer) & ((1 << 64) - 1))
    draws = [mix(stream ^ mix(index * 6 + i)) for i in range(6)]
    return sum((d >> 32) + (d & 0xFFFFFFFF) + 1 for d in draws) / 2**32 - 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_are_copies_and_the_router_is_reproducible(tmp_path, dtype):
    dense = make_dense(tmp_path / "dense", "qwen3", dtype)
    upcycled(dense, tmp_path / "moe", experts=5, top_k=3, seed=2**64 - 1, std=0.5)
    before, after = tensors_of(dense), tensors_of(tmp_path / "moe")
    for name, tensor in before.items():
        copies = [name]
        if ".mlp." in name:
            layer, projection = name.split(".mlp.")
            copies = [f"{layer}.mlp.experts.{e}.{projection}" for e in range(5)]
        for copy in copies:
            assert after[copy].dtype == dtype and torch.equal(after.pop(copy), tensor)
    assert sorted(after) == [f"model.layers.{n}.mlp.gate.weight" for n in range(3)]
    for n in range(3):
        router = after[f"model.layers.{n}.mlp.gate.weight"]
        wanted = torch.tensor([0.5 * normal(2**64 - 1, n, i) for i in range(5 * 16)], dtype=torch.float64).float().to(dtype)
        assert router.dtype == dtype and torch.equal(router, wanted.view(5, 16))
    values = torch.tensor([normal(1, 0, i) for i in range(20000)])
    assert abs(values.mean()) < 0.03 and abs(values.std() - 1) < 0.02 and abs((values.abs() < 1).float().mean() - 0.683) < 0.012
    upcycled(dense, tmp_path / "other", experts=5, top_k=3, seed=3, std=0.5)
    assert not torch.equal(
        tensors_of(tmp_path / "other")["model.layers.0.mlp.gate.weight"], after["model.layers.0.mlp.gate.weight"]
    )


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


REFUSED = {
    "a MoE": ("llama", {"model_type": "mixtral"}, {}, ["mixtral", "dense llama"]),
    "unknown family": ("llama", {"model_type": "gpt2"}, {}, ["gpt2", "llama, mistral"]),
    "experts in the config": ("llama", {"num_local_experts": 4}, {}, ["num_local_experts", "already"]),
    "attention_bias": ("llama", {"attention_bias": True}, {}, ["attention_bias"]),
    "mlp_bias": ("llama", {"mlp_bias": True}, {}, ["mlp_bias"]),
    "gelu": ("qwen3", {"hidden_act": "gelu"}, {}, ["hidden_act is gelu", "silu"]),
    "quantised": ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, {}, ["quantization_config"]),
    "wrong width": ("qwen3", {"intermediate_size": 25}, {}, ["mlp.gate_proj.weight", "[24, 16]", "[25, 16]"]),
    "more layers": ("qwen3", {"num_hidden_layers": 4, "layer_types": None}, {}, ["lacks the tensor model.layers.3"]),
    "fewer layers": ("qwen3", {"num_hidden_layers": 2, "layer_types": None}, {}, ["model.layers.2.", "does not have"]),
    "no head": ("llama", {"tie_word_embeddings": False}, {"drop": "lm_head.weight"}, ["lm_head.weight"]),
    "other head": ("llama", {"tie_word_embeddings": True}, {}, ["differ", "tie_word_embeddings"]),
    "some windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, {}, ["1 of 3 layers"]),
    "one expert": ("llama", {}, {"experts": 1}, ["num_experts is 1"]),
    "too few experts": ("llama", {}, {"experts": 2, "top_k": 3}, ["top_k is 3", "num_experts (2)"]),
    "top_k 0": ("llama", {}, {"top_k": 0}, ["top_k is 0"]),
    "std 0": ("llama", {}, {"std": 0}, ["router_std"]),
    "std nan": ("llama", {}, {"std": "nan"}, ["router_std"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence_and_nothing_left(tmp_path, case):
    family, config, settings, words = REFUSED[case]
    dense = make_dense(tmp_path / "dense", family)
    change_config(dense, **config)
    settings = dict(settings)
    if drop := settings.pop("drop", None):
        tensors = tensors_of(dense)
        del tensors[drop]
        safetensors.torch.save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    message = upcycled(dense, tmp_path / "moe", **settings, code=2)
    for word in words:
        assert word in message
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


def test_existing_output_is_left_alone(tmp_path):
    dense = make_dense(tmp_path / "dense", "llama")
    (tmp_path / "moe").mkdir()
    assert "exists already" in upcycled(dense, str(tmp_path / "moe") + "/", code=2)
    assert list((tmp_path / "moe").iterdir()) == []
    upcycled(dense, tmp_path / "new" / "moe")
    assert (tmp_path / "new/moe/model.safetensors").exists()
    before = (tmp_path / "new/moe/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "moe")
    upcycled(dense, str(tmp_path / "moe") + "/")
    assert (tmp_path / "moe/model.safetensors").read_bytes() == before
