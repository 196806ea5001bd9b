"""Pipeline: the main path from settings to a folder of token shards.

Flow: Settings -> cache hit, or read -> render -> tokenize -> cut -> write.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from headrace.errors import UserError
from headrace.prepare import cache
from headrace.prepare.formats import Conversation, Document, Passage, Tokens, read_documents
from headrace.prepare.settings import DatasetSettings, Settings
from headrace.prepare.shards import SplitWriter
from headrace.prepare.templates import ChatTemplate, render_passage
from headrace.prepare.tokenize import Tokenizer, check_ids, cut

BATCH_SIZE = 512  # documents tokenised together: enough to keep all cores of the Rust tokenizer busy


@dataclass
class Prepared:
    folder: Path
    manifest: dict
    reused: bool  # found in the cache


def prepare(settings: Settings) -> Prepared:
    """Makes or finds the token shards. Throws UserError for faults of settings, model or data; nothing is left behind then."""
    sources = cache.source_digests(settings)
    tokenizer_digest = cache.tokenizer_sha256(settings.model_path)
    digest = cache.content_digest(settings, sources, tokenizer_digest)
    output_dir = Path(settings.output_dir)
    manifest = cache.read_manifest(output_dir / digest, digest)
    if manifest is not None:
        return Prepared(output_dir / digest, manifest, reused=True)

    def write(folder: Path) -> dict:
        tokenizer = Tokenizer(settings.model_path)
        encoder = Encoder(tokenizer, settings)
        return {
            "format": cache.FORMAT,
            "version": cache.FORMAT_VERSION,
            "digest": digest,
            "vocab_size": tokenizer.vocab_size,
            "max_length": settings.max_length,
            "tokenizer_sha256": tokenizer_digest,
            "sources": sources,
            "settings": asdict(settings),
            "splits": _write_splits(settings, encoder, folder),
            "chat_template_sha256": encoder.chat_template_sha256(),
        }

    folder, manifest = cache.publish(output_dir, digest, write)
    return Prepared(folder, manifest, reused=False)


class Encoder:
    """Turns documents into tokens; holds the tokenizer and, once a conversation came by, the chat templates."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings):
        self._tokenizer = tokenizer
        self._max_length = settings.max_length
        self._templates: dict[str, ChatTemplate] = {}  # by dataset.chat_template

    def encode(self, documents: Iterator[Document], dataset: DatasetSettings, counts: dict) -> Iterator[Tokens | None]:
        """One entry for each document, in order; None for one without a trained token. Adds to the two `counts`."""
        while batch := list(islice(documents, BATCH_SIZE)):
            rendered = [self._render(document, dataset) for document in batch if not isinstance(document, Tokens)]
            encoded = iter(self._tokenizer.encode(rendered))
            for document in batch:
                tokens = document if isinstance(document, Tokens) else next(encoded)
                tokens = check_ids(tokens, self._tokenizer.vocab_size)
                counts["num_truncated"] += len(tokens.input_ids) > self._max_length
                tokens = cut(tokens, self._max_length)
                has_trained_token = any(tokens.loss_mask)
                counts["num_dropped"] += not has_trained_token
                yield tokens if has_trained_token else None

    def chat_template_sha256(self) -> str | None:
        if not self._templates:
            return None
        sources = sorted({template.source for template in self._templates.values()})
        return hashlib.sha256("\n".join(sources).encode()).hexdigest()

    def _render(self, document: Conversation | Passage, dataset: DatasetSettings):
        if isinstance(document, Passage):
            return render_passage(document, dataset.train_on_prompt)
        if dataset.chat_template not in self._templates:
            text = _read_template(dataset.chat_template) if dataset.chat_template else None
            self._templates[dataset.chat_template] = ChatTemplate(self._tokenizer.hugging_face, text)
        return self._templates[dataset.chat_template].render(document, dataset.train_on_prompt)


def validation_indices(num_records: int, val_set_size: float, seed: int) -> set[int]:
    """Which records are held out: the ones with the smallest hash of seed and index, so that any machine chooses the same."""
    if val_set_size < 1:
        count = min(max(round(val_set_size * num_records), 1), max(num_records - 1, 1))
    else:
        count = int(val_set_size)
    if count >= num_records:
        raise UserError(
            f"val_set_size {val_set_size:g} would take {count} of {num_records} records and leave none for training; "
            "choose a smaller one."
        )
    order = sorted(range(num_records), key=lambda index: hashlib.sha256(f"{seed}:{index}".encode()).digest())
    return set(order[:count])


def _write_splits(settings: Settings, encoder: Encoder, folder: Path) -> dict:
    held_out: set[int] = set()
    if settings.validation_dataset is None and settings.val_set_size > 0:
        num_records = sum(1 for _ in _documents(settings.dataset))
        held_out = validation_indices(num_records, settings.val_set_size, settings.seed)
    splits = {"train": _write_split(settings.dataset, encoder, folder, "train", lambda index: index not in held_out)}
    if held_out:
        splits["validation"] = _write_split(settings.dataset, encoder, folder, "validation", lambda index: index in held_out)
    elif settings.validation_dataset is not None:
        splits["validation"] = _write_split(settings.validation_dataset, encoder, folder, "validation", lambda index: True)
    return splits


def _write_split(dataset: DatasetSettings, encoder: Encoder, folder: Path, split: str, belongs) -> dict:
    writer = SplitWriter(folder, split)
    counts = {"num_dropped": 0, "num_truncated": 0}
    documents = (document for index, document in enumerate(_documents(dataset)) if belongs(index))
    try:
        for tokens in encoder.encode(documents, dataset, counts):
            if tokens is not None:
                writer.add(tokens)
        entry = writer.close()
    finally:
        writer.abandon()
    files = ", ".join(dataset.path)
    if entry["num_documents"] == 0 and counts["num_dropped"] == 0:
        raise UserError(f"The {split} data ({files}) holds no record.")
    if entry["num_documents"] == 0:
        raise UserError(
            f"None of the {counts['num_dropped']} records of the {split} data ({files}) holds a token to train: "
            f"{counts['num_truncated']} were cut at max_length, the others have no answer; "
            "raise max_length, or set train_on_prompt if there are no answers."
        )
    return {**entry, **counts}


def _documents(dataset: DatasetSettings) -> Iterator[Document]:
    return read_documents(dataset.path, dataset.format, dataset.limit)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The chat template {path} cannot be read: {error}.") from error
