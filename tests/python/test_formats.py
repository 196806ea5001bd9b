"""Formats: what records are taken for, how messages are brought to the form that templates expect, what is refused and how."""

import json

import pytest

from conftest import CHATML, chat, write_jsonl
from headrace.errors import UserError
from headrace.prepare.formats import DETECTION, NOT_YET, Conversation, Passage, Tokens, detect_format, read_documents


def read(tmp_path, *records, name="data.jsonl", **options):
    return list(read_documents([write_jsonl(tmp_path / name, records)], **options))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [], "prompt": "", "completion": "", "text": ""}, "messages"),
        ({"conversations": [], "instruction": ""}, "sharegpt"),
        ({"instruction": "", "output": "", "text": "", "prompt": "", "completion": ""}, "alpaca"),
        ({"prompt": "", "completion": "", "query": "", "text": ""}, "prompt_completion"),
        ({"query": "", "response": "", "text": ""}, "query_response"),
        ({"text": "", "input_ids": [], "prompt": ""}, "text"),
        ({"input_ids": [], "labels": []}, "tokenized"),
    ],
)
def test_detection_order(record, expected):
    assert detect_format(record, "here") == expected
    assert detect_format(dict(reversed(record.items())), "here") == expected


@pytest.mark.parametrize("name", NOT_YET)
def test_formats_of_later_are_refused_by_name(tmp_path, name):
    keys = dict(DETECTION)[name]
    with pytest.raises(UserError, match=f"data.jsonl, line 1: the {name} format is not supported yet"):
        read(tmp_path, dict.fromkeys(keys, ""))


def test_json_list_json_lines_blank_lines_and_byte_order_mark(tmp_path):
    records = [{"text": "one\u2028two"}, {"text": "three"}]  # U+2028 ends a line for str.splitlines, not for JSON
    lines = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n"
    files = {
        "a.jsonl": lines,
        "b.json": lines,
        "c.json": json.dumps(records, indent=2),
        "d.json": "\ufeff \n" + json.dumps(records),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert [document.completion for document in read_documents([str(tmp_path / name)])] == ["one\u2028two", "three"], name
    (tmp_path / "e.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    assert len(list(read_documents([str(tmp_path / "e.jsonl")]))) == 2


def test_each_file_has_its_own_format_and_limit_counts_over_all(tmp_path):
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}, {"text": "b"}])
    messages = write_jsonl(tmp_path / "messages.jsonl", [chat("c", "d"), chat("e", "f")])
    kinds = [type(document) for document in read_documents([text, messages])]
    assert kinds == [Passage, Passage, Conversation, Conversation]
    assert len(list(read_documents([text, messages], limit=3))) == 3
    assert len(list(read_documents([text, messages], limit=2))) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"line 2 is not JSON \(Expecting value"),
        ('{"text": "a"}\n\n[1]\n', "line 3 holds a list, but a record must be a JSON object"),
        ('{"text": "a"}\n{"txt": "b"}\n', r"line 2 lacks the key text \(found: txt\)"),
        ('{"txt": "b", "id": 3}\n', r"line 1: no known format has the keys of this record \(txt, id\)"),
        ('{"text": null}\n', "line 1: text is null, but must be a string"),
        ('{"prompt": 3, "completion": ""}\n', "line 1: prompt is a number, but must be a string or a list"),
        ('{"messages": []}\n', "line 1: the list of messages is empty"),
        ('{"messages": ["hi"]}\n', "line 1, message 1 must be an object with role and content"),
        ('{"messages": [{"role": "user"}]}\n', "message 1 has neither content nor tool_calls"),
        ('{"messages": [{"role": "user", "content": 3}]}\n', "message 1: content is a number"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', "part of type image, but only text parts"),
        ('{"messages": [{"role": "user", "content": "a", "loss": true}]}\n', "loss is true on a user message"),
        ('{"messages": [{"role": "assistant", "content": "a", "loss": 1}]}\n', "loss is 1, but must be true or false"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}\n',
            "tool_calls must hold function with name",
        ),
        ('{"messages": [{"role": "user", "content": ""}], "tools": "{"}\n', "line 1: tools is not JSON"),
        ('{"input_ids": [1, 2.5]}\n', "input_ids must be a flat list of whole numbers"),
        ('{"input_ids": [[1, 2]]}\n', "input_ids must be a flat list of whole numbers"),
        ('{"input_ids": [1, 2], "labels": [1]}\n', "labels has 1 entries and input_ids 2"),
        ('{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}\n', r"labels\[0\] is 2, but must be -100 or input_ids\[0\] = 1"),
    ],
)
def test_refused_with_place_and_reason(tmp_path, content, message):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        list(read_documents([str(file)]))
    assert str(caught.value).startswith(str(file))


