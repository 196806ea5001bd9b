"""Formats: reads json and jsonl files, detects what their records are, and brings them to three plain kinds.

Flow: files -> [formats] -> Conversation | Passage | Tokens -> templates, tokenize. Formats: docs/data.md.
A format is one function below, from a record to a document, and one line in `READERS`; `DETECTION` says which keys mean which.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UserError


@dataclass
class Conversation:
    """Messages for a chat template. `trained[i]`: message i is an answer that the model must predict."""

    messages: list[dict]
    trained: list[bool]
    tools: list[dict] | None
    where: str  # "FILE, line N": for messages to the user


@dataclass
class Passage:
    """Plain text that needs no template: `prompt` is read, `completion` is predicted (and the EOS token after it)."""

    prompt: str
    completion: str
    where: str


@dataclass
class Tokens:
    """Tokens made elsewhere, without padding; loss_mask 1 = trained."""

    input_ids: list[int]
    loss_mask: list[int]
    where: str


Document = Conversation | Passage | Tokens

# The first entry whose keys are all in a record names its format.
DETECTION = (
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction",)),
    ("prompt_completion", ("prompt", "completion")),
    ("query_response", ("query",)),
    ("text", ("text",)),
    ("tokenized", ("input_ids",)),
)
NOT_YET = ("sharegpt", "alpaca", "query_response")


def read_documents(paths: list[str], format: str = "auto", limit: int = 0) -> Iterator[Document]:
    """Documents of all files in order, at most `limit` (0 = all). Throws UserError naming file and line or record."""
    count = 0
    for path in paths:
        file_format = format
        for where, record in read_records(path):
            if limit and count == limit:
                return
            if file_format == "auto":
                file_format = detect_format(record, where)
            if file_format in NOT_YET:
                raise UserError(f"{where}: the {file_format} format is not supported yet; convert the records to messages.")
            yield READERS[file_format](record, where)
            count += 1


def read_records(path: str) -> Iterator[tuple[str, dict]]:
    """Yields ("FILE, line N", record): a .jsonl file holds one object a line, a .json file a list of objects or also lines."""
    file = Path(path)
    if file.suffix.lower() not in (".json", ".jsonl"):
        raise UserError(f"{path} is neither a .json nor a .jsonl file; other kinds and names on the hub are not supported yet.")
    try:
        with file.open("rb") as stream:
            if file.suffix.lower() == ".json" and _first_character(stream) == b"[":
                yield from _records_of_list(path, stream.read())
            else:
                yield from _records_of_lines(path, stream)
    except OSError as error:
        raise UserError(f"The data file {path} cannot be read: {error.strerror}.") from error


def _first_character(stream) -> bytes:
    character = b" "
    while character in (b" ", b"\t", b"\r", b"\n", b"\xef", b"\xbb", b"\xbf"):  # the last three: a UTF-8 byte order mark
        character = stream.read(1)
    stream.seek(0)
    return character


def _records_of_list(path: str, content: bytes) -> Iterator[tuple[str, dict]]:
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from error
    for number, record in enumerate(records, start=1):
        yield _checked_record(f"{path}, record {number}", record)


def _records_of_lines(path: str, stream) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(stream, start=1):  # bytes: U+2028 and the like do not end a line
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON ({error}); one JSON object a line is needed.") from error
        yield _checked_record(f"{path}, line {number}", record)


def _checked_record(where: str, record: Any) -> tuple[str, dict]:
    if not isinstance(record, dict):
        raise UserError(
            f"{where} holds {_kind(record)}, but a record must be a JSON object with keys such as messages or text."
        )
    return where, record


def detect_format(record: dict, where: str) -> str:
    for name, keys in DETECTION:
        if all(key in record for key in keys):
            return name
    known = "messages, prompt and completion, text or input_ids"
    found = ", ".join(map(str, record)) or "none"
    raise UserError(f"{where}: no known format has the keys of this record ({found}); the keys {known} are needed.")


def _read_messages(record: dict, where: str) -> Conversation:
    messages = _required(record, "messages", list, where)
    return _conversation([], messages, record.get("tools"), where)


def _read_prompt_completion(record: dict, where: str) -> Conversation | Passage:
    prompt = _required(record, "prompt", (str, list), where)
    completion = _required(record, "completion", (str, list), where)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Passage(prompt, completion, where)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return _conversation(prompt, completion, record.get("tools"), where)


def _read_text(record: dict, where: str) -> Passage:
    return Passage("", _required(record, "text", str, where), where)


def _read_tokenized(record: dict, where: str) -> Tokens:
    """Padding goes by attention_mask alone, never by a pad id; labels are -100 or the token at the same place (not shifted)."""
    input_ids = _whole_numbers(record, "input_ids", where)
    labels = _whole_numbers(record, "labels", where) if record.get("labels") is not None else input_ids
    attention = _whole_numbers(record, "attention_mask", where) if record.get("attention_mask") is not None else None
    for name, column in (("labels", labels), ("attention_mask", attention)):
        if column is not None and len(column) != len(input_ids):
            raise UserError(f"{where}: {name} has {len(column)} entries and input_ids {len(input_ids)}; they must be as many.")
    kept = [place for place in range(len(input_ids)) if attention is None or attention[place] != 0]
    for place in kept:
        if labels[place] not in (-100, input_ids[place]):
            raise UserError(
                f"{where}: labels[{place}] is {labels[place]}, but must be -100 or input_ids[{place}] = {input_ids[place]}; "
                "labels must not be shifted."
            )
    return Tokens([input_ids[place] for place in kept], [int(labels[place] != -100) for place in kept], where)


READERS = {
    "messages": _read_messages,
    "prompt_completion": _read_prompt_completion,
    "text": _read_text,
    "tokenized": _read_tokenized,
}


def _conversation(prompt: list, answers: list, tools: Any, where: str) -> Conversation:
    """Answers among `answers` are trained unless they say "loss": false; those among `prompt` only if they say "loss": true."""
    messages, trained = [], []
    for number, message in enumerate([*prompt, *answers], start=1):
        spot = f"{where}, message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{spot} must be an object with role and content, but is {_kind(message)} without a role.")
        is_answer = message["role"] == "assistant"
        loss = message.get("loss")
        if loss is not None and not isinstance(loss, bool):
            raise UserError(f"{spot}: loss is {json.dumps(loss)}, but must be true or false.")
        if loss and not is_answer:
            raise UserError(f"{spot}: loss is true on a {message['role']} message, but only assistant messages can be trained.")
        messages.append(_plain_message(message, spot))
        trained.append(is_answer and (loss if loss is not None else number > len(prompt)))
    if not messages:
        raise UserError(f"{where}: the list of messages is empty; at least one question and one answer are needed.")
    return Conversation(messages, trained, _tools(tools, where), where)


def _plain_message(message: dict, spot: str) -> dict:
    """The message as chat templates expect it: content is a string, arguments of tool calls are objects."""
    plain = {key: value for key, value in message.items() if key != "loss" and value is not None}
    plain["content"] = _content(message, spot)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_tool_call(call, spot) for call in _required(plain, "tool_calls", list, spot)]
    return plain


def _content(message: dict, spot: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                raise UserError(f"{spot}: content holds a part of type {kind}, but only text parts are supported.")
        return "".join(part["text"] for part in content)
    if content is None and (message.get("tool_calls") or message.get("reasoning_content") or message.get("thinking")):
        return ""  # templates that join strings would fail on null
    if content is None:
        raise UserError(f"{spot} has neither content nor tool_calls; one of them is needed.")
    raise UserError(f"{spot}: content is {_kind(content)}, but must be a string, a list of text parts or null.")


def _tool_call(call: Any, spot: str) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{spot}: each entry of tool_calls must hold function with name and arguments.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form; templates write objects as JSON and would quote a string twice
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise UserError(f"{spot}: arguments of the tool call {function['name']} are not JSON: {error}.") from error
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _tools(tools: Any, where: str) -> list[dict] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UserError(f"{where}: tools is not JSON: {error}.") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools must be a list of JSON schemas.")
    return tools


def _required(record: dict, key: str, kind: type | tuple, where: str) -> Any:
    if key not in record:
        found = ", ".join(map(str, record)) or "none"
        raise UserError(f"{where} lacks the key {key} (found: {found}); all records of a file must have the same format.")
    if not isinstance(record[key], kind):
        names = {str: "a string", list: "a list"}
        needed = " or ".join(names[entry] for entry in (kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(f"{where}: {key} is {_kind(record[key])}, but must be {needed}.")
    return record[key]


def _whole_numbers(record: dict, key: str, where: str) -> list[int]:
    numbers = _required(record, key, list, where)
    if not all(type(number) is int for number in numbers):
        raise UserError(f"{where}: {key} must be a flat list of whole numbers.")
    return numbers


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    return {str: "a string", list: "a list", dict: "an object"}.get(type(value), "a number")
