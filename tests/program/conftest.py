"""Shared by the tests that drive the program: a tiny model folder with a real tokenizer, a recipe, runs and their results."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
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

BUILD = pathlib.Path(__file__).parents[2] / "build"
PROGRAM = str(os.environ.get("HEADRACE_PROGRAM", BUILD / "headrace"))
ENGINE_TOOL = str(os.environ.get("HEADRACE_ENGINE_TOOL", BUILD / "tests/parity/engine_tool"))
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB = 288
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=259,
)
MOE = dict(SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
MODELS = {
    "qwen3_moe": lambda **o: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE | o)),
    "mixtral": lambda **o: MixtralForCausalLM(MixtralConfig(**SMALL | dict(num_local_experts=4, num_experts_per_tok=2) | o)),
    "qwen3": lambda **o: Qwen3ForCausalLM(Qwen3Config(**SMALL | dict(head_dim=8) | o)),
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**SMALL | o)),
}


def save_tokenizer(folder):
    """Bytes and five special tokens, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(["ab"], trainer)
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": False}))
    (folder / "chat_template.jinja").write_text(CHATML)


def make_model(folder, family="qwen3_moe", dtype=torch.float32, seed=3, **options):
    """A random model with its tokenizer, written by save_pretrained. Tied or not, dtype, and any config key by `options`."""
    torch.manual_seed(seed)
    model = MODELS[family](**options).to(dtype)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def edit_weights(folder, change):
    """Writes model.safetensors again after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


WORDS = "the file copy list open python import return value name for each line print string to from a".split()


def records(count, seed=0):
    """Chats of 40 to 90 tokens (bytes)."""
    generator = torch.Generator().manual_seed(seed)
    pick = lambda n: " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=generator))
    length = lambda: int(torch.randint(1, 6, (1,), generator=generator))
    return [
        {"messages": [{"role": "user", "content": pick(2)}, {"role": "assistant", "content": pick(length())}]}
        for _ in range(count)
    ]


def write_jsonl(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


class Outcome:
    def __init__(self, result):
        self.code, self.out, self.err = result.returncode, result.stdout, result.stderr

    def ok(self):
        assert self.code == 0, self.err
        return self

    def refused(self, *texts):
        """Exit code 2 and one clear sentence that holds all of `texts`."""
        assert self.code == 2, f"exit code {self.code}\n{self.err}"
        sentences = [line for line in self.err.splitlines() if line.startswith("headrace: ")]
        assert len(sentences) == 1, self.err
        assert "internal error" not in sentences[0] and "Traceback" not in self.err
        for text in texts:
            assert text in sentences[0], (text, sentences[0])
        return self


class Bench:
    """One temporary folder with model, data and runs."""

    def __init__(self, folder, prepared):
        self.folder = folder
        self.prepared = prepared
        self.model = folder / "model"
        self.data = write_jsonl(folder / "train.jsonl", records(10))
        self.recipe = folder / "recipe.yaml"

    def make_model(self, family="qwen3_moe", name="model", **options):
        return make_model(self.folder / name, family, **options)

    def environment(self):
        return {**os.environ, "HEADRACE_PYTHON": sys.executable, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}

    def program(self, *arguments, **popen):
        command = [PROGRAM, *map(str, arguments)]
        return Outcome(subprocess.run(command, capture_output=True, text=True, env=self.environment(), timeout=120, **popen))

    def write_recipe(self, output="out", **options):
        values = {
            "model": str(self.model),
            "dataset.path": self.data,
            "packed_sequence.packed_sequence_size": 96,
            "step_scheduler.global_batch_size": 2,
            "step_scheduler.max_steps": 4,
            "optimizer.lr": 0.003,
            "lr_scheduler.type": "constant",
            "device": "cpu",
            "num_threads": 1,
            "output_dir": str(self.folder / output),
        }
        # Tokenised data sets depend on their content alone: one cache for all tests, linked into each output folder.
        out = self.folder / output
        if out.parent == self.folder and not out.exists():
            out.mkdir()
            (out / "data").symlink_to(self.prepared)
        self.recipe.write_text(yaml.safe_dump({key: value for key, value in (values | options).items() if value is not None}))
        return self.recipe

    def finetune(self, output="out", arguments=(), popen=None, **options):
        """Options use a dot (or __ as keyword arguments need) between section and key."""
        recipe = self.write_recipe(output, **{key.replace("__", "."): value for key, value in options.items()})
        return self.program("finetune", recipe, *arguments, **(popen or {}))

    def lines(self, output="out", name="training.jsonl"):
        return [json.loads(line) for line in (self.folder / output / name).read_text().splitlines()]

    def losses(self, output="out"):
        return [line["loss"] for line in self.lines(output)]

    def checkpoint(self, step, output="out"):
        return self.folder / output / f"checkpoint-{step}"

    def checkpoints(self, output="out"):
        folder = self.folder / output
        return sorted(entry.name for entry in folder.iterdir() if "checkpoint" in entry.name) if folder.exists() else []


def timeless(lines):
    """What an unbroken and a resumed run must share: all but clock and memory."""
    return [{key: value for key, value in line.items() if key not in ("time", "tokens_per_s", "mem_gib")} for line in lines]


def assert_same_files(first, second):
    """Two safetensors files with the same names, types and bits."""
    a, b = load_file(first), load_file(second)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def assert_same_checkpoints(first, second):
    assert_same_files(first / "model.safetensors", second / "model.safetensors")
    assert_same_files(first / "train_state/optimizer.safetensors", second / "train_state/optimizer.safetensors")
    assert json.loads((first / "train_state/state.json").read_text()) == json.loads(
        (second / "train_state/state.json").read_text()
    )


def engine_logits(folder, ids, tmp_path, dtype="float32"):
    """Logits of the engine for one document."""
    targets = torch.cat([ids[1:], torch.tensor([-100])])
    batch = dict(input_ids=ids, targets=targets, position_ids=torch.arange(len(ids)), bounds=torch.tensor([0, len(ids)]))
    save_file({name: value.clone() for name, value in batch.items()}, tmp_path / "batch.safetensors")
    command = [ENGINE_TOOL, folder, tmp_path / "batch.safetensors", tmp_path / "answer.safetensors", dtype, "none"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return load_file(tmp_path / "answer.safetensors")["logits"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def bench(tmp_path, prepared):
    return Bench(tmp_path, prepared)
