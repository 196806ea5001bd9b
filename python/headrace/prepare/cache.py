"""Cache: finds a prepared folder by the digest of all that decides its content, and publishes new ones whole or not at all.

Flow: settings and source files -> [digest] -> an existing folder, or a temporary one that is renamed when complete.
Several programs may prepare the same data at once: the first to finish wins, the others take its result.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.errors import UserError
from headrace.prepare.settings import Settings
from headrace.prepare.shards import sizes_agree

FORMAT = "headrace-tokens"
FORMAT_VERSION = 1  # of the files, as the C++ program reads them
CONTENT_VERSION = 1  # raise it when a change of this package gives other tokens or masks for the same input

# Files of a model folder that decide how text becomes tokens or where answers end. Other tokenizer files hold copies of these.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


def file_sha256(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)
    except OSError as error:
        raise UserError(f"The file {path} cannot be read: {error.strerror}.") from error


def _sha256(file) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def json_sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tokenizer_sha256(model_path: str) -> str:
    folder = Path(model_path)
    if not folder.is_dir():
        raise UserError(
            f"The model folder {model_path} does not exist; give the folder of a downloaded Hugging Face checkpoint."
        )
    files = [folder / name for name in TOKENIZER_FILES] + sorted(folder.glob("additional_chat_templates/*.jinja"))
    return json_sha256({str(file.relative_to(folder)): file_sha256(file) for file in files if file.is_file()})


def source_digests(settings: Settings) -> list[dict]:
    datasets = [settings.dataset] + ([settings.validation_dataset] if settings.validation_dataset else [])
    return [{"path": path, "sha256": file_sha256(path)} for dataset in datasets for path in dataset.path]


def content_digest(settings: Settings, sources: list[dict], tokenizer_digest: str) -> str:
    """Same digest, same bytes. Where files lie is not part of it; what they hold is."""
    by_path = {source["path"]: source["sha256"] for source in sources}

    def content_of(dataset):
        if dataset is None:
            return None
        template = file_sha256(dataset.chat_template) if dataset.chat_template else None
        files = [[Path(path).suffix.lower(), by_path[path]] for path in dataset.path]
        return [files, dataset.format, dataset.limit, dataset.train_on_prompt, template]

    is_drawn = settings.validation_dataset is None and settings.val_set_size > 0
    return json_sha256(
        {
            "versions": [FORMAT_VERSION, CONTENT_VERSION]
            + [importlib.metadata.version(name) for name in ("transformers", "tokenizers")],
            "tokenizer": tokenizer_digest,
            "dataset": content_of(settings.dataset),
            "validation_dataset": content_of(settings.validation_dataset),
            "validation_draw": [settings.val_set_size, settings.seed] if is_drawn else None,
            "max_length": settings.max_length,
        }
    )


def read_manifest(folder: Path, digest: str) -> dict | None:
    """The manifest of a complete, undamaged folder; None when there is none."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        known = (manifest["format"], manifest["version"], manifest["digest"]) == (FORMAT, FORMAT_VERSION, digest)
        return manifest if known and sizes_agree(folder, manifest) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def publish(output_dir: Path, digest: str, write: Callable[[Path], dict]) -> tuple[Path, dict]:
    """Lets `write` fill a temporary folder and return its manifest, then renames it to output_dir/digest."""
    folder = output_dir / digest
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{digest[:16]}.", suffix=".partial", dir=output_dir))
    except OSError as error:
        raise UserError(f"The cache folder {output_dir} cannot be written: {error.strerror}.") from error
    try:
        manifest = write(partial)
        with open(partial / "manifest.json", "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o755)
        return folder, _rename(partial, folder, digest, manifest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path, digest: str, manifest: dict) -> dict:
    for _ in range(3):
        try:
            os.rename(partial, folder)
            _flush_folder(folder.parent)
            return manifest
        except OSError:
            if not folder.exists():
                raise
        others = read_manifest(folder, digest)
        if others is not None:
            return others  # another program was faster; its content is the same
        damaged = Path(tempfile.mkdtemp(prefix=f".{digest[:16]}.", suffix=".damaged", dir=folder.parent))
        try:
            os.rename(folder, damaged / "folder")
        except FileNotFoundError:
            pass
        shutil.rmtree(damaged, ignore_errors=True)
    raise UserError(f"The folder {folder} is damaged and cannot be replaced; remove it and try again.")


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
