"""Where a model reasons in its text, before and between what it says: the markers of all families, in one table."""

from __future__ import annotations

import re
from collections.abc import Iterator

END_OF_MESSAGE = "<|end|>"
TAGS = (  # the tags around reasoning, `<think>..</think>`: of DeepSeek, EXAONE, Seed, LongCat, and what prompts ask for
    *("think", "thinking", "thought", "thoughts", "reasoning", "reason", "seed:think", "longcat_think", "mm:think"),
    *("reflection", "scratchpad", "analysis", "rationale", "inner_monologue", "antThinking", "redacted_thinking"),
    "cot",
)
FORMS = {  # what stands around one of the words in `WORDS`
    "[{}]": "[/{}]",  # Magistral
    "◁{}▷": "◁/{}▷",  # Kimi
    "<|{}|>": "<|/{}|>",
    "<|{}_start|>": "<|{}_end|>",
    "<|start_{}|>": "<|end_{}|>",  # Command A, in capital letters
    "<|begin_of_{}|>": "<|end_of_{}|>",  # OpenThinker
}
WORDS = ("think", "thinking", "thought", "reasoning")
MARKERS = {
    **{f"<{name}>": f"</{name}>" for name in TAGS},
    **{opens.format(word): closes.format(word) for opens, closes in FORMS.items() for word in WORDS},
    "<|begin▁of▁thinking|>": "<|end▁of▁thinking|>",
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<unused94>thought": "<unused95>",  # MedGemma
}
MARKERS |= {f"<|channel|>{name}<|message|>": END_OF_MESSAGE for name in ("analysis", "commentary")}  # gpt-oss
"""{what begins reasoning: what ends it}, as models write it or prompts ask for it: the only list of these."""


def _plain(marker: str) -> str:
    """A marker without what does not tell it apart: capital letters, full-width bars, space, a message's recipient."""
    marker = re.sub(r"\sto=[^<]*", "", marker)
    return "".join(marker.casefold().replace("｜", "|").split())


_ENDS = {_plain(opens): _plain(closes) for opens, closes in MARKERS.items()}
_KNOWN = {*_ENDS, *_ENDS.values()}
_BAR = r"\s?[|｜]?\s?"
_TAG = rf"<{_BAR}/?[\w:▁]{{1,32}}{_BAR}>|\[/?\w{{1,32}}\s?\]|◁/?\w{{1,32}}\s?▷"
_LOOSE = {"|": "[|｜]", ">": r"\s?>\s?"}
_LONGER = [
    "".join(_LOOSE.get(character, re.escape(character)) for character in marker)
    for marker in sorted(_KNOWN, key=len, reverse=True)
    if not re.fullmatch(_TAG, marker)
]
_RECIPIENT = r"(?:\sto=[^\s<]{1,64})?\s?<"  # whom a message of gpt-oss calls, between the channel and the next marker
_MARKER = re.compile(
    "|".join((*(each[0] + each[1:].replace("<", _RECIPIENT) for each in _LONGER), _TAG)), re.IGNORECASE
)


def markers_in(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """The markers that begin or end reasoning, in order, each with its plain form."""
    return ((match, name) for match in _MARKER.finditer(text) if (name := _plain(match[0])) in _KNOWN)


def without_reasoning(text: str) -> str:
    """The text with a space in place of each character of its reasoning, so that offsets stay.

    Reasoning that is never closed goes on to the end of the text; what is closed without having been opened was opened
    by the prompt.

    >>> without_reasoning("<think>17?</think>18"), without_reasoning("17?</think>18"), without_reasoning("18 <think>17")
    ('                  18', '           18', '18          ')
    """
    pieces: list[str] = []
    begin, closing = 0, None  # begin: of what is not yet in `pieces`; closing: what ends the reasoning there
    for match, name in markers_in(text):
        if closing is None and name in _ENDS:
            closing = _ENDS[name]
            pieces.append(text[begin : match.start()])
            begin = match.start()
        elif name == closing or (closing is None and name != END_OF_MESSAGE):
            pieces = pieces if closing else [" " * begin]
            pieces.append(" " * (match.end() - begin))
            begin, closing = match.end(), None
    return "".join([*pieces, text[begin:] if closing is None else " " * (len(text) - begin)])


def end_of(text: str) -> str:
    """What ends the reasoning that a text leaves open; "" if it leaves none open.

    >>> end_of("<think>\\n"), end_of("<think></think>")
    ('</think>', '')
    """
    closing = ""
    for _, name in markers_in(text):
        if name == closing:
            closing = ""
        elif not closing:
            closing = _ENDS.get(name, "")
    return closing


def search_outside(pattern: re.Pattern[str], text: str, position: int = 0) -> re.Match[str] | None:
    """The first match from a position on that does not begin in reasoning, if that begins from there on, too.

    >>> search_outside(re.compile("[0-9]+"), "<think>17?</think>18")[0]
    '18'
    """
    found = pattern.search(without_reasoning(text[position:]))
    return None if found is None else pattern.match(text, position + found.start())
