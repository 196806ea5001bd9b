"""Chat templates: renders a conversation to text and finds the spans that are answers.

Flow: Conversation -> [templates] -> Rendered -> tokenize. Rendering is transformers' own.
Answers are found in one of two ways, and never guessed:
  1. the template marks them with {% generation %};
  2. prefix check: what the model sees before answer i (the messages before it and the generation prompt) and what is there
     after it must both be beginnings of the full text. Where a template rewrites earlier turns (it drops their reasoning,
     say), the text that would be trained is not what the model writes, and the record is refused with the reason.
"""

import json
import re
from dataclasses import dataclass

from jinja2.exceptions import TemplateError

from headrace.errors import UserError
from headrace.prepare.formats import Conversation, Passage

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass
class Rendered:
    """Text with the spans (character positions, half open) whose tokens are trained."""

    text: str
    spans: list[tuple[int, int]]
    where: str
    bos_and_eos: bool  # the tokenizer's BOS (if it adds one) and EOS belong around it; a chat template writes its own
    train_eos: bool = True


class ChatTemplate:
    """A tokenizer's chat template, or one that replaces it."""

    def __init__(self, tokenizer, text: str | None = None):
        """`text`: template in place of the tokenizer's own. Throws UserError when there is neither."""
        self._tokenizer = tokenizer
        self._text = text or None
        if self._text is None and not tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {tokenizer.name_or_path} has no chat template, but the data holds messages; "
                "give the path of one as dataset.chat_template, or use a chat model."
            )

    @property
    def source(self) -> str:
        """All that decides how it renders, for the digest of the manifest."""
        text = self._text or self._tokenizer.chat_template
        return text if isinstance(text, str) else "\n".join(f"{name}\n{text[name]}" for name in sorted(text))

    def render(self, conversation: Conversation, train_on_prompt: bool = False) -> Rendered:
        """Throws UserError when the template fails on the messages, or rewrites what was to be trained."""
        text, marked = self._apply(conversation, len(conversation.messages), generation_prompt=False)
        spans = [(0, len(text))] if train_on_prompt else self._answer_spans(conversation, text, marked)
        return Rendered(text, spans, conversation.where, bos_and_eos=False)

    def _answer_spans(self, conversation: Conversation, text: str, marked: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """`marked`: what stood inside {% generation %}; usable when it can be told which answer each piece belongs to."""
        answers = [turn for turn, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        trained = [turn for turn in answers if conversation.trained[turn]]
        filled = [span for span in marked if span[0] < span[1]]
        if len(marked) == len(answers):
            span_of = dict(zip(answers, marked, strict=True))
        elif len(filled) > len(answers) and trained == answers:
            return filled
        else:
            span_of = {}
        # An empty or missing piece means that the template does not mark this kind of answer, not that it is not to be trained.
        is_marked = {turn: span[0] < span[1] for turn, span in span_of.items()}
        return [span_of[turn] if is_marked.get(turn) else self._span_by_prefix(conversation, turn, text) for turn in trained]

    def _span_by_prefix(self, conversation: Conversation, turn: int, text: str) -> tuple[int, int]:
        spot = f"{conversation.where}, message {turn + 1}"
        if turn == 0:
            raise UserError(f'{spot}: an answer without a question before it cannot be trained; set "loss": false on it.')
        before, _ = self._apply(conversation, turn, generation_prompt=True)
        after, _ = self._apply(conversation, turn + 1, generation_prompt=False)
        if text.startswith(before) and text.startswith(after) and len(before) < len(after):
            return len(before), len(after)
        changed = before if not text.startswith(before) else after
        place = next((i for i, (a, b) in enumerate(zip(changed, text, strict=False)) if a != b), len(text))
        raise UserError(
            f"{spot}: the chat template rewrites earlier turns, so that the loss mask cannot be found: up to this message it "
            f"writes {_excerpt(changed, place)!r}, in the whole conversation {_excerpt(text, place)!r}. "
            'Set "loss": false on the earlier answers or give each answer its own record, '
            "or give a dataset.chat_template that keeps them or marks answers with {% generation %}."
        )

    def _apply(
        self, conversation: Conversation, num_messages: int, generation_prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the first messages, and the spans that the template marks with {% generation %}."""
        messages = conversation.messages[:num_messages]
        try:
            try:
                return self._render_messages(messages, conversation.tools, generation_prompt)
            except (
                TypeError
            ):  # some templates (DeepSeek's) join the arguments of tool calls as text, most write objects as JSON
                if not any("tool_calls" in message for message in messages):
                    raise
                return self._render_messages(_with_arguments_as_text(messages), conversation.tools, generation_prompt)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            which = "messages" if num_messages == len(conversation.messages) else f"first {num_messages} message(s)"
            raise UserError(f"{conversation.where}: the chat template fails on the {which}: {error}.") from error

    def _render_messages(self, messages: list[dict], tools: list[dict] | None, generation_prompt: bool):
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(self._text, tools)
        rendered, marked = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=GENERATION_TAG.search(template) is not None,
            add_generation_prompt=generation_prompt,
            **self._tokenizer.special_tokens_map,
        )
        return rendered[0], [tuple(span) for span in (marked[0] if marked else [])]


def render_passage(passage: Passage, train_on_prompt: bool = False) -> Rendered:
    text = passage.prompt + passage.completion
    start = 0 if train_on_prompt else len(passage.prompt)
    has_answer = bool(text.strip() if train_on_prompt else passage.completion.strip())
    spans = [(start, len(text))] if has_answer else []
    return Rendered(text, spans, passage.where, bos_and_eos=True, train_eos=has_answer)


def _with_arguments_as_text(messages: list[dict]) -> list[dict]:
    def as_text(call: dict) -> dict:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]} if "tool_calls" in message else message
        for message in messages
    ]


def _excerpt(text: str, place: int) -> str:
    return text[max(0, place - 20) : place + 40]
