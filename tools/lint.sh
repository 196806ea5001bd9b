#!/usr/bin/env bash
# Style and structure: clang-format, clang-tidy on changed or all C++ sources, ruff, and who may include whom.
# Usage: tools/lint.sh [BUILD]   (BUILD has compile_commands.json; without it clang-tidy is skipped)
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
python=.venv/bin/python

mapfile -t sources < <(git ls-files '*.h' '*.cpp' '*.cu')
clang-format --dry-run --Werror "${sources[@]}"
$python -m ruff check --quiet .
$python -m ruff format --quiet --check .
$python tools/check_includes.py
