"""The assistant's turns that are learned, as tokens: what the chat template writes after the prompt, up to its end.

Some templates write more than the text: Qwen3 an empty `<think></think>`, gpt-oss a channel. It is learned with the
text, so that prompt and completion have the tokens of the template's own conversation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlft.data.prompts import chunked
from rlft.data.texts import text_ids
from rlft.tokens.chat_template import rendered
from rlft.tokens.ends import TurnEnds, num_common, turn_ends
from rlft.tokens.text import without_tail
from rlft.types import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PART_OF_A_TAG = re.compile(r"<[^<>\s]*$")

Said = tuple[Prompt, str]
"""A prompt and the text that answers it."""


def turns_of(
    said: Sequence[Said], tokenizer: PreTrainedTokenizerBase, style: str, what: str
) -> tuple[list[tuple[int, ...]], str | None]:
    """(the tokens of each turn with those that end it, a note if some are not what the template writes).

    Args:
        said: prompts and texts.
        tokenizer: the model's.
        style: prompts.style.
        what: what they are, for the note.

    Raises:
        UserError: nothing ends a turn.
    """
    ends = turn_ends(tokenizer, style)
    if not ends.closing:
        problem = "its tokenizer has no end token, so completions could never end"
        raise UserError("model.path", problem, remedy="set one")
    texts, problems = [text for _, text in said], []
    if style == "chat" and tokenizer.chat_template:
        texts, problems = [], []
        for chunk in chunked(said, lambda each: len(each[1]) + sum(len(m["content"]) for m in each[0].messages)):
            for text, problem in _written(chunk, tokenizer, ends):
                texts.append(text)
                problems += [problem] if problem else []
    ids = text_ids([text + ends.lead for text in texts], tokenizer)
    note = None
    if problems:
        [(most_common, _)] = Counter(problems).most_common(1)
        note = f"{len(problems)} of {len(said)} {what} are not learned as the chat template writes them: {most_common}"
    return [(*row.tolist(), *ends.closing) for row in ids], note


def _written(said: Sequence[Said], tokenizer: PreTrainedTokenizerBase, ends: TurnEnds) -> list[tuple[str, str]]:
    """For each turn (what is learned, without its end; why it is not what the template writes, or "")."""
    prompts = rendered(tokenizer, [prompt.messages for prompt, _ in said], start=True)
    answered = [[*prompt.messages, {"role": "assistant", "content": text}] for prompt, text in said]
    try:
        whole = rendered(tokenizer, answered)
    except Exception as error:  # a template is a program of somebody else's: it may raise anything
        return [(text, f"it refuses them ({error})") for _, text in said]
    return [
        learned(prompt, conversation, text, ends.last)
        for prompt, conversation, (_, text) in zip(prompts, whole, said, strict=True)
    ]


def learned(prompt: str, conversation: str, text: str, last: str) -> tuple[str, str]:
    """(what follows the prompt in this conversation, without its end; why it is not, or "").

    If the prompt ends with what the template does not write there, such as an opened `<think>`, it is not repeated.

    Args:
        prompt: the prompt, up to the start of the turn.
        conversation: the messages of the prompt and the turn, as the template writes them.
        text: the text of the turn.
        last: what the template writes after it.

    >>> learned("Q A:", "Q A:<think></think>5<end>", "5", "<end>")
    ('<think></think>5', '')
    >>> learned("Q A:<think>", "Q A:5<end>", "<think>2+3</think>5", "<end>")
    ('2+3</think>5', 'it drops a part of their text')
    """
    turn = conversation.removesuffix(last)
    common = num_common(prompt, turn)
    if common < len(prompt):
        common = len(PART_OF_A_TAG.sub("", prompt[:common]))
    opened, rest = prompt[common:], turn[common:]
    problem = f"it does not write the end of the prompt, {opened!r}, in a conversation" if opened else ""
    if not (conversation.endswith(last) and "".join(turn.split()).endswith("".join(text.split()))):
        rest, problem = text, "it drops a part of their text"
    overlap = next((n for n in range(len(opened), 0, -1) if rest.startswith(opened[-n:])), 0)
    return rest[overlap:] if overlap else without_tail(rest, opened), problem
