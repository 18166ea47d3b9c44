"""Prompts made ready before the model is loaded: tokenised, measured, fingerprinted; and which of them a step takes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlft.types import Prompt, Split, UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

CHUNK = 1000
"""Prompts tokenised in one call."""

NO_TEMPLATE_NOTE = "The tokenizer has no chat template: prompts are the plain texts of their messages."


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the shortest, the median and the longest prompt of a set."""

    shortest: int
    median: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """One split, ready to be sampled.

    prompts: in the order of the data, with token_ids. num_dropped: prompts left out for being over the limit.
    lengths: of the prompts kept. fingerprint: sha256 (hex) over ids, token ids and answers in order; a resumed run
    compares it. note: a plain word for the person watching, or None.
    """

    prompts: tuple[Prompt, ...]
    num_dropped: int
    lengths: Lengths
    fingerprint: str
    note: str | None


def scan(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    over_limit: Literal["drop", "refuse"],
    split: Split,
    style: Literal["chat", "raw"] = "chat",
) -> PromptSet:
    """The split's prompts with their token ids, those over the limit dropped or refused.

    style: `chat`, by the tokenizer's chat template, or where it has none as `raw`: the plain texts of the messages,
    blank lines between them.

    Raises:
        UserError: nothing to scan or nothing left, an id that occurs twice, over-long prompts where `over_limit` is
            `refuse`, messages that the chat template does not take, a prompt without a token.
    """
    if not prompts:
        raise UserError("data", f"the {split} split is empty", remedy="choose other data")
    _check_ids(prompts, split)
    tokenised = [
        replace(p, token_ids=ids) for p, ids in zip(prompts, token_ids(prompts, tokenizer, style), strict=True)
    ]
    _check_not_empty(tokenised, split)
    kept = [p for p in tokenised if len(p.token_ids) <= max_prompt_tokens]
    if len(kept) < len(tokenised) and (over_limit == "refuse" or not kept):
        raise _over_limit(tokenised, max_prompt_tokens, over_limit, split)
    lengths = [len(p.token_ids) for p in kept]
    return PromptSet(
        prompts=tuple(kept),
        num_dropped=len(tokenised) - len(kept),
        lengths=Lengths(shortest=min(lengths), median=median(lengths), longest=max(lengths)),
        fingerprint=fingerprint(kept),
        note=NO_TEMPLATE_NOTE if style == "chat" and not tokenizer.chat_template else None,
    )


def left_out(prompts: PromptSet, split: str, max_prompt_tokens: int) -> Iterator[str]:
    """How many prompts of the split were too long, in a plain word; nothing if none was."""
    if prompts.num_dropped:
        yield f"{prompts.num_dropped} {split} prompts longer than prompts.max_tokens={max_prompt_tokens} were dropped"


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 (hex) over ids, token ids and answers, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.token_ids, prompt.answer]).encode() + b"\n")
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """12 hex digits of a sha256 over what token ids mean: the vocabulary with added tokens, template and end token."""
    known = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]


def prompts_for_step(num_prompts: int, prompts_per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the prompts of one step; `step` is the number of steps finished before it, from 0.

    Epoch e is a permutation of all prompts drawn from (seed, e), cut into whole steps. What is left at its end is fewer
    than a step and is passed over; the next epoch permutes all prompts anew. So no prompt comes twice in an epoch or in
    a step. With fewer prompts than a step takes, epochs follow each other without a gap, and prompts must repeat.
    A pure function of its arguments: a resumed run needs no other cursor than its step.

    >>> prompts_for_step(4, 2, seed=0, step=0), prompts_for_step(4, 2, seed=0, step=1)
    ([3, 1], [0, 2])
    """
    if num_prompts < 1 or prompts_per_step < 1 or step < 0:
        raise ValueError(
            f"need num_prompts >= 1, prompts_per_step >= 1, step >= 0: {num_prompts}, {prompts_per_step}, {step}"
        )
    if num_prompts >= prompts_per_step:
        epoch, turn = divmod(step, num_prompts // prompts_per_step)
        return permutation(num_prompts, seed, epoch)[turn * prompts_per_step : (turn + 1) * prompts_per_step].tolist()
    positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    return [int(permutation(num_prompts, seed, p // num_prompts)[p % num_prompts]) for p in positions]


@lru_cache(maxsize=2)
def permutation(num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Epoch's order of the prompts, read-only. RandomState, because numpy promises that its stream never changes."""
    words = np.frombuffer(hashlib.sha256(f"{seed}/{epoch}".encode()).digest(), dtype="<u4")
    order = np.random.RandomState(words).permutation(num_prompts)
    order.flags.writeable = False
    return order


def token_ids(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, style: str) -> list[tuple[int, ...]]:
    """The tokens of each prompt up to where its completion begins; style: chat or raw (`scan`)."""
    chunks = (prompts[i : i + CHUNK] for i in range(0, len(prompts), CHUNK))
    return [tuple(ids) for chunk in chunks for ids in _tokenise(chunk, tokenizer, style)]


def _tokenise(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, style: str) -> Sequence[Sequence[int]]:
    if style == "raw" or not tokenizer.chat_template:
        return tokenizer(["\n\n".join(m["content"] for m in p.messages) for p in prompts])["input_ids"]  # type: ignore[return-value]
    from jinja2.exceptions import TemplateError

    conversations = [[dict(m) for m in p.messages] for p in prompts]
    try:
        return tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=False)  # type: ignore[return-value]
    except TemplateError as error:
        has_system = any(p.messages[0]["role"] == "system" for p in prompts)
        remedy = (
            "set data.system_prompt=null and say it in data.prompt_template"
            if has_system
            else "use data whose turns it takes"
        )
        raise UserError(
            "data.system_prompt" if has_system else "data",
            f"the model's chat template refuses it ({error})",
            remedy=remedy,
        ) from error


def _check_ids(prompts: Sequence[Prompt], split: Split) -> None:
    twice = [name for name, count in Counter(p.id for p in prompts).items() if count > 1]
    if twice:
        raise UserError(
            "data",
            f"{len(twice)} ids occur more than once in the {split} split",
            got=twice[0],
            remedy="give each prompt its own id",
        )


def _check_not_empty(prompts: Sequence[Prompt], split: Split) -> None:
    empty = [p.id for p in prompts if not p.token_ids]
    if empty:
        raise UserError(
            "data",
            f"{len(empty)} of {len(prompts)} {split} prompts have no token, so nothing can be predicted from them",
            got=empty[0],
            remedy="leave them out, or use prompts.style=chat, whose template gives each some tokens",
        )


def _over_limit(prompts: Sequence[Prompt], limit: int, over_limit: str, split: Split) -> UserError:
    long = [p for p in prompts if len(p.token_ids) > limit]
    longest = max(len(p.token_ids) for p in long)
    raised = f"raise prompts.max_tokens (the longest has {longest})"
    return UserError(
        "prompts.max_tokens",
        f"{len(long)} of {len(prompts)} {split} prompts are longer, first {long[0].id} with {len(long[0].token_ids)}",
        got=limit,
        remedy=f"{raised}, or set prompts.over_limit=drop" if over_limit == "refuse" else raised,
    )
