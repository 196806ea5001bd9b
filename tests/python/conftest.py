"""Shared by the tests of the Python side: tiny real tokenizers, made with the tokenizers library, and a reader of shards."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headrace.prepare.pipeline import prepare
from headrace.prepare.settings import settings_from

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.\n\n\n",
    "user assistant system tool hello world, goodbye world! one two three 1234567890 \n  if x:\n    return y\n\n",
] * 3


def save_tokenizer(
    folder: Path, template: str | None = CHATML, add_bos=False, padding=False, vocab_size=None, **config
) -> Path:
    """A byte-level BPE tokenizer in a model folder. `config` goes to tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    if padding:
        tokenizer.enable_padding(direction="left", pad_id=tokenizer.token_to_id("<pad>"), pad_token="<pad>", length=64)
        tokenizer.enable_truncation(8)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if vocab_size is not None:
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


def write_jsonl(file: Path, records: list) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def read_split(folder: Path, split: str) -> list[tuple[list[int], list[int]]]:
    """Documents of a prepared folder by the written format alone: (input_ids, loss_mask)."""
    manifest = json.loads((folder / "manifest.json").read_text())
    documents = []
    for shard in manifest["splits"][split]["shards"]:
        ids = np.fromfile(folder / f"{shard['name']}.input_ids", dtype="<u4")
        mask = np.fromfile(folder / f"{shard['name']}.loss_mask", dtype="u1")
        bounds = np.fromfile(folder / f"{shard['name']}.bounds", dtype="<u8")
        assert len(ids) == len(mask) == shard["num_tokens"] == bounds[-1] and len(bounds) == shard["num_documents"] + 1
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            documents.append((ids[start:end].tolist(), mask[start:end].tolist()))
    return documents


def chat(*contents: str, **last) -> dict:
    """A record in messages format: user and assistant in turns; `last` is added to the last message."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    messages[-1] |= last
    return {"messages": messages}


class Workshop:
    """Prepares records with a tokenizer of a temporary folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cache = folder / "cache"

    def tokenizer(self, **options) -> Path:
        return save_tokenizer(self.folder / "model", **options)

    def settings(self, records: list, model: Path | None = None, **options):
        data = write_jsonl(self.folder / "data.jsonl", records)
        dataset = {"path": [data]}
        dataset |= {key: options.pop(key) for key in ("format", "limit", "train_on_prompt", "chat_template") if key in options}
        model = model or self.folder / "model"
        values = {"model_path": str(model), "dataset": dataset, "max_length": 512, "output_dir": str(self.cache)}
        return settings_from(values | options)

    def prepare(self, records: list, split: str = "train", **options) -> list[tuple[list[int], list[int]]]:
        return read_split(prepare(self.settings(records, **options)).folder, split)

    def hugging_face(self, model: Path | None = None):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model or self.folder / "model")

    def trained_text(self, document: tuple[list[int], list[int]]) -> str:
        ids, mask = document
        return self.hugging_face().decode([token for token, trained in zip(ids, mask, strict=True) if trained])


@pytest.fixture
def workshop(tmp_path) -> Workshop:
    return Workshop(tmp_path)
