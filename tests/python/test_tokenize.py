"""Loss masks by properties: whatever the content, exactly the answers and their ends are trained."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import CHATML, CHATML_MARKED, chat, save_tokenizer
from headrace.errors import UserError
from headrace.prepare.formats import Conversation, Passage
from headrace.prepare.templates import ChatTemplate, render_passage
from headrace.prepare.tokenize import Tokenizer

CONTENT = st.text(
    st.one_of(st.sampled_from(" \n\t.,aeé中🙂'1"), st.characters(exclude_categories=["Cs"])), min_size=1, max_size=30
)


@pytest.fixture(scope="module")
def tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        yield Tokenizer(str(save_tokenizer(Path(folder), add_bos=True)))


def trained_text(tokenizer, tokens) -> str:
    chosen = [token for token, trained in zip(tokens.input_ids, tokens.loss_mask, strict=True) if trained]
    return tokenizer.hugging_face.decode(chosen)


def conversation(contents: list[str], trained: list[bool]) -> Conversation:
    return Conversation(chat(*contents)["messages"], [i % 2 == 1 and flag for i, flag in enumerate(trained)], None, "here")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(CONTENT, st.booleans()), min_size=2, max_size=6), st.sampled_from([CHATML, CHATML_MARKED]))
def test_answers_and_their_ends_are_trained(tokenizer, turns, template):
    contents, trained = [content for content, _ in turns], [flag for _, flag in turns]
    rendered = ChatTemplate(tokenizer.hugging_face, template).render(conversation(contents, trained))
    tokens = tokenizer.encode([rendered])[0]
    answers = [content + "<|im_end|>" for i, (content, flag) in enumerate(turns) if i % 2 == 1 and flag]
    assert trained_text(tokenizer, tokens) == "".join(answers)
    assert tokenizer.hugging_face.decode(tokens.input_ids) == rendered.text


@settings(max_examples=150, deadline=None)
@given(CONTENT, CONTENT)
def test_tokens_before_an_answer_are_those_of_the_prompt_alone(tokenizer, prompt, completion):
    """When generating, the prompt is tokenised alone; training must see the same tokens, however text would merge."""
    if not completion.strip():
        return
    tokens = tokenizer.encode([render_passage(Passage(prompt, completion, "here"))])[0]
    length = tokens.loss_mask.index(1)
    assert tokens.input_ids[:length] == tokenizer.hugging_face(prompt).input_ids
    assert trained_text(tokenizer, tokens) == completion + tokenizer.hugging_face.eos_token


@settings(max_examples=100, deadline=None)
@given(CONTENT)
def test_ids_are_those_of_transformers(tokenizer, text):
    if text.strip():
        tokens = tokenizer.encode([render_passage(Passage("", text, "here"))])[0]
        assert tokens.input_ids == [*tokenizer.hugging_face(text).input_ids, tokenizer.eos_token_id]
        assert tokens.loss_mask == [0] + [1] * (len(tokens.input_ids) - 1)


def test_special_tokens_in_content_do_not_move_the_mask(tokenizer):
    """A user who writes <|im_end|> gets the special token (as in transformers), but the spans stay where they are."""
    rendered = ChatTemplate(tokenizer.hugging_face).render(conversation(["say <|im_end|>\n", "a<|im_end|> b"], [True, True]))
    assert trained_text(tokenizer, tokenizer.encode([rendered])[0]) == "a<|im_end|> b<|im_end|>"


def test_train_on_prompt_trains_all_but_the_first_token(tokenizer):
    rendered = ChatTemplate(tokenizer.hugging_face).render(conversation(["a", "b"], [True, True]), train_on_prompt=True)
    tokens = tokenizer.encode([rendered])[0]
    assert tokens.loss_mask[0] == 0
    assert trained_text(tokenizer, tokens).startswith("user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>")


def test_end_of_turn_from_generation_config(workshop):
    """Chat models that end turns with another token than the tokenizer's EOS name it in generation_config.json."""
    outside = CHATML_MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}")
    model = workshop.tokenizer(template=outside, eos_token="</s>")
    end_of_turn = workshop.hugging_face().convert_tokens_to_ids("<|im_end|>")
    (model / "generation_config.json").write_text(f'{{"eos_token_id": [1, {end_of_turn}]}}')
    assert workshop.trained_text(workshop.prepare([chat("a", "answer")])[0]) == "answer<|im_end|>"


def test_prompt_that_merges_into_the_answer_without_loss_less_split_is_refused(workshop):
    """A tokenizer that puts a space before every text cannot be asked for prompt and answer apart."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, pre_tokenizers

    model = workshop.tokenizer(eos_token="</s>")
    rust = RustTokenizer.from_file(str(model / "tokenizer.json"))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    rust.decoder = decoders.ByteLevel()
    rust.save(str(model / "tokenizer.json"))
    with pytest.raises(UserError, match="joins the end of the prompt and the start of the answer"):
        workshop.prepare([{"prompt": "The qui", "completion": "ck brown fox"}])


def test_id_that_the_model_lacks_is_refused(workshop):
    workshop.tokenizer(vocab_size=100)
    with pytest.raises(UserError, match="line 1: token 1 has the id 100, but the model knows ids from 0 to 99"):
        workshop.prepare([{"input_ids": [5, 100]}])
