#!/usr/bin/env bash
# Installs what is missing: Debian packages (when root, else prints the list), and the pinned Python environment at .venv.
# Usage: tools/setup.sh. A second run finds everything there and does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build ccache nlohmann-json3-dev libyaml-cpp-dev libcli11-dev libspdlog-dev libfmt-dev libgtest-dev
  clang clang-format clang-tidy libclang-rt-14-dev)
missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
fi
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "These Debian packages are missing; install them and run this again:" >&2
    echo "  sudo apt-get install ${missing[*]}" >&2
    exit 2
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

python=${PYTHON:-python3}
stamp=$(cat requirements.txt requirements-no-deps.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/installed 2>/dev/null)" != "$stamp" ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; $python is older. Set PYTHON=..." >&2; exit 2; }
  [ -x .venv/bin/python ] || "$python" -m venv .venv || { echo "$python cannot make a virtual environment; install python3-venv" >&2; exit 2; }
  echo "installing the Python environment (torch is several GB the first time)"
  .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt
  .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements-no-deps.txt
  echo "$stamp" >.venv/installed
fi