def test_not_utf8_and_not_a_list_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match="a.jsonl, line 2 is not JSON .*utf-8"):
        list(read_documents([str(tmp_path / "a.jsonl")]))
    (tmp_path / "b.json").write_text('[{"text": "a"}, {"text": "b"')
    with pytest.raises(UserError, match="b.json is not JSON"):
        list(read_documents([str(tmp_path / "b.json")]))
    with pytest.raises(UserError, match="x.parquet is neither a .json nor a .jsonl file"):
        list(read_documents(["x.parquet"]))


def test_messages_are_brought_to_the_form_of_templates(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    record = {
        "messages": [
            {"role": "system", "content": None, "reasoning_content": "r"},
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "1"},
            {"role": "assistant", "content": "done", "loss": False, "tool_calls": None},
        ],
        "tools": json.dumps([{"type": "function"}]),
    }
    (document,) = read(tmp_path, record)
    assert [message["content"] for message in document.messages] == ["", "one two", "", "1", "done"]
    assert document.messages[2]["tool_calls"] == [{**call, "function": {"name": "add", "arguments": {"a": 1}}}]
    assert document.messages[4] == {"role": "assistant", "content": "done"}
    assert document.trained == [False, False, True, False, False]
    assert document.tools == [{"type": "function"}]


def test_prompt_and_completion_of_messages_train_the_completion_only(tmp_path):
    prompt = chat("a", "b", "c")["messages"]
    completion = [{"role": "assistant", "content": "d"}]
    for record in ({"prompt": prompt, "completion": completion}, {"prompt": prompt, "completion": "d"}):
        (document,) = read(tmp_path, record)
        assert [message["content"] for message in document.messages] == ["a", "b", "c", "d"]
        assert document.trained == [False, False, False, True]


def test_tools_and_tool_calls_reach_the_template(workshop):
    template = "{{ tools[0]['function']['name'] }}:" + CHATML.replace(
        "message['content']", "(message.tool_calls[0].function | tojson if message.tool_calls else message['content'])"
    )
    workshop.tokenizer(template=template)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    record = chat("what is 1?", "", tool_calls=[call]) | {"tools": [tool]}
    document = workshop.prepare([record])[0]
    assert workshop.trained_text(document) == '{"name": "add", "arguments": {"a": 1}}<|im_end|>'
    assert workshop.hugging_face().decode(document[0]).startswith("add:<|im_start|>user")


def test_template_that_joins_arguments_as_text(workshop):
    joining = "(message.tool_calls[0].function.name + message.tool_calls[0].function.arguments if message.tool_calls else '')"
    workshop.tokenizer(template=CHATML.replace("message['content']", f"message['content'] + {joining}"))
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":"é"}'}}
    document = workshop.prepare([chat("what is 1?", "", tool_calls=[call])])[0]
    assert workshop.trained_text(document) == 'add{"a": "é"}<|im_end|>'


def test_template_that_fails_names_the_record(workshop):
    workshop.tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="line 1: the chat template fails on the messages: roles must alternate"):
        workshop.prepare([chat("a", "b")])


def test_answer_without_a_question_is_refused(workshop):
    workshop.tokenizer()
    with pytest.raises(UserError, match="message 1: an answer without a question"):
        workshop.prepare([{"messages": [{"role": "assistant", "content": "a"}]}])


def test_tokenized_is_kept_as_it_is(tmp_path):
    (document,) = read(tmp_path, {"input_ids": [7, 8, 9], "labels": None})
    assert document == Tokens([7, 8, 9], [1, 1, 1], f"{tmp_path}/data.jsonl, line 1")
