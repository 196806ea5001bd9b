"""Plot: reads the logs of a run as they are, also unfinished or resumed ones, and writes a picture."""

import json
import math

import pytest

from headrace.errors import UserError
from headrace.plot import main, plot, read_log, smoothed


def log(file, entries, tail=""):
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail)


def test_picture_of_a_run(tmp_path):
    steps = range(1, 31)
    log(
        tmp_path / "training.jsonl",
        [{"step": i, "loss": 3 / i, "lr": 1e-5, "grad_norm": None if i == 4 else 1.0} for i in steps],
    )
    log(tmp_path / "validation.jsonl", [{"step": 10, "val_loss": 1.0}, {"step": 20, "val_loss": 0.5}])
    assert main([str(tmp_path)]) == 0
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loss.png", "training.jsonl", "validation.jsonl"]


def test_one_step_without_validation(tmp_path):
    log(tmp_path / "training.jsonl", [{"step": 1, "loss": float("nan"), "lr": 0.0, "grad_norm": 1.0}])
    assert plot(tmp_path).is_file()


def test_resumed_and_unfinished_logs(tmp_path):
    entries = [{"step": step, "loss": loss} for step, loss in [(1, 3.0), (2, 2.5), (3, 9.0), (2, 2.4), (3, 2.2)]]
    log(tmp_path / "training.jsonl", entries, tail='{"step": 4, "lo')
    assert [(entry["step"], entry["loss"]) for entry in read_log(tmp_path / "training.jsonl")] == [(1, 3.0), (2, 2.4), (3, 2.2)]


def test_faults_of_the_user(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "training.jsonl cannot be read" in capsys.readouterr().err
    (tmp_path / "training.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no step yet"):
        plot(tmp_path)
    (tmp_path / "training.jsonl").write_text('oops\n{"step": 1}\n')
    with pytest.raises(UserError, match="line 1 is not a JSON object with a step"):
        plot(tmp_path)


def test_smoothing_keeps_a_constant_and_passes_over_nan():
    assert smoothed([2.0] * 5, 0.9) == pytest.approx([2.0] * 5)
    assert smoothed([2.0, math.nan, 2.0], 0.5) == pytest.approx([2.0] * 3)
    assert smoothed([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])
