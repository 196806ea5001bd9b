"""Include directions: who may include whom in src/, apps/, include/ and examples/.

Usage: python tools/check_includes.py [ROOT]
Prints one line per violation and exits with code 1 when there is any. The rules stand in docs/architecture.md, with reasons.
"""

import re
import sys
from pathlib import Path

# Folders of src/, and apps/: what each may include beside itself. Lower floors first.
MAY_INCLUDE = {
    "base": set(),
    "config": {"base"},
    "distributed": {"base"},
    "kernels": {"base"},
    "data": {"config", "base"},
    "layers": {"kernels", "distributed", "config", "base"},
    "optim": {"kernels", "distributed", "config", "base"},
    "checkpoint": {"distributed", "config", "base"},
    "models": {"layers", "checkpoint", "config", "base"},
    "trainer": {"models", "layers", "data", "optim", "checkpoint", "distributed", "config", "base"},
    "apps": {"trainer", "models", "data", "checkpoint", "distributed", "config", "base"},
}
# A public header counts as one of the folder that implements it.
PUBLIC_HEADERS = {
    "error.h": "base",
    "token_batch.h": "base",
    "recipe.h": "config",
    "world.h": "distributed",
    "train.h": "trainer",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def folder_of(path: Path) -> str:
    """The folder whose rules hold for a file, given by its path from the root: "layers", "apps", ..., or "examples"."""
    if path.parts[0] == "src":
        return path.parts[1]
    if path.parts[0] == "include":
        return PUBLIC_HEADERS.get(path.name, path.name)
    return path.parts[0]


def fault_of(path: Path, quote: str, name: str) -> str | None:
    """What is wrong with one include line of `path`, or None."""
    parts = Path(name).parts
    if parts[0] != "headrace" and parts[0] not in MAY_INCLUDE:
        return None if quote == "<" else 'a header of the project is named by its path from src/ ("base/file.h")'
    if parts[0] == "headrace":
        included = PUBLIC_HEADERS.get(parts[-1])
        if included is None:
            return f"the public header {name} is not in PUBLIC_HEADERS of tools/check_includes.py"
    else:
        included = parts[0]
        if path.parts[0] in ("include", "examples"):
            return f"{path.parts[0]}/ may include public headers (headrace/...) only"
    folder = folder_of(path)
    if folder == "examples" or included == folder or included in MAY_INCLUDE[folder]:
        return None
    return f"{folder} may not include {included}, only {', '.join(sorted(MAY_INCLUDE[folder])) or 'itself'}"


def violations(root: Path) -> list[str]:
    found = []
    for top in ("src", "apps", "include", "examples"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            path = file.relative_to(root)
            if folder_of(path) not in MAY_INCLUDE.keys() | {"examples"}:
                found.append(f"{path}: {folder_of(path)} has no rule in tools/check_includes.py")
                continue
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                match = INCLUDE.match(line)
                fault = match and fault_of(path, *match.groups())
                if fault:
                    found.append(f"{path}:{number}: {line.strip()}: {fault}")
    return found


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = violations(root)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
