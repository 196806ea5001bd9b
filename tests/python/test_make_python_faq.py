"""The program that makes data/python_faq, on a small piece of reStructuredText with what the FAQ holds, and its files."""

import json
import re
from pathlib import Path

import pytest

import make_python_faq

DATA = Path(__file__).parents[2] / "data" / "python_faq"
SOURCE = """
==========
A FAQ
==========

.. only:: html

   .. contents::

A Section
=========

.. _why-me:

Why is ``x`` so?
----------------

See :func:`~os.path.join`, :meth:`!split()`, :func:`sorted(y) <sorted>`, :term:`hashable`, :pep:`8` and
:ref:`why-me`, or the `docs
<https://docs.python.org>`_::

   def f(x):

       return x

.. XXX a comment

   that goes on

* one
  more
* ``two``

Text [#]_ \\ here. ::

   >>> 1

.. note::

   Take *care*.

Empty?
------

Next Section
============

Is C code C?
------------

Yes, it is so here:

.. code-block:: c

   int x;

.. testsetup::

   hidden

.. doctest::

   >>> 1 # doctest: +SKIP
   1
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "faq").mkdir()
    for name in make_python_faq.FILES:
        (tmp_path / "faq" / f"{name}.rst.txt").write_text(SOURCE if name == "general" else "")
    return tmp_path


def test_questions_become_records_in_markdown(source):
    first, second = make_python_faq.records(source)
    assert [turn["role"] for turn in first["messages"]] == ["user", "assistant"]
    assert first["messages"][0]["content"] == "Why is `x` so?"
    assert first["messages"][1]["content"] == (
        "See `join`, `split()`, `sorted(y)`, hashable, PEP 8 and Why is x so?, or the [docs](https://docs.python.org):\n\n"
        "```python\ndef f(x):\n\n    return x\n```\n\n"
        "- one more\n- `two`\n\n"
        "Text [#]_ here.\n\n```python\n>>> 1\n```\n\n"
        "Note: Take *care*."
    )
    assert second["messages"][1]["content"] == "Yes, it is so here:\n\n```c\nint x;\n```\n\n```python\n>>> 1\n1\n```"


def test_long_answers_end_with_a_paragraph():
    blocks = ["One sentence.", "An example:", "```\ncode\n```", "word " * 100]
    assert make_python_faq.shortened(blocks, 60) == "One sentence.\n\nAn example:\n\n```\ncode\n```"
    assert make_python_faq.shortened(blocks, 8) == "One sentence."


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_data_is_clean(split):
    records = [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text().splitlines()]
    assert len(records) > 10
    for record in records:
        question, answer = (turn["content"] for turn in record["messages"])
        assert make_python_faq.num_words(question) + make_python_faq.num_words(answer) <= make_python_faq.MAX_WORDS
        assert answer == answer.strip() and answer.count("```") % 2 == 0
        prose = re.sub(r"```.*?```", "", answer, flags=re.DOTALL)
        assert not re.search(r":\w+:`|``|`__?(\W|$)|^\.\. |::$", question + "\n" + prose, re.MULTILINE), question


def test_no_question_is_in_both_splits():
    questions = [
        {json.loads(line)["messages"][0]["content"] for line in (DATA / f"{split}.jsonl").read_text().splitlines()}
        for split in ("train", "validation")
    ]
    assert not questions[0] & questions[1]


@pytest.mark.skipif(not make_python_faq.SOURCE.is_dir(), reason="python3.11-doc is not installed")
def test_the_files_are_what_the_program_makes():
    everything = make_python_faq.records(make_python_faq.SOURCE)
    held_out = make_python_faq.held_out_questions(everything)
    for split in ("train", "validation"):
        made = [r for r in everything if (r["messages"][0]["content"] in held_out) == (split == "validation")]
        assert made == [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text().splitlines()]
