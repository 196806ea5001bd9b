"""Faults that users of fine-tuning programs have reported about data; each test is named after its kind."""

import pytest

from conftest import CHATML, CHATML_MARKED, chat
from headrace.errors import UserError
from headrace.prepare.__main__ import main
from headrace.prepare.pipeline import prepare

# As Qwen3: reasoning of a turn before the last user turn is dropped.
REWRITING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_left_padding_shifts_the_loss_mask(workshop):
    """Neither a left-padding tokenizer nor padding and truncation inside tokenizer.json leave a trace."""
    records = [
        chat("hello", "The capital of France is Paris."),
        chat("What is the capital of France?", "Paris", "And now", "x" * 99),
    ]
    plain = workshop.tokenizer()
    expected = workshop.prepare(records, model=plain)
    padded = workshop.tokenizer(padding=True, padding_side="left", truncation_side="left", model_max_length=16)
    assert workshop.prepare(records, model=padded) == expected
    assert workshop.trained_text(expected[0]) == "The capital of France is Paris.<|im_end|>"
    assert workshop.trained_text(expected[1]) == "Paris<|im_end|>" + "x" * 99 + "<|im_end|>"


def test_template_rewrites_earlier_turns(workshop):
    workshop.tokenizer(template=REWRITING)
    record = chat("a", "b", "c", "d")
    record["messages"][1]["reasoning_content"] = "because"
    record["messages"][3]["reasoning_content"] = "therefore"
    with pytest.raises(UserError, match="line 1, message 2: the chat template rewrites earlier turns.*<think>because"):
        workshop.prepare([record])
    assert not list(workshop.cache.iterdir())


def test_template_rewrites_earlier_turns_that_are_not_trained(workshop):
    """What is not trained may be rewritten: the model sees the same when it generates."""
    workshop.tokenizer(template=REWRITING)
    record = chat("a", "b", "c", "d", reasoning_content="therefore")
    record["messages"][1]["loss"] = False
    assert workshop.trained_text(workshop.prepare([record])[0]) == "<think>therefore</think>d<|im_end|>"


def test_template_whose_generation_prompt_is_not_what_it_renders(workshop):
    workshop.tokenizer(template=CHATML.replace("assistant\n' }}", "assistant\n<think>' }}"))
    with pytest.raises(UserError, match="message 2: the chat template rewrites"):
        workshop.prepare([chat("a", "b")])


def test_no_generation_tag_gives_all_zero_mask(workshop):
    """The prefix check finds what {% generation %} marks, and what transformers returns for it."""
    records = [chat("hello", "world"), chat("one", "two", "three", "\n\n leading newlines \n")]
    marked = workshop.prepare(records, model=workshop.tokenizer(template=CHATML_MARKED))
    hugging_face = workshop.hugging_face()
    for record, (ids, mask) in zip(records, marked, strict=True):
        reference = hugging_face.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
        if record is records[0]:  # in the second a newline of prompt and answer would become one token: see test_tokenize.py
            assert (ids, mask) == (reference["input_ids"], reference["assistant_masks"])
    assert workshop.prepare(records, model=workshop.tokenizer(template=CHATML)) == marked


def test_generation_tag_that_misses_an_answer_gives_all_zero_mask(workshop):
    """Only short answers are marked: the other ones are found by the prefix check."""
    partly = CHATML_MARKED.replace("message['role'] == 'assistant'", "message['content'] == 'short'")
    workshop.tokenizer(template=partly)
    documents = workshop.prepare([chat("a", "short"), chat("a", "long answer"), chat("a", "short", "b", "long answer")])
    expected = ["short<|im_end|>", "long answer<|im_end|>", "short<|im_end|>long answer<|im_end|>"]
    assert [workshop.trained_text(document) for document in documents] == expected


def test_generation_tag_around_nothing_gives_all_zero_mask(workshop):
    """Only content is marked, and an answer is all tool call: the prefix check finds it."""
    content_only = CHATML_MARKED.replace(
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{% generation %}{{ message['content'] }}{% endgeneration %}"
        "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% endif %}{{ '<|im_end|>' }}",
    )
    workshop.tokenizer(template=content_only)
    record = chat("add", "", "thanks", "welcome")
    record["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "call", "arguments": {}}}]
    assert workshop.trained_text(workshop.prepare([record])[0]) == "call<|im_end|>welcome<|im_end|>"


def test_end_of_turn_outside_the_generation_tag_is_trained(workshop):
    outside = CHATML_MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}")
    workshop.tokenizer(template=outside)
    assert workshop.trained_text(workshop.prepare([chat("a", "answer")])[0]) == "answer<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_truncated_last_answer_gets_zero_mask(workshop, template):
    workshop.tokenizer(template=template)
    records = [chat("a", "The quick brown fox jumps over the lazy dog. " * 20)]
    whole = workshop.prepare(records)[0]
    for max_length in (16, 40):
        ids, mask = workshop.prepare(records, max_length=max_length)[0]
        assert (ids, mask) == (whole[0][:max_length], whole[1][:max_length])
        assert sum(mask) > 0 and mask[-1] == 1


