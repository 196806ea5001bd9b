#!/usr/bin/env bash
# Style and structure: clang-format, ruff, who may include whom, and clang-tidy on some C++ sources.
# Usage: tools/lint.sh [BUILD]   (BUILD has compile_commands.json; without it clang-tidy is skipped)
#
# clang-tidy takes 5 s for a source with fmt or nlohmann-json and 15 s for one with ATen, so it does not see them all each time. It
# checks the sources that differ from origin/main when these are 1 to 8; else (no origin, or a large change) a fixed set, of those
# that read no torch header and that handle bytes, files and numbers, where its checks find most.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
python=.venv/bin/python

mapfile -t sources < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
clang-format --dry-run --Werror "${sources[@]}"
$python -m ruff check --quiet . benchmarks/compare
$python -m ruff format --quiet --check . benchmarks/compare
$python tools/check_includes.py

if [ ! -f "$build/compile_commands.json" ]; then
  echo "lint: $build/compile_commands.json is not there, so clang-tidy was skipped; run make build" >&2
  exit 0
fi
torch_free='src/(base/.*|checkpoint/(safetensors_.*|weight_shards|carried_files)|data/packing|optim/schedule|trainer/(progress|schedule_plan))\.cpp'
changed=()
if base=$(git merge-base HEAD origin/main 2>/dev/null); then
  mapfile -t changed < <(git diff --name-only --diff-filter=d "$base" -- 'src/*.cpp' 'apps/*.cpp' |
    grep -v '^src/config/recipe')   # clang's libstdc++ mode refuses std::pair<std::string, RecipeNode> inside RecipeNode
fi
if [ ${#changed[@]} -ge 1 ] && [ ${#changed[@]} -le 8 ]; then
  checked=("${changed[@]}")
else
  mapfile -t checked < <(git ls-files 'src/*.cpp' | grep -xE "$torch_free")
fi

# GCC's precompiled header means nothing to clang: without it for sources that do not need it, as text for the others.
database=$(mktemp -d)
trap 'rm -rf "$database"' EXIT
sed -E 's# -Winvalid-pch -include [^ ]+cmake_pch\.hxx##' "$build/compile_commands.json" >"$database/compile_commands.json"
tidy() {   # one source; speaks only when something is wrong
  local extra=() output
  grep -qxE "$torch_free" <<<"$1" || extra=(--extra-arg-before=-include "--extra-arg-before=$PWD/cmake/precompiled.h")
  output=$(clang-tidy --quiet -p "$database" "${extra[@]}" "$1" 2>&1) || { echo "$output"; return 1; }
}
export -f tidy
export database torch_free
printf '%s\0' "${checked[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'tidy "$0"'
