"""Tokenize: text with trained spans becomes token ids with a loss mask.

Flow: Rendered -> [tokenize] -> Tokens -> shards. Uses the Rust tokenizer below a transformers tokenizer directly: no padding or
truncation can creep in from its files, and offsets are exact. The pad token is never looked at.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import UserError
from headrace.prepare.formats import Tokens
from headrace.prepare.templates import Rendered


class Tokenizer:
    """Loads the tokenizer of a model folder. Throws UserError: no folder, no tokenizer, or none of the `tokenizers` library."""

    def __init__(self, model_path: str):
        from tokenizers import Tokenizer as RustTokenizer
        from tokenizers import processors

        self.hugging_face = _load(model_path)
        if not getattr(self.hugging_face, "is_fast", False):
            raise UserError(
                f"The tokenizer of {model_path} ({type(self.hugging_face).__name__}) has no form for the tokenizers library, "
                "which is needed; add a tokenizer.json to the folder."
            )
        self._rust = RustTokenizer.from_str(self.hugging_face.backend_tokenizer.to_str())
        self._rust.no_padding()
        self._rust.no_truncation()
        # A post-processor adds special tokens, which is done here, and may trim spaces off the offsets, which must not be.
        self._rust.post_processor = processors.ByteLevel(trim_offsets=False)
        self.eos_token_id = self.hugging_face.eos_token_id
        self.bos_token_id = self._added_bos()
        self._special_ids = set(self.hugging_face.all_special_ids)
        self._special_ids |= {index for index, token in self.hugging_face.added_tokens_decoder.items() if token.special}
        self._stop_ids = {self.eos_token_id, *_generation_eos(model_path)} - {None}
        self.vocab_size = _model_vocab_size(model_path) or len(self.hugging_face)

    def encode(self, documents: list[Rendered]) -> list[Tokens]:
        """Ids and loss masks, in order. The first token of a document has nothing before it and is never trained."""
        encodings = self._rust.encode_batch([document.text for document in documents], add_special_tokens=False)
        return [self._masked(document, encoding) for document, encoding in zip(documents, encodings, strict=True)]

    def _masked(self, document: Rendered, encoding) -> Tokens:
        ids, offsets = encoding.ids, encoding.offsets
        inner_bounds = {bound for span in document.spans for bound in span if 0 < bound < len(document.text)}
        if any(start < bound < end for start, end in offsets for bound in inner_bounds):
            ids, offsets = self._encode_pieces(document, sorted(inner_bounds), ids)
        mask = [0] * len(ids)
        for span in document.spans:
            places = [place for place, offset in enumerate(offsets) if _inside(offset, span)]
            if not places:
                continue
            end = places[-1] + 1
            if not document.bos_and_eos:
                end = self._end_of_answer(document.text, ids, offsets, places[0], end)
            mask[places[0] : end] = [1] * (end - places[0])
        if document.bos_and_eos:
            ids, mask = self._with_bos_and_eos(ids, mask, document.train_eos)
        if mask:
            mask[0] = 0
        return Tokens(ids, mask, document.where)

    def _end_of_answer(self, text: str, ids: list[int], offsets: list, start: int, end: int) -> int:
        """Answers end with their end-of-turn token: it is always trained, and what a template writes behind it never."""
        last = end
        while last > start and text[slice(*offsets[last - 1])].isspace():
            last -= 1
        if last > start and ids[last - 1] in self._special_ids:
            return last
        return end + 1 if end < len(ids) and ids[end] in self._stop_ids else end

    def _with_bos_and_eos(self, ids: list[int], mask: list[int], train_eos: bool) -> tuple[list[int], list[int]]:
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids, mask = [self.bos_token_id, *ids], [0, *mask]
        if self.eos_token_id is None:
            raise UserError(
                f"The tokenizer of {self.hugging_face.name_or_path} has no EOS token, but text needs one at its end; "
                "set eos_token in tokenizer_config.json."
            )
        if ids[-1:] != [self.eos_token_id]:
            ids, mask = [*ids, self.eos_token_id], [*mask, int(train_eos)]
        return ids, mask

    def _encode_pieces(self, document: Rendered, bounds: list[int], whole_ids: list[int]) -> tuple[list[int], list]:
        """A token reaches over the bound of an answer. When generating, the prompt is tokenised alone, so do the same here."""
        ids, offsets = [], []
        for start, end in zip([0, *bounds], [*bounds, len(document.text)], strict=True):
            piece = self._rust.encode(document.text[start:end], add_special_tokens=False)
            ids += piece.ids
            offsets += [(start + first, start + last) for first, last in piece.offsets]
        if self._rust.decode(ids, skip_special_tokens=False) != self._rust.decode(whole_ids, skip_special_tokens=False):
            raise UserError(
                f"{document.where}: the tokenizer joins the end of the prompt and the start of the answer in one token; "
                "move white space at the end of the prompt to the start of the answer."
            )
        return ids, offsets

    def _added_bos(self) -> int | None:
        """The BOS token if the tokenizer itself puts one before text; some name a BOS token and never add it."""
        bos = self.hugging_face.bos_token_id
        ids = self.hugging_face("a", padding=False)["input_ids"]
        return bos if bos is not None and ids[:1] == [bos] else None


def cut(tokens: Tokens, max_length: int) -> Tokens:
    """Keeps the part that fits, with its loss mask."""
    return Tokens(tokens.input_ids[:max_length], tokens.loss_mask[:max_length], tokens.where)


def check_ids(tokens: Tokens, vocab_size: int) -> Tokens:
    for place, token in enumerate(tokens.input_ids):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{tokens.where}: token {place} has the id {token}, but the model knows ids from 0 to {vocab_size - 1}; "
                "the data or the tokenizer belong to another model."
            )
    if tokens.loss_mask:
        tokens.loss_mask[0] = 0
    return tokens


def _inside(offset: tuple[int, int], span: tuple[int, int]) -> bool:
    start, end = offset
    if start == end:  # a token that stands for no character
        return span[0] <= start < span[1]
    return start < span[1] and end > span[0]


def _load(model_path: str):
    import transformers

    if not Path(model_path).is_dir():
        raise UserError(
            f"The model folder {model_path} does not exist; give the folder of a downloaded Hugging Face checkpoint."
        )
    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # transformers raises whatever the files make it stumble over
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"No tokenizer could be loaded from {model_path}: {reason}") from error


def _generation_eos(model_path: str) -> Iterable[int]:
    eos = _read_json(Path(model_path) / "generation_config.json").get("eos_token_id")
    return eos if isinstance(eos, list) else [eos]


def _model_vocab_size(model_path: str) -> int | None:
    config = _read_json(Path(model_path) / "config.json")
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def _read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}.") from error
