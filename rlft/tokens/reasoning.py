"""Where a model reasons in its text, before and between what it says."""

from __future__ import annotations

import re

END_OF_MESSAGE = "<|end|>"
MARKERS = {
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think")},
    "[THINK]": "[/THINK]",  # Magistral
    "◁think▷": "◁/think▷",  # Kimi
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel|>analysis<|message|>": END_OF_MESSAGE,  # gpt-oss
    "<|channel>thought": "<channel|>",  # Gemma 4
}
"""{what begins reasoning: what ends it}, as models write it or prompts ask for it."""

_MARKER = re.compile("|".join(map(re.escape, (*MARKERS, *MARKERS.values()))))


def without_reasoning(text: str) -> str:
    """The text with a space in place of each character of its reasoning, so that offsets stay.

    Reasoning that is never closed goes on to the end of the text; what is closed without having been opened was opened
    by the prompt.

    >>> without_reasoning("<think>17?</think>18"), without_reasoning("17?</think>18"), without_reasoning("18 <think>17")
    ('                  18', '           18', '18          ')
    """
    pieces: list[str] = []
    begin, closing = 0, None  # begin: of what is not yet in `pieces`; closing: what ends the reasoning there
    for match in _MARKER.finditer(text):
        if closing is None and match[0] in MARKERS:
            closing = MARKERS[match[0]]
            pieces.append(text[begin : match.start()])
            begin = match.start()
        elif match[0] == closing or (closing is None and match[0] != END_OF_MESSAGE):
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
    for match in _MARKER.finditer(text):
        if match[0] == closing:
            closing = ""
        elif not closing:
            closing = MARKERS.get(match[0], "")
    return closing


def search_outside(pattern: re.Pattern[str], text: str, position: int = 0) -> re.Match[str] | None:
    """The first match from a position on that does not begin in reasoning, if that begins from there on, too.

    >>> search_outside(re.compile("[0-9]+"), "<think>17?</think>18")[0]
    '18'
    """
    found = pattern.search(without_reasoning(text[position:]))
    return None if found is None else pattern.match(text, position + found.start())
