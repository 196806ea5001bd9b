"""Makes the instruction set data/python_faq from the Python FAQ, as Debian's package python3.11-doc carries it.

Usage: python tools/make_python_faq.py [--source FOLDER] [--out data/python_faq]

Each question of the FAQ (a reStructuredText heading underlined with -) becomes one record in messages format: the heading is
the user's turn, the text below it, as Markdown, the assistant's. Long answers are cut after a paragraph. A tenth of the
records, chosen by a hash of the question, is held out as validation.jsonl. The same source gives the same bytes.
"""

import argparse
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path("/usr/share/doc/python3.11/html/_sources")
FILES = ("general", "programming", "design", "library", "extending", "windows", "gui", "installed")
MAX_WORDS = 270  # words and punctuation marks of question and answer: about 320 tokens with the chat template around them
MIN_ANSWER = 5  # words; below, the answer only points to another question
HELD_OUT_SHARE = 0.1  # of the records, for validation

DROPPED = {
    "only",
    "contents",
    "index",
    "testsetup",
    "versionchanged",
    "versionadded",
    "deprecated",
    "toctree",
    "XXX",
    "highlight",
}
CODE = {"code-block", "doctest", "testcode"}
ITEM = re.compile(r"^(?:[*\-+]|\d+[.)]|#\.|\(\d+\)) +")
DIRECTIVE = re.compile(r"^\.\. ([A-Za-z-]+)::\s*(.*)$")
# Roles whose text is code; of all others (:term:, :ref:, :kbd:, ...) the plain text is kept.
CODE_ROLES = set("func meth mod class data exc keyword file envvar program source c:func c:data attr const".split())
INLINE = re.compile(
    r"``(?P<literal>.+?)``"
    r"|:(?P<role>[a-z]+(?::[a-z]+)?):`(?P<body>[^`]+)`"
    r"|`(?P<link>[^`<]+?)\s*<(?P<url>[^`>]+)>`__?"
    r"|`(?P<plain>[^`]+)`_{0,2}"
    r"|\\(?P<escaped>.)",
    re.DOTALL,
)


@dataclass
class Question:
    title: str
    lines: list[str]
    language: str  # of code blocks that name none


def questions_of(text: str) -> list[Question]:
    lines = text.split("\n")
    questions, current, language = [], None, "python"
    place = 0
    while place < len(lines):
        line, following = lines[place], lines[place + 1] if place + 1 < len(lines) else ""
        directive = DIRECTIVE.match(line)
        if directive and directive[1] == "highlight":
            language = "" if directive[2] == "none" else directive[2]
        if line and not line[0].isspace() and re.fullmatch(r"(-{3,}|={3,})", following):
            current = Question(line.strip(), [], language) if following[0] == "-" else None
            if current:
                questions.append(current)
            place += 2
            continue
        if current:
            current.lines.append(line)
        place += 1
    return questions


class Markdown:
    """Turns the lines of one answer into a list of Markdown blocks."""

    def __init__(self, titles: dict[str, str], language: str):
        self._titles, self._language = titles, language

    def blocks(self, lines: list[str]) -> list[str]:
        """One entry for each paragraph, list item or code block."""
        blocks, place = [], 0
        while place < len(lines):
            line = lines[place]
            if not line.strip():
                place += 1
            elif line.startswith(".. "):
                body, place = _indented(lines, place + 1)
                blocks += self._directive(line, body)
            elif line[0].isspace():  # a quotation: its text is kept as a paragraph
                body, place = _indented(lines, place)
                blocks += self.blocks(body)
            elif ITEM.match(line):
                place += 1
                while place < len(lines) and lines[place][:1].strip() and not ITEM.match(lines[place]):
                    line, place = (
                        f"{line} {lines[place]}",
                        place + 1,
                    )  # the source does not always indent what belongs to an item
                body, place = _indented(lines, place, until_blank_at_margin=True)
                blocks += self._item(line, body)
            else:
                paragraph, place = _paragraph(lines, place)
                marker = "\n".join(paragraph).rstrip()
                if line.startswith(">>>"):
                    blocks.append(_fence(paragraph, "python"))
                    continue
                is_literal = marker.endswith("::")
                if is_literal:
                    marker = marker[:-2].rstrip() + (
                        "" if marker[:-2].endswith((" ", "\n")) or marker[:-2][-1:] in ".:" else ":"
                    )
                if marker.strip(": "):
                    blocks.append(self._inline(marker))
                if is_literal:
                    body, place = _indented(lines, place)
                    if body:
                        blocks.append(_fence(body, self._language))
        return blocks

    def _directive(self, line: str, body: list[str]) -> list[str]:
        match = DIRECTIVE.match(line)
        if match is None or match[1] in DROPPED:  # a comment, a label, or furniture of the web page
            return []
        if match[1] in CODE:
            language = "python" if match[1] != "code-block" or match[2] == "pycon" else match[2]
            return [_fence(body, "" if language in ("none", "doscon", "shell-session") else language)]
        if match[1] in ("note", "seealso"):
            blocks = self.blocks([match[2], *body] if match[2] else body)
            return [("Note: " if match[1] == "note" else "See also: ") + blocks[0], *blocks[1:]]
        raise SystemExit(f"The source holds a directive that this program does not know: {line}")

    def _item(self, line: str, body: list[str]) -> list[str]:
        marker = ITEM.match(line)
        bullet = marker[0].strip()
        bullet = "-" if bullet in "*-+" else "1." if bullet == "#." else bullet
        inner = self.blocks([line[marker.end() :], *body])
        indent = " " * (len(bullet) + 1)
        text = "\n\n".join(inner).replace("\n", "\n" + indent)
        return [re.sub(r"\n +(?=\n)", "\n", f"{bullet} {text}")]

    def _inline(self, text: str) -> str:
        return INLINE.sub(self._markup, re.sub(r"\s*\n\s*", " ", text)).replace("  ", " ").strip()

    def _markup(self, match: re.Match) -> str:
        if match["literal"]:
            return f"`{match['literal']}`"
        if match["role"]:
            return self._role(match["role"], match["body"])
        if match["url"]:
            return f"[{match['link'].strip()}]({match['url']})"
        if match["plain"]:
            return match["plain"]
        return "" if match["escaped"].isspace() else match["escaped"]

    def _role(self, role: str, body: str) -> str:
        titled = re.fullmatch(r"(.+?)\s*<([^>]+)>", body, re.DOTALL)
        if titled:
            text = titled[1]
            return f"`{text}`" if role in CODE_ROLES and " " not in text else text
        if role == "ref":
            return self._titles.get(body.lower(), body)
        if role == "pep":
            return f"PEP {body}"
        text = body.lstrip("!")
        text = text.rsplit(".", 1)[-1] if text.startswith("~") else text
        return f"`{text}`" if role in CODE_ROLES else text.replace("-->", "->")


