"""Where answers and code stand in a text: what begins and ends each.

Answers stand in a tag, in a box, behind hashes, or in the other forms that references have. Completions are hostile
text, so finding tags, boxes, hashes and fences is linear in the length of the text.

Blocks of fenced code are found by CommonMark's rules. Some are wider, because models write so: a fence may be indented
by any number of spaces, in a list or not; a fence that names a language opens a block, even inside of another whose
fence is no longer, and behind text on its line; what follows a closing fence on its line, such as `</answer>`, may be
anything but a language; and a fence is no longer than all the later ones. Lines lose no more white space than all of
them have.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import accumulate
from typing import Any

from rlft.tokens.reasoning import without_reasoning

WORDS = (  # what sentences that give an answer call it
    *("answer", "result", "solution", "output", "antwort", "ergebnis", "respuesta", "réponse", "risposta", "resposta"),
    *("ответ", "答案", "答え", "정답"),
)
NAMES = (  # the names of an answer as a tag or in JSON
    *("answer", "final_answer", "final", "result", "solution", "output", "response", "correct_answer", "ground_truth"),
    *("value", "label", "target", "gold"),
)
_TAG = re.compile(rf"(?is)<({'|'.join(NAMES)})>(.*?)</\1>")
_CALLED = "|".join(WORDS)
_SENTENCE = re.compile(
    rf"(?i)(?:(?:^|.*[\W_])(?:{_CALLED})|.*(?:答案|答え|정답)|\W*ans)[*_]*\s*"
    r"(?:(?:is|ist|es|est|è|é)(?![^\W_])|[是为:：]|[=-]>|=|→|(?<=\s)[-–—](?=\s))[\s:：]*(?:[*_]+\s+)?"
    r"(?:(-?[$€£]?-?[0-9](?:[0-9,.]*[0-9])?)[.!]?\s+[A-Z].*|(\S.*?)(?:,\s+(?:because|since)\s.*)?[.!。]?\s*)"
)
_GOES_ON = re.compile(rf"(?i).*(?:[:：]|\bis)[*_]*|[#*_\s]*(?:(?:the|final)\s)*(?:{_CALLED})[*_\s]*")
_PAIRS = ("()", "[]", "{}", "[)", "(]", '""', "``", "''")
_PAIRED = re.compile(r"[(\[{)\]}\"`]|</?[a-zA-Z]+>|(?<!\w)'|'(?!\w)")
_MARKUP = (
    *(("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")),
    *((r"\text{", "}"), ('"', '"'), ("“", "”")),
    *((f"<{tag}>", f"</{tag}>") for tag in ("b", "strong", "p", "span", "div")),
)
_OPENERS = {opens[0] for opens, _ in _MARKUP}
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{$]+)")
_BRACKETS = re.compile(r"(.*\S)\s+\((?!\s*\\?(?:[bp]?mod|base)\b)([^()]*)\)")
MAX_FORMS = 6  # how many forms an answer may have around each other, such as a box in a tag

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HEADING = re.compile(r"[#*_ ]*(?:[^\W\d_]|\([^\W_]{1,4}\) *[^\W\d_]|[0-9]+[.):] *[^\W\d_])")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def tagged(text: str, tag: str) -> Iterator[str]:
    """The content of each `<tag>...</tag>`; a further opening tag inside a block restarts the block."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = 0
    while (end := text.find(closing, start)) != -1:
        begin = text.rfind(opening, start, end)
        if begin != -1:
            yield text[begin + len(opening) : end]
        start = end + len(closing)


def boxed(text: str) -> Iterator[str]:
    r"""The content of each `\boxed{...}` or `\fbox{...}`, with balanced braces; a box never closed does not count."""
    start = 0
    while match := _BOX.search(text, start):
        end = closing_brace(text, match.end())
        if end is None:
            return
        yield text[match.end() : end]
        start = end + 1


def hashed(text: str) -> Iterator[str]:
    """The text after each `####` on its line, as in GSM8K's own solutions.

    A heading of Markdown (Step 1, 1. Sums) is none: it has text below that leads to a later `####`.
    """
    answer, has_text_below = None, False
    for line in text.splitlines():
        prefix, marker, rest = line.partition("####")
        if marker and not prefix.strip():
            if answer is not None and not (has_text_below and _HEADING.match(answer)):
                yield answer
            answer, has_text_below = rest.strip(), False
        elif line.strip():
            has_text_below = True
    if answer is not None:
        yield answer


def closing_brace(text: str, start: int) -> int | None:
    r"""Where the brace closes that was opened before `start`; None if it never does. `\{` and `\}` are no braces.

    >>> closing_brace(r"\boxed{\{1\}}.", 7)
    12
    """
    depth = 1
    for brace in _BRACES.finditer(text, start):
        if len(brace[0]) == 1:
            depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


