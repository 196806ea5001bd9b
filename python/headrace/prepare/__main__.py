"""The program: `python -m headrace.prepare --config FILE.json`, or with plain flags.

Prints one line of JSON on stdout at the end: the folder, whether it was reused, and the counts of each split. Warnings go to
stderr.
Exit code 2 and one sentence on stderr for faults of settings, model folder or data; then nothing is left behind.
"""

import argparse
import json
import os
import signal
import sys

from headrace.errors import UserError
from headrace.prepare.settings import FORMATS, Settings, read_settings, settings_from

EXAMPLE = "example: python -m headrace.prepare --model models/SmolLM2 --data train.jsonl --output cache --max-length 2048"


def parse_arguments(arguments: list[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        "python -m headrace.prepare", description="Turns a dataset into token shards.", epilog=EXAMPLE
    )
    parser.add_argument("--config", metavar="FILE.json", help="all settings in one file; no other flag goes with it")
    parser.add_argument("--model", metavar="FOLDER", help="checkpoint whose tokenizer and chat template are used")
    parser.add_argument("--data", metavar="FILE", nargs="+", help="json or jsonl files")
    parser.add_argument("--validation-data", metavar="FILE", nargs="+", help="files of the validation split")
    parser.add_argument("--val-set-size", type=float, help="hold out this share (below 1) or count of the data instead")
    parser.add_argument("--output", metavar="FOLDER", help="the cache; the result is a folder inside")
    parser.add_argument("--max-length", type=int, help="tokens a document holds at most (2048)")
    parser.add_argument("--format", choices=FORMATS, help="auto")
    parser.add_argument("--limit", type=int, help="use at most this many records")
    parser.add_argument("--train-on-prompt", action="store_true", default=None, help="loss on all tokens, not on answers only")
    parser.add_argument("--chat-template", metavar="FILE", help="template in place of the tokenizer's own")
    parser.add_argument("--seed", type=int, help="chooses the records of --val-set-size (42)")
    flags = vars(parser.parse_args(arguments))
    given = {name: value for name, value in flags.items() if value is not None}
    if "config" in given:
        if len(given) > 1:
            parser.error("--config stands alone; put the other settings into the file")
        return read_settings(given["config"])
    missing = [f"--{name}" for name in ("model", "data", "output") if name not in given]
    if missing:
        parser.error(f"{', '.join(missing)} must be given (or --config)")
    common = {name: given[name] for name in ("format", "limit", "train_on_prompt", "chat_template") if name in given}
    values = {name: given[name] for name in ("val_set_size", "seed") if name in given}
    values |= {"model_path": given["model"], "output_dir": given["output"], "max_length": given.get("max_length", 2048)}
    values["dataset"] = {"path": given["data"], **common}
    if "validation_data" in given:
        values["validation_dataset"] = {"path": given["validation_data"], **common}
    return settings_from(values)


def main(arguments: list[str] | None = None) -> int:
    try:
        settings = parse_arguments(arguments)
        from headrace.prepare.pipeline import prepare  # after the settings are known to be good

        prepared = prepare(settings)
    except UserError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    for name, split in prepared.manifest["splits"].items():
        for count, what in (
            ("num_dropped", "without a token to train were dropped"),
            ("num_truncated", "were cut at max_length"),
        ):
            if split.get(count):
                print(f"warning: {name}: {split[count]} records {what}", file=sys.stderr)
    splits = {
        name: {key: value for key, value in split.items() if key != "shards"}
        for name, split in prepared.manifest["splits"].items()
    }
    print(json.dumps({"folder": str(prepared.folder), "reused": prepared.reused, "splits": splits}))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the temporary folder is removed
    sys.exit(main())
