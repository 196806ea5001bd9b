"""Settings: what the program is told, checked before anything is read.

Flow: JSON file or flags -> [settings] -> pipeline. The C++ program writes the JSON file from a recipe.
"""

import difflib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from headrace.errors import UserError

FORMATS = ("auto", "messages", "prompt_completion", "text", "tokenized")


@dataclass
class DatasetSettings:
    path: list[str] = field(default_factory=list)  # json or jsonl files
    format: str = "auto"
    limit: int = 0  # use at most this many records; 0 = all
    train_on_prompt: bool = False  # default: loss on answers only
    chat_template: str = ""  # path of a template; empty: the tokenizer's own
    split: str = ""  # reserved for hub names


@dataclass
class Settings:
    model_path: str
    dataset: DatasetSettings
    max_length: int  # tokens; documents are cut there
    output_dir: str  # the cache: the result is a folder inside
    validation_dataset: DatasetSettings | None = None
    val_set_size: float = 0  # below 1 a share, from 1 a count of records taken from dataset; unused with a validation_dataset
    seed: int = 42  # chooses the records of val_set_size


def read_settings(file: str) -> Settings:
    """Reads the JSON file. Throws UserError: unreadable, an unknown or missing key, a value of the wrong type or range."""
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The settings file {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"The settings file {file} is not JSON: {error}.") from error
    return settings_from(values)


def settings_from(values: dict) -> Settings:
    values = _checked(Settings, values, "the settings")
    values["dataset"] = DatasetSettings(**_checked(DatasetSettings, values["dataset"], "dataset"))
    if values.get("validation_dataset") is not None:
        checked = _checked(DatasetSettings, values["validation_dataset"], "validation_dataset")
        values["validation_dataset"] = DatasetSettings(**checked)
        if not values["validation_dataset"].path:
            values["validation_dataset"] = None
    settings = Settings(**values)
    for name, dataset in (("dataset", settings.dataset), ("validation_dataset", settings.validation_dataset)):
        if dataset is not None:
            _check_dataset(name, dataset)
    _check_whole(settings)
    return settings


def _checked(kind: type, values: object, where: str) -> dict:
    if not isinstance(values, dict):
        raise UserError(f"{where} must be an object with keys, but is {_shown(values)}.")
    known = {entry.name: entry for entry in fields(kind)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
            raise UserError(f"Unknown key {key} in {where}; {hint}")
    required = {"model_path", "dataset", "max_length", "output_dir"} & set(known)
    missing = sorted(required - set(values))
    if missing:
        raise UserError(f"Missing in {where}: {', '.join(missing)}.")
    return dict(values)


def _check_dataset(name: str, dataset: DatasetSettings) -> None:
    if isinstance(dataset.path, str):
        dataset.path = [dataset.path]
    if not isinstance(dataset.path, list) or not all(isinstance(path, str) and path for path in dataset.path):
        raise UserError(f"{name}.path must be a list of files, but is {_shown(dataset.path)}.")
    if not dataset.path:
        raise UserError(f"{name}.path names no file; give one or more json or jsonl files.")
    if dataset.format not in FORMATS:
        near = difflib.get_close_matches(str(dataset.format), FORMATS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(FORMATS)}."
        raise UserError(f"{name}.format is {_shown(dataset.format)}; {hint}")
    if not _is_whole(dataset.limit) or dataset.limit < 0:
        raise UserError(f"{name}.limit is {_shown(dataset.limit)}, but must be a count of records (0 = all).")
    if not isinstance(dataset.train_on_prompt, bool):
        raise UserError(f"{name}.train_on_prompt is {_shown(dataset.train_on_prompt)}, but must be true or false.")
    if not isinstance(dataset.chat_template, str):
        raise UserError(f"{name}.chat_template is {_shown(dataset.chat_template)}, but must be the path of a template file.")
    if dataset.split:
        raise UserError(
            f"{name}.split is {_shown(dataset.split)}, but splits of hub datasets are not supported yet; leave it empty."
        )


def _check_whole(settings: Settings) -> None:
    for name in ("model_path", "output_dir"):
        value = getattr(settings, name)
        if not isinstance(value, str) or not value:
            raise UserError(f"{name} must be the path of a folder, but is {_shown(value)}.")
    if not _is_whole(settings.max_length) or settings.max_length < 2:
        raise UserError(f"max_length is {_shown(settings.max_length)}, but must be a number of tokens, 2 or more.")
    if not _is_whole(settings.seed) or settings.seed < 0:
        raise UserError(f"seed is {_shown(settings.seed)}, but must be a whole number, 0 or more.")
    size = settings.val_set_size
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0 or (size > 1 and size != int(size)):
        raise UserError(f"val_set_size is {_shown(size)}, but must be a share below 1 or a whole count of records.")
    settings.val_set_size = float(size)  # 1 and 1.0 are the same setting, and must have the same digest


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
