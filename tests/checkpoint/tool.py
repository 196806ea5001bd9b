"""Runs checkpoint_tool, the C++ side of the tests in this folder."""

import os
import subprocess

TOOL = os.environ.get("HEADRACE_CHECKPOINT_TOOL", "")


def run(*arguments, code=0):
    """Runs one command, checks its exit code and returns standard output (code 0) or standard error."""
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}, wanted {code}: {done.stderr}"
    return done.stdout if code == 0 else done.stderr
