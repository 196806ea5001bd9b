"""Plot: draws the curves of a run from its logs.

Usage: python -m headrace.plot OUTPUT_DIR
Reads training.jsonl (step, loss, lr, grad_norm) and validation.jsonl (step, val_loss) and writes loss.png next to them.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

from headrace.errors import UserError

LOSS, SMOOTHED, VALIDATION, OTHER = "#9db8d2", "#1f5a93", "#c8553d", "#4c7a5b"


def read_log(file: Path) -> list[dict]:
    """Entries in order of steps. After a resume a step may stand twice: the later line is the valid one."""
    entries = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; give the output_dir of a run.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            entries[entry["step"]] = entry
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # a run that is still writing, or was killed while it wrote
                continue
            raise UserError(f"{file}, line {number} is not a JSON object with a step.") from error
    return [entries[step] for step in sorted(entries)]


def smoothed(values: list[float], share: float) -> list[float]:
    """Exponential moving average without the pull to zero at the start; values that are not finite are passed over."""
    result, average, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            average = share * average + (1 - share) * value
            weight = share * weight + (1 - share)
        result.append(average / weight if weight else math.nan)
    return result


def plot(output_dir: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    training = [entry for entry in read_log(output_dir / "training.jsonl") if "loss" in entry]
    if not training:
        raise UserError(f"{output_dir / 'training.jsonl'} holds no step yet.")
    validation_file = output_dir / "validation.jsonl"
    validation = read_log(validation_file) if validation_file.exists() else []
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(9, 8), sharex=True, height_ratios=[3, 1, 1], layout="constrained"
    )
    steps, losses = _curve(training, "loss")
    top.plot(steps, losses, color=LOSS, linewidth=1, marker="." if len(steps) < 50 else "", label="training loss")
    if len(steps) >= 20:
        share = 1 - 1 / max(5, len(steps) / 25)
        top.plot(steps, smoothed(losses, share), color=SMOOTHED, linewidth=2, label="training loss, smoothed")
    if validation:
        top.plot(
            *_curve(validation, "val_loss"), color=VALIDATION, linewidth=1.5, marker="o", markersize=4, label="validation loss"
        )
    top.set_ylabel("loss (nats per trained token)")
    top.set_title(f"{output_dir.resolve().name}: loss {_last(losses)} at step {steps[-1]}")
    top.legend()
    middle.plot(*_curve(training, "lr"), color=OTHER)
    middle.set_ylabel("learning rate")
    middle.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    bottom.plot(*_curve(training, "grad_norm"), color=OTHER, linewidth=1)
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("optimizer step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    target, partial = output_dir / "loss.png", output_dir / f".loss.{os.getpid()}.png"
    try:
        figure.savefig(partial, dpi=120)
        os.replace(partial, target)
    finally:
        pyplot.close(figure)
        partial.unlink(missing_ok=True)
    return target


def _curve(entries: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Steps and values; null (how a number that is not finite is logged) leaves a gap."""
    known = [entry for entry in entries if name in entry]
    values = [math.nan if entry[name] is None else float(entry[name]) for entry in known]
    return [entry["step"] for entry in known], values


def _last(values: list[float]) -> str:
    return f"{values[-1]:.4f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m headrace.plot", description="Draws loss.png from the logs of a run.")
    parser.add_argument("output_dir", type=Path, help="folder with training.jsonl")
    try:
        print(plot(parser.parse_args(arguments).output_dir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