# -- references --------------------------------------------------------------------------------------------------------
def _of_json(text: str) -> list[str]:
    """The answers in a list, or under the name of an answer in an object, or a text in quotes, as JSON or Python."""
    value: Any = None
    text = unfenced(text).strip()
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = read(text) if text[:1] in ("[", "{", '"', "'") else None
            break
    if isinstance(value, Mapping):
        value = next((each for name, each in value.items() if str(name).casefold() in NAMES), None)
    values = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values)
    return list(map(str, values)) if is_plain else []


def boxes(text: str) -> list[str]:
    """What stands in the boxes of a reference, also in those without braces."""
    return [*(match[1] for match in _BARE_BOX.finditer(text)), *boxed(text)] if "box" in text else []


def _of_sentence(text: str) -> list[str]:
    """The answer in the last line, or in the last two if the first of these announces it."""
    if not (names_an_answer(text) or "ans" in text.casefold()):
        return []
    *before, last = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [last, *(f"{line.rstrip(':：*_ ')}: {last}" for line in before[-1:] if _GOES_ON.fullmatch(line))]
    match = next(filter(None, map(_SENTENCE.fullmatch, lines)), None)
    answer = (match[1] or match[2]).strip("*_") if match else ""
    return [answer] if answer and _is_whole(answer) else []


def names_an_answer(text: str) -> bool:
    """Whether a word for the answer stands in a text."""
    return any(map(text.casefold().__contains__, WORDS))


def _is_whole(answer: str) -> bool:
    """Whether each bracket, quotation mark and tag in it has its partner, as in no piece of code or markup."""
    open_marks = list[str]()
    for mark in _PAIRED.findall(answer):
        pair = (open_marks[-1] if open_marks else "") + mark
        if pair in _PAIRS or re.fullmatch(r"<(\w+)></\1>", pair):
            open_marks.pop()
        else:
            open_marks.append(mark)
    return not open_marks and answer[0] != ">" and answer[-1] != ";"


def _of_markup(text: str) -> list[str]:
    """What emphasis, dollar signs or the like stand around all of it; a number without a full stop."""
    for opens, closes in _MARKUP if text[:1] in _OPENERS else ():
        inner = text[len(opens) : len(text) - len(closes)]
        if text.startswith(opens) and text.endswith(closes) and opens not in inner and closes not in inner:
            return [inner]
    if re.fullmatch(r"#+[ \t]+[^\n]+", text):
        return [text.lstrip("#")]
    return [text[:-1]] if text.endswith(".") and text[:-1].replace(",", "").lstrip("-$").isdecimal() else []


class ReferenceIn(StrEnum):
    """The form of a reference around its answer."""

    auto = "auto"
    reasoning = "reasoning"
    json = "json"
    tag = "tag"
    hashes = "hashes"
    boxed = "boxed"
    sentence = "sentence"
    markup = "markup"
    brackets = "brackets"


_READERS: Mapping[ReferenceIn, Callable[[str], list[str]]] = {
    ReferenceIn.reasoning: lambda text: [without_reasoning(text)] if any(map(text.__contains__, "<[◁")) else [],
    ReferenceIn.json: _of_json,
    ReferenceIn.tag: lambda text: [match[2] for match in _TAG.finditer(text)][-1:] if "</" in text else [],
    ReferenceIn.hashes: lambda text: list(hashed(text))[-1:] if "####" in text else [],
    ReferenceIn.boxed: lambda text: boxes(text)[-1:],
    ReferenceIn.markup: _of_markup,
    ReferenceIn.sentence: _of_sentence,
    ReferenceIn.brackets: lambda text: [m[1]] if text.endswith(")") and (m := _BRACKETS.fullmatch(text)) else [],
}


def answers_in(text: str, form: ReferenceIn) -> list[str]:
    """The answers in a reference of this form, one but for lists; none if it has another form.

    A list of several is opened only where JSON is named as the form: it may itself be the answer.

    >>> answers_in("6 * 7 + 4 = 46\\n#### 46", ReferenceIn.hashes), answers_in("46", ReferenceIn.hashes)
    (['46'], [])
    """
    if form is ReferenceIn.auto:
        return opened(text)[1]
    found = [answer.strip() for answer in _READERS[form](text.strip())]
    return found if all(found) and found != [text.strip()] else []


def opened(text: str) -> tuple[list[ReferenceIn], list[str]]:
    """(the forms that a reference has around its answer, from the outermost on; the answers in them).

    >>> opened("So the answer is $46$."), opened("46")
    (([<ReferenceIn.sentence: 'sentence'>, <ReferenceIn.markup: 'markup'>], ['46']), ([], ['46']))
    """
    forms, answers = list[ReferenceIn](), [text.strip()]
    while len(answers) == 1 and len(forms) < MAX_FORMS and not (answers[0].isascii() and answers[0].isalnum()):
        found = ((form, inner) for form in _READERS if (inner := answers_in(answers[0], form)))
        form, inner = next(found, (None, []))
        if form is None or (form is ReferenceIn.json and len(inner) > 1):  # a list may be the answer
            break
        forms.append(form)
        answers = inner
    return forms, answers


