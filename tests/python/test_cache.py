"""Cache and shards: the same content is found again, another content never; nothing is half-written."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import CHATML_MARKED, chat, read_split, write_jsonl
from headrace.errors import UserError
from headrace.prepare import cache, pipeline
from headrace.prepare.formats import Tokens
from headrace.prepare.pipeline import prepare, validation_indices
from headrace.prepare.shards import SplitWriter, sizes_agree

RECORDS = [chat(f"question {i}", f"answer {i}") for i in range(10)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 1)), min_size=1, max_size=9), min_size=1, max_size=20
    ),
    st.integers(1, 30),
)
def test_shards_hold_what_was_written(tmp_path_factory, documents, tokens_per_shard):
    folder = tmp_path_factory.mktemp("shards")
    writer = SplitWriter(folder, "train", tokens_per_shard)
    written = [([token for token, _ in document], [trained for _, trained in document]) for document in documents]
    for ids, mask in written:
        writer.add(Tokens(ids, mask, ""))
    entry = writer.close()
    manifest = {"splits": {"train": entry}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert read_split(folder, "train") == written
    assert entry["num_documents"] == len(written) and entry["num_tokens"] == sum(len(ids) for ids, _ in written)
    assert entry["num_trained_tokens"] == sum(sum(mask) for _, mask in written)
    assert all(shard["num_tokens"] >= tokens_per_shard for shard in entry["shards"][:-1])
    assert sizes_agree(folder, manifest)
    file = folder / f"{entry['shards'][-1]['name']}.loss_mask"
    file.write_bytes(file.read_bytes() + b"\0")
    assert not sizes_agree(folder, manifest)


def test_manifest_has_the_keys_of_the_format(workshop):
    workshop.tokenizer(vocab_size=512)
    prepared = prepare(workshop.settings(RECORDS, val_set_size=0.2, seed=3))
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert manifest == prepared.manifest
    assert (manifest["format"], manifest["version"], manifest["vocab_size"]) == ("headrace-tokens", 1, 512)
    assert manifest["max_length"] == 512 and manifest["digest"] == prepared.folder.name and len(manifest["digest"]) == 64
    assert len(manifest["tokenizer_sha256"]) == len(manifest["chat_template_sha256"]) == 64
    assert manifest["sources"] == [{"path": str(workshop.folder / "data.jsonl"), "sha256": manifest["sources"][0]["sha256"]}]
    assert manifest["settings"]["seed"] == 3 and manifest["settings"]["dataset"]["train_on_prompt"] is False
    assert {name: split["num_documents"] for name, split in manifest["splits"].items()} == {"train": 8, "validation": 2}
    assert len(list(prepared.folder.iterdir())) == 7


def test_text_has_no_chat_template_digest(workshop):
    workshop.tokenizer(template=None)
    assert prepare(workshop.settings([{"text": "hello"}])).manifest["chat_template_sha256"] is None


def test_second_run_reuses_the_folder(workshop, monkeypatch):
    workshop.tokenizer()
    first = prepare(workshop.settings(RECORDS))
    monkeypatch.setattr(pipeline, "Tokenizer", None)  # not even the tokenizer is loaded
    second = prepare(workshop.settings(RECORDS))
    assert not first.reused and second.reused and first.folder == second.folder and first.manifest == second.manifest
    moved = write_jsonl(workshop.folder / "moved.jsonl", RECORDS)
    elsewhere = workshop.settings(RECORDS, seed=7)
    elsewhere.dataset.path = [moved]  # another place and an unused seed do not change the content
    assert prepare(elsewhere).reused


def test_whatever_changes_the_content_changes_the_digest(workshop):
    model = workshop.tokenizer()
    template = workshop.folder / "template.jinja"
    template.write_text(CHATML_MARKED)
    variants = [
        {},
        {"max_length": 100},
        {"limit": 5},
        {"train_on_prompt": True},
        {"format": "messages"},
        {"chat_template": str(template)},
        {"val_set_size": 2},
        {"val_set_size": 2, "seed": 7},
        {"validation_dataset": {"path": [str(workshop.folder / "data.jsonl")]}},
    ]
    folders = [prepare(workshop.settings(RECORDS, **variant)).folder for variant in variants]
    folders.append(prepare(workshop.settings(RECORDS[:9])).folder)
    (model / "chat_template.jinja").write_text(CHATML_MARKED)
    folders.append(prepare(workshop.settings(RECORDS)).folder)
    workshop.tokenizer(add_bos=True)
    folders.append(prepare(workshop.settings(RECORDS)).folder)
    template.write_text("{{ 'x' }}" + CHATML_MARKED)
    folders.append(prepare(workshop.settings(RECORDS, chat_template=str(template))).folder)
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("damage", ["manifest.json", "train-00000.input_ids"])
def test_damaged_folder_is_written_again(workshop, damage):
    workshop.tokenizer()
    first = prepare(workshop.settings(RECORDS))
    content = {file.name: file.read_bytes() for file in first.folder.iterdir()}
    (first.folder / damage).write_bytes(b"{")
    second = prepare(workshop.settings(RECORDS))
    assert not second.reused
    assert {file.name: file.read_bytes() for file in second.folder.iterdir()} == content
    assert list(workshop.cache.iterdir()) == [first.folder]


def test_failure_leaves_nothing(workshop):
    workshop.tokenizer()
    with pytest.raises(UserError):
        prepare(workshop.settings([*RECORDS, {"messages": [{"role": "user", "content": 3}]}]))
    assert list(workshop.cache.iterdir()) == []


def test_writers_at_the_same_time_end_with_one_folder(tmp_path):
    """All writers are inside the temporary folder before any of them renames it."""
    barrier = threading.Barrier(4)
    results = []

    def write(folder: Path) -> dict:
        writer = SplitWriter(folder, "train")
        writer.add(Tokens([1, 2], [0, 1], ""))
        entry = writer.close()
        barrier.wait()
        return {"format": cache.FORMAT, "version": cache.FORMAT_VERSION, "digest": "d", "splits": {"train": entry}}

    threads = [threading.Thread(target=lambda: results.append(cache.publish(tmp_path, "d", write))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(folder == tmp_path / "d" for folder, _ in results)
    assert list(tmp_path.iterdir()) == [tmp_path / "d"]
    assert cache.read_manifest(tmp_path / "d", "d") is not None


def test_validation_split_is_part_of_the_data_and_repeats(workshop):
    workshop.tokenizer()
    everything = workshop.prepare(RECORDS)
    train = workshop.prepare(RECORDS, val_set_size=0.3)
    held_out = workshop.prepare(RECORDS, split="validation", val_set_size=0.3)
    assert len(held_out) == 3 and sorted(train + held_out) == sorted(everything)
    assert workshop.prepare(RECORDS, split="validation", val_set_size=3) == held_out
    assert any(workshop.prepare(RECORDS, split="validation", val_set_size=3, seed=seed) != held_out for seed in range(3))


@given(st.integers(2, 300), st.floats(0.001, 0.9), st.integers(0, 2**63))
def test_validation_indices(num_records, share, seed):
    indices = validation_indices(num_records, share, seed)
    assert len(indices) == min(max(1, round(share * num_records)), num_records - 1) and indices <= set(range(num_records))
    assert indices == validation_indices(num_records, share, seed)


def test_validation_of_everything_is_refused(workshop):
    workshop.tokenizer()
    with pytest.raises(UserError, match="val_set_size 10 would take 10 of 10 records and leave none"):
        workshop.prepare(RECORDS, val_set_size=10)


def test_validation_dataset_without_trained_token_is_refused(workshop):
    workshop.tokenizer()
    file = write_jsonl(workshop.folder / "validation.jsonl", [chat("only a question")])
    with pytest.raises(UserError, match="None of the 1 records of the validation data"):
        workshop.prepare(RECORDS, validation_dataset={"path": [file]})
