"""Reading and writing the lines of the files that `rlft sample` writes: one completion, its prompt and its rewards.

Keys: prompt_id, index (number of the completion within its prompt, from 0), prompt (the messages the model was given,
without worked examples), examples (only with data.few_shot: their messages, which came before the prompt's, after its
system message), answer (the reference, "" where there is none), completion (text), token_ids (as sampled, the end token
included), finish_reason, rewards ({name: unweighted reward}), reward (their weighted total), model (a description of
the model that sampled it), tokenizer (12 hex digits, `rlft.data.prompts.tokenizer_fingerprint`). A conversation also
has mask (1 for each token that was sampled, else 0) and turns. Such a line is refused as training data, because the
environment's tokens would be learned, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlft.data.fields import RowError, kind, messages_of
from rlft.data.templates import chat
from rlft.types import FinishReason, Prompt, Rollout, require

TOKENIZER = "tokenizer"
"""Key of the tokenizer's fingerprint, in a line and in the metadata of prompts whose sampled token ids are learned."""
EXAMPLES = "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The contents of a line. A reward is None where it was not a finite number or was not computed."""

    prompt: Prompt
    completion: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    rewards: Mapping[str, float | None]
    reward: float | None


def sampled_line(
    rollout: Rollout, *, index: int, rewards: Mapping[str, float], reward: float | None, model: str, tokenizer: str
) -> dict[str, Any]:
    """The line of one completion, without NaN or infinity; see the top of this file for its keys."""
    completion = rollout.completion
    conversation: dict[str, Any] = {}
    if completion.mask is not None:
        conversation = {"mask": [*map(int, completion.mask)], "turns": [*map(asdict, completion.turns)]}
    if completion.branches:
        conversation["branches"] = [asdict(branch) for branch in completion.branches]
    question, examples = _apart(rollout.prompt)
    return {
        "prompt_id": rollout.prompt.id,
        "index": index,
        "prompt": question,
        **({EXAMPLES: examples} if examples else {}),
        "answer": rollout.prompt.answer,
        "completion": completion.text,
        "token_ids": [int(token) for token in completion.token_ids],
        "finish_reason": str(completion.finish_reason),
        "rewards": {name: _finite(value) for name, value in sorted(rewards.items())},
        "reward": None if reward is None else _finite(reward),
        "model": model,
        TOKENIZER: tokenizer,
        **conversation,
    }


def _apart(prompt: Prompt) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of a prompt without its worked examples, and those of the examples."""
    messages = [dict(message) for message in prompt.messages]
    start = int(messages[0]["role"] == "system")
    end = start + prompt.num_examples
    return messages[:start] + messages[end:], messages[start:end]


def is_sampled(fields: Mapping[str, Any]) -> bool:
    """Whether a row is such a line: only these have a tokenizer, a prompt that is a list, and a completion."""
    return TOKENIZER in fields and isinstance(fields.get("prompt"), list) and "completion" in fields


def parse_sampled(fields: Mapping[str, Any], *, with_tokens: bool, with_examples: bool = False) -> Sampled:
    """The contents of a line; with `with_tokens` its token ids are used, and the prompt's metadata names the tokenizer.

    The prompt has the worked examples that were shown before it only with `with_examples`.

    RowError: a key is missing or of another type, or there are no tokens to use.
    """
    if "mask" in fields:
        raise RowError("it is a conversation, and what an environment said in it would be learned; leave it out")
    token_ids = _of(fields, "token_ids", list)
    if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
        raise _foreign("field 'token_ids' must be whole numbers, not below 0")
    if with_tokens and not token_ids:
        raise _foreign("field 'token_ids' is empty")
    finish_reason = _of(fields, "finish_reason", str)
    if finish_reason not in list(FinishReason):
        raise _foreign(f"field 'finish_reason' must be {' or '.join(FinishReason)}, it is {finish_reason!r}")
    messages = messages_of(fields, "prompt")
    if with_examples and EXAMPLES in fields:
        messages = chat(messages, None, messages_of(fields, EXAMPLES))
    prompt = Prompt(
        id=_of(fields, "prompt_id", str),
        messages=messages,
        answer=_of(fields, "answer", str),
        metadata={TOKENIZER: _of(fields, TOKENIZER, str)} if with_tokens else {},
    )
    return Sampled(
        prompt=prompt,
        completion=_of(fields, "completion", str),
        token_ids=tuple(token_ids),
        finish_reason=FinishReason(finish_reason),
        rewards={name: _number(value, f"rewards.{name}") for name, value in _of(fields, "rewards", dict).items()},
        reward=_number(fields.get("reward"), "reward"),
    )


def sampled_with(prompts: Iterable[Prompt]) -> set[str]:
    """Fingerprints of the tokenizers whose sampled token ids are learned; empty where all completions are text."""
    return {prompt.metadata[TOKENIZER] for prompt in prompts if TOKENIZER in prompt.metadata}


def check_tokenizer(fingerprints: Iterable[str], expected: str, key: str) -> None:
    """Refuses, by `key`, token ids of another tokenizer than the model's, of which `expected` is the fingerprint."""
    others = sorted(set(fingerprints) - {expected})
    problem = f"was sampled with another tokenizer ({', '.join(others)}) than this model's ({expected})"
    remedy = f"set {key.partition('.')[0]}.token_ids=text to tokenise its texts again, or sample with this model"
    require(not others, key, problem, remedy=remedy)


def check_prompt_ids(prompts: Iterable[Prompt], key: str) -> None:
    """Refuses an id that several prompts have, as can happen where samples of different data share a file."""
    prompt_of_id: dict[str, Prompt] = {}
    for prompt in prompts:
        is_same = prompt_of_id.setdefault(prompt.id, prompt).messages == prompt.messages
        remedy = "put only samples of the same data into one file"
        require(is_same, key, "two different prompts have the same id", got=prompt.id, remedy=remedy)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: Any, name: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _foreign(f"field {name!r} must be a number or null, it is {kind(value)}")
    return None if value is None else _finite(value)


def _of(fields: Mapping[str, Any], name: str, expected_type: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, expected_type):
        names = {list: "a list", dict: "an object", str: "a string"}
        raise _foreign(f"field {name!r} of a sampled line must be {names[expected_type]}, it is {kind(value)}")
    return value


def _foreign(problem: str) -> RowError:
    return RowError(problem, remedy="fix or remove that line, or sample again")