# -- fenced code -------------------------------------------------------------------------------------------------------
_LINE = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|\Z)")
_CONTAINERS = re.compile(r"(?:[ \t]*(?:>|(?:[-*+]|[0-9]{1,9}[.)])(?=[ \t])))*[ \t]*")
"""What may stand before an opening fence on its line: quotes, items of lists, white space."""
_FENCE = re.compile(r"(`{3,}(?=[^`]*\Z)|~{3,})[ \t]*\{?\.?([A-Za-z0-9]*)")
_RUN = re.compile(r"`{3,}|~{3,}")
_QUOTE = re.compile(r"[ \t]*> ?")
_TAB = 4
_LOOSE_COLUMNS = 3  # the most columns by which a closing fence may be indented more than the opening one


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: the language that its fence names, in lower case, or ""; the text in it; where it ends.

    One that no fence closes goes on to the end of the text.
    """

    language: str
    text: str
    end: int
    is_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fence:
    """A fence: the quotes before it, its column behind them, its characters, and the language behind it."""

    quotes: int
    column: int
    run: str
    language: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a text, in order. Linear in the length of the text."""
    lines = [line for line in _LINE.finditer(text) if line[0]]
    marked = [number for number, line in enumerate(lines) if "```" in line[1] or "~~~" in line[1]]
    inside = cache(lambda number, quotes: _inside(lines[number][1], quotes))
    longest = [max(map(len, _RUN.findall(lines[number][1]))) for number in marked]
    longest_later = [*accumulate(reversed([*longest[1:], 0]), max)][::-1]
    at = 0
    while at < len(marked):
        first = marked[at]
        at += 1
        if (opened := _opening(lines[first][1])) is None:
            continue
        opened = replace(opened, run=opened.run[: max(3, longest_later[at - 1])])
        later = ((index, inside(marked[index], opened.quotes)) for index in range(at, len(marked)))
        index, is_closed = _end_of(later, opened)
        at = len(marked) if index is None else index + is_closed
        if index is not None and not is_closed:  # another block begins there
            continue
        end = len(lines) if index is None else marked[index]
        within = [_without_quotes(line[1], opened.quotes) for line in lines[first + 1 : end]]
        column = min([opened.column, *(_column(line) for line in within if line.strip(" \t"))])
        yield Block(
            language=opened.language.lower(),
            text="".join(f"{_from_column(line, column)}\n" for line in within),
            end=len(text) if index is None else lines[end].end(),
            is_closed=is_closed,
        )


def unfenced(text: str) -> str:
    """The text of the fenced block that is all of a text; a text that is none as it is."""
    block = next(blocks(text.strip()), None) if text.lstrip().startswith(("```", "~~~")) else None
    return text if block is None or block.end < len(text.strip()) else block.text


def _end_of(later: Iterable[tuple[int, _Fence | None]], opened: _Fence) -> tuple[int | None, bool]:
    """(which of the later fences ends the block that a fence has opened, or None; whether it is its closing fence).

    A fence that is indented more than the opening one closes the block only if no other does: it may be a line of the
    program's.
    """
    loose = None
    for index, fence in later:
        if fence is None or not fence.run.startswith(opened.run) or fence.column > opened.column + _LOOSE_COLUMNS:
            continue
        if fence.column > opened.column:
            loose = index if loose is None and not fence.language else loose
        elif not fence.language or loose is None:
            return index, not fence.language
        else:
            break
    return loose, loose is not None


def _inside(line: str, quotes: int) -> _Fence | None:
    """The fence on a line of a block; None if it has none."""
    line = _without_quotes(line, quotes)
    return _fence(line.lstrip(" \t"), quotes, _column(line))


def _opening(line: str) -> _Fence | None:
    """The fence on a line outside of all blocks, behind quotes and items of lists; None if it has none."""
    before = next(_CONTAINERS.finditer(line))[0]  # it matches the empty text, too
    quotes = before.count(">")
    text, _, language = line.rpartition("```")
    text = text.rstrip("`")
    is_behind_text = "```" not in text and language.strip().isalnum() and len(text.rstrip()) > len(before)
    rest = line[len(text if is_behind_text else before) :]
    return _fence(rest, quotes, len(_without_quotes(before, quotes).expandtabs(_TAB)))


def _fence(rest: str, quotes: int, column: int) -> _Fence | None:
    match = _FENCE.match(rest)
    return match and _Fence(quotes=quotes, column=column, run=match[1], language=match[2])


def _column(line: str) -> int:
    """At which column the text of a line begins."""
    return len(line[: len(line) - len(line.lstrip(" \t"))].expandtabs(_TAB))


def _from_column(line: str, column: int) -> str:
    """A line without so many columns of white space, or as many as it begins with."""
    rest = line.lstrip(" \t")
    width = 0
    for index, character in enumerate(line[: len(line) - len(rest)]):
        if width >= column:
            return " " * (width - column) + line[index:]
        width += _TAB - width % _TAB if character == "\t" else 1
    return " " * (width - column) + rest


def _without_quotes(line: str, number: int) -> str:
    """The line without so many quotes' signs before it, or as many as it has."""
    while number and (match := _QUOTE.match(line)):
        number, line = number - 1, line[match.end() :]
    return line