def test_pad_equals_eos_hides_eos(workshop):
    records = [{"text": "hello"}, {"text": "The quick brown fox"}]
    expected = workshop.prepare(records, model=workshop.tokenizer(eos_token="</s>"))
    eos = workshop.hugging_face().eos_token_id
    documents = workshop.prepare(records, model=workshop.tokenizer(eos_token="</s>", pad_token="</s>"))
    assert documents == expected
    for ids, mask in documents:
        assert ids[-1] == eos and mask[-1] == 1 and ids.count(eos) == 1


def test_mask_from_pad_id(workshop):
    """The pad id may be that of a token in use (0 is "!"): it is kept and trained; padding is what attention_mask says."""
    model = workshop.tokenizer(pad_token="!")
    assert workshop.hugging_face().pad_token_id == workshop.hugging_face().convert_tokens_to_ids("!") == 0
    ids, mask = workshop.prepare([chat("a", "Hello!!")], model=model)[0]
    assert workshop.trained_text((ids, mask)) == "Hello!!<|im_end|>"
    tokens = {"input_ids": [0, 0, 5, 0, 6, 0], "attention_mask": [0, 0, 1, 1, 1, 0], "labels": [-100, -100, -100, 0, 6, -100]}
    assert workshop.prepare([tokens], model=model) == [([5, 0, 6], [0, 1, 1])]


def test_batch_without_a_trained_token(workshop, capsys):
    """Records without a trained token are dropped and counted; if none is left, that is an error."""
    workshop.tokenizer()
    records = [chat("a", "b"), chat("only a question"), chat("a", "b", loss=False)]
    arguments = ["--model", str(workshop.folder / "model"), "--output", str(workshop.cache), "--data"]
    settings = workshop.settings(records)
    assert len(workshop.prepare(records)) == 1
    assert prepare(settings).manifest["splits"]["train"]["num_dropped"] == 2
    assert main([*arguments, settings.dataset.path[0]]) == 0
    assert "warning: train: 2 records without a token to train were dropped" in capsys.readouterr().err
    workshop.settings(records[1:])
    assert main([*arguments, settings.dataset.path[0]]) == 2
    assert "None of the 2 records" in capsys.readouterr().err


def test_prompt_longer_than_the_limit_leaves_no_trained_token(workshop):
    workshop.tokenizer()
    with pytest.raises(UserError, match="None of the 1 records.*1 were cut at max_length.*raise max_length"):
        workshop.prepare([chat("question " * 50, "answer")], max_length=20)


@pytest.mark.parametrize("add_bos", [True, False])
def test_exactly_one_bos_in_chats(workshop, add_bos):
    """A template that writes BOS and a tokenizer that adds it do not add up; a template without it is obeyed."""
    bos = "<s>"
    workshop.tokenizer(template="{{ bos_token }}" + CHATML, add_bos=add_bos)
    bos_id = workshop.hugging_face().convert_tokens_to_ids(bos)
    ids, mask = workshop.prepare([chat("a", "b", "c", "d")])[0]
    assert ids[0] == bos_id and ids.count(bos_id) == 1 and mask[0] == 0
    workshop.tokenizer(add_bos=add_bos)
    assert bos_id not in workshop.prepare([chat("a", "b")])[0][0]


def test_exactly_one_bos_in_text(workshop):
    """Text gets BOS when the tokenizer adds one, also when the text begins with it already; it always gets EOS."""
    records = [
        {"prompt": "", "completion": "hello"},
        {"prompt": "<s>", "completion": "hello"},
        {"prompt": "hello", "completion": "!"},
    ]
    workshop.tokenizer(add_bos=True)
    tokenizer = workshop.hugging_face()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    documents = workshop.prepare(records)
    for ids, mask in documents:
        assert ids[0] == bos and ids.count(bos) == 1 and mask[0] == 0
        assert ids[-1] == eos and ids.count(eos) == 1 and mask[-1] == 1
    assert documents[0] == documents[1]
    assert documents[0][0] == [*tokenizer("hello").input_ids, eos]
    workshop.tokenizer(add_bos=False)
    assert all(bos not in ids for ids, _ in workshop.prepare([records[0], records[2]]))
