"""The program: its two ways to be called, its answer on stdout, and exit code 2 with one sentence for faults of the user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import chat, read_split, write_jsonl
from headrace.prepare.__main__ import main

PYTHON_FOLDER = Path(__file__).parents[2] / "python"


def run(capsys, *arguments) -> tuple[int, str, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_config(workshop, **changes) -> Path:
    data = write_jsonl(workshop.folder / "data.jsonl", [chat("a", "b"), chat("c", "d")])
    dataset = {"path": [data], "format": "auto", "limit": 0, "train_on_prompt": False, "chat_template": "", "split": ""}
    config = {"model_path": str(workshop.folder / "model"), "dataset": dataset, "validation_dataset": None, "val_set_size": 0.0}
    config |= {"max_length": 64, "seed": 42, "output_dir": str(workshop.cache)} | changes
    file = workshop.folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return file


def test_config_file_and_flags_give_the_same_folder(workshop, capsys):
    workshop.tokenizer()
    config = write_config(workshop, val_set_size=1)
    code, out, err = run(capsys, "--config", config)
    answer = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and err == ""
    assert answer["reused"] is False and answer["splits"]["train"]["num_documents"] == 1
    assert answer["splits"]["validation"]["num_dropped"] == 0
    assert len(read_split(Path(answer["folder"]), "validation")) == 1
    flags = ["--model", workshop.folder / "model", "--data", workshop.folder / "data.jsonl", "--output", workshop.cache]
    code, out, _ = run(capsys, *flags, "--max-length", 64, "--val-set-size", 1)
    assert code == 0 and json.loads(out) == {**answer, "reused": True}


def test_as_a_process(workshop):
    workshop.tokenizer()
    config = write_config(workshop)
    environment = {**os.environ, "PYTHONPATH": str(PYTHON_FOLDER)}
    command = [sys.executable, "-m", "headrace.prepare", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=workshop.folder)
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["splits"]["train"]["num_documents"] == 2
    config.unlink()
    failed = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=workshop.folder)
    assert failed.returncode == 2 and failed.stdout == "" and failed.stderr.count("\n") == 1
    assert failed.stderr.startswith("headrace: The settings file") and "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": "nowhere"}, "The model folder nowhere does not exist"),
        ({"dataset": {"path": ["nowhere.jsonl"]}}, "The file nowhere.jsonl cannot be read: No such file"),
        ({"dataset": {"path": []}}, "dataset.path names no file"),
        ({"dataset": {"path": ["a"], "fromat": "text"}}, "Unknown key fromat in dataset; did you mean format?"),
        ({"dataset": {"path": ["a"], "format": "mesages"}}, 'dataset.format is "mesages"; did you mean messages?'),
        ({"dataset": {"path": ["a"], "limit": -1}}, "dataset.limit is -1"),
        ({"dataset": {"path": ["a"], "train_on_prompt": "no"}}, 'dataset.train_on_prompt is "no"'),
        ({"dataset": {"path": ["a"], "split": "train"}}, "splits of hub datasets are not supported yet"),
        ({"dataset": "a.jsonl"}, "dataset must be an object"),
        ({"max_length": 1}, "max_length is 1"),
        ({"max_length": True}, "max_length is true"),
        ({"max_length": "absent"}, "Missing in the settings: max_length"),
        ({"val_set_size": 1.5}, "val_set_size is 1.5"),
        ({"val_set_size": -1}, "val_set_size is -1"),
        ({"seed": "x"}, 'seed is "x"'),
        ({"sed": 3}, "Unknown key sed in the settings; did you mean seed?"),
        ({"output_dir": "/dev/null/x"}, "The cache folder /dev/null/x cannot be written"),
    ],
)
def test_faults_of_the_user_end_with_exit_code_2(workshop, capsys, changes, message):
    workshop.tokenizer()
    code, out, err = run(capsys, "--config", write_config(workshop, **changes))
    assert code == 2 and out == "" and err.startswith("headrace: ") and err.count("\n") == 1
    assert message in err
    assert not workshop.cache.exists() or list(workshop.cache.iterdir()) == []


def test_no_chat_template(workshop, capsys):
    workshop.tokenizer(template=None)
    code, _, err = run(capsys, "--config", write_config(workshop))
    assert code == 2 and "has no chat template, but the data holds messages" in err


def test_folder_without_a_tokenizer(workshop, capsys):
    (workshop.folder / "model").mkdir()
    (workshop.folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = run(capsys, "--config", write_config(workshop))
    assert code == 2 and "No tokenizer could be loaded from" in err and err.count("\n") == 1


@pytest.mark.parametrize(("name", "content"), [("empty.jsonl", ""), ("empty.json", "[]"), ("blank.jsonl", "\n\n")])
def test_empty_dataset(workshop, capsys, name, content):
    workshop.tokenizer()
    (workshop.folder / name).write_text(content)
    dataset = {"path": [str(workshop.folder / name)]}
    code, _, err = run(capsys, "--config", write_config(workshop, dataset=dataset))
    assert code == 2 and "holds no record" in err


def test_settings_that_are_not_json(workshop, capsys):
    file = workshop.folder / "config.json"
    file.write_text("{")
    code, _, err = run(capsys, "--config", file)
    assert code == 2 and "is not JSON" in err


def test_missing_and_contradicting_flags(workshop, capsys):
    assert run(capsys, "--model", "m")[0] == 2
    assert run(capsys, "--config", "c", "--seed", "3")[0] == 2


def test_truncation_is_told(workshop, capsys):
    workshop.tokenizer()
    config = write_config(workshop, max_length=17)
    file = write_jsonl(workshop.folder / "data.jsonl", [chat("a", "b " * 30), chat("c", "d")])
    assert file in config.read_text()
    code, out, err = run(capsys, "--config", config)
    assert code == 0 and json.loads(out)["splits"]["train"]["num_truncated"] >= 1
    assert "records were cut at max_length" in err