def _indented(lines: list[str], place: int, until_blank_at_margin: bool = False) -> tuple[list[str], int]:
    """The indented lines from `place` on, without their common indent, and the place behind them."""
    end = place
    while end < len(lines) and (not lines[end].strip() or lines[end][0].isspace()):
        end += 1
    body = lines[place:end]
    margin = min((len(line) - len(line.lstrip()) for line in body if line.strip()), default=0)
    body = [line[margin:].rstrip() for line in body]
    while body and not body[-1]:
        body.pop()
    if not until_blank_at_margin:  # the first line of a list item goes on without a blank line between
        while body and not body[0]:
            body.pop(0)
    return body, end


def _paragraph(lines: list[str], place: int) -> tuple[list[str], int]:
    end = place
    while end < len(lines) and lines[end].strip() and not lines[end].startswith(".. "):
        if end > place and lines[end][0].isspace() and lines[end - 1].rstrip().endswith("::"):
            break
        end += 1
    return lines[place:end], end


def _fence(lines: list[str], language: str) -> str:
    while lines and not lines[0].strip():
        lines = lines[1:]
    lines = (
        [line for line in lines if not re.fullmatch(r"\s*:\w+:.*", line)] if lines[:1] and lines[0].startswith(":") else lines
    )
    code = re.sub(r" *# doctest: .*", "", "\n".join(lines))
    return f"```{language}\n{code}\n```"


def section_titles(source: Path) -> dict[str, str]:
    """Label -> heading below it, for references that give no text."""
    titles = {}
    for file in sorted(source.rglob("*.rst.txt")):
        text = file.read_text(encoding="utf-8")
        for match in re.finditer(
            r"^\.\. _([\w.-]+):\s*\n(?:\s*\n|\.\. _.*\n|[=*#]{3,}\n)*[ ]*(\S.*)\n[=\-*^~#\"]{3,}$", text, re.MULTILINE
        ):
            titles[match[1].lower()] = re.sub(r":\w+:`([^`]+)`|``([^`]+)``", lambda m: m[1] or m[2], match[2]).strip()
    return titles


def num_words(text: str) -> int:
    return len(re.findall(r"[^\W\d_]+|\d|[^\w\s]|_|\n", text))


def joined(blocks: list[str]) -> str:
    """Blocks with an empty line between, but items of a list in one line each close together."""
    text = ""
    for before, block in zip(["", *blocks], blocks, strict=False):
        is_list = all(ITEM.match(item) and "\n" not in item for item in (before, block))
        text += ("" if not before else "\n" if is_list else "\n\n") + block
    return text


def shortened(blocks: list[str], max_words: int) -> str:
    """As many blocks as fit; a sentence that announces a block which is gone goes as well."""
    kept = []
    for block in blocks:
        if num_words(joined([*kept, block])) > max_words:
            break
        kept.append(block)
    if len(kept) < len(blocks):
        while kept and not kept[-1].endswith((*".!?)\"'`/",)):
            kept.pop()
    return joined(kept)


def records(source: Path) -> list[dict]:
    titles = section_titles(source)
    found = []
    for name in FILES:
        text = (source / "faq" / f"{name}.rst.txt").read_text(encoding="utf-8")
        for question in questions_of(text):
            markdown = Markdown(titles, question.language)
            title = markdown._inline(question.title)
            answer = shortened(markdown.blocks(question.lines), MAX_WORDS - num_words(title))
            if len(answer.split()) >= MIN_ANSWER:
                turns = [{"role": "user", "content": title}, {"role": "assistant", "content": answer}]
                found.append({"messages": turns})
    return found


def held_out_questions(everything: list[dict]) -> set[str]:
    """The questions with the smallest hashes: the same on every machine, and spread over all topics."""
    questions = [record["messages"][0]["content"] for record in everything]
    by_hash = sorted(questions, key=lambda question: hashlib.sha256(question.encode()).digest())
    return set(by_hash[: round(HELD_OUT_SHARE * len(by_hash))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder with faq/*.rst.txt (package python3.11-doc)")
    parser.add_argument("--out", type=Path, default=Path("data/python_faq"))
    options = parser.parse_args()
    if not (options.source / "faq").is_dir():
        raise SystemExit(f"{options.source}/faq does not exist; install Debian's python3.11-doc or give --source.")
    everything = records(options.source)
    held_out = held_out_questions(everything)
    options.out.mkdir(parents=True, exist_ok=True)
    for split, kept in (("train", False), ("validation", True)):
        chosen = [record for record in everything if (record["messages"][0]["content"] in held_out) == kept]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in chosen]
        (options.out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(chosen)} records")


if __name__ == "__main__":
    main()
