"""tools/check_includes.py: the tree keeps its include directions, and a wrong include is caught."""

from pathlib import Path

import pytest

import check_includes

ROOT = Path(__file__).resolve().parent.parent.parent


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_this_tree():
    assert check_includes.violations(ROOT) == []


@pytest.mark.parametrize(
    "path, line, reason",
    [
        ("src/layers/moe.cpp", '#include "models/decoder.h"', "layers may not include models"),
        ("src/layers/moe.cpp", "#  include <models/decoder.h>", "layers may not include models"),
        ("src/base/file.cpp", '#include "headrace/recipe.h"', "base may not include config"),
        ("src/models/families/dense.cpp", '#include "headrace/train.h"', "models may not include trainer"),
        ("src/layers/moe.h", '#include "router.h"', "by its path from src/"),
        ("src/layers/moe.h", '#include "headrace/new.h"', "not in PUBLIC_HEADERS"),
        ("src/vision/tower.h", "", "has no rule"),
        ("include/headrace/train.h", '#include "models/decoder.h"', "public headers (headrace/...) only"),
        ("include/headrace/recipe.h", '#include "headrace/train.h"', "config may not include trainer"),
        ("examples/finetune.cpp", '#include "base/file.h"', "public headers (headrace/...) only"),
    ],
)
def test_a_wrong_include_is_caught(path, line, reason, tmp_path, capsys):
    write(tmp_path, path, f"#pragma once\n\n{line}\n")
    assert check_includes.main([str(tmp_path)]) == 1
    found = capsys.readouterr().out.splitlines()
    assert len(found) == 1 and found[0].startswith(path) and reason in found[0]
    assert not line or f"{path}:3:" in found[0]


def test_right_includes_pass(tmp_path):
    write(tmp_path, "src/layers/moe.cpp", '#include "layers/moe.h"\n#include <vector>\n#include "headrace/token_batch.h"\n')
    write(tmp_path, "src/trainer/train.cpp", '#include "headrace/train.h"\n#include "models/decoder.h"\n')
    write(tmp_path, "examples/finetune.cpp", "#include <headrace/train.h>\n")
    assert check_includes.violations(tmp_path) == []
