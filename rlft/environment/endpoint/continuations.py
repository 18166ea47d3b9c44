"""What answers `POST /v1/completions`: texts are continued as they are, and scored where a client asks for echoes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rlft.environment.endpoint.bodies import LEAST_LOGPROB, Complete, Refusal, finish_of, head, usage
from rlft.generation.engine import Generator
from rlft.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Scored:
    """A token, its log-prob (None: nothing stands before it), and those that are known of its place, by text."""

    text: str
    logprob: float | None
    top: dict[str, float] | None


def scored_prompt(generator: Generator, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[Scored]:
    """The tokens of a prompt with their log-probs at temperature 1, and those of the most likely tokens.

    Raises Refusal: the engine does not say which they are.
    """
    first = Scored(str(tokenizer.decode([ids[0]])), None, None)
    if len(ids) == 1:
        return [first]
    [best] = generator.best_tokens([list(ids)]) or [None]
    if best is None:
        problem = "echo: with logprobs it needs an engine that gives the most likely tokens of a prompt"
        raise Refusal(400, f"{problem}; serve with generation=transformers", "unsupported_value")
    [logprobs] = generator.score([list(ids)])
    scored = [first]
    for token, logprob, (best_token, best_logprob) in zip(ids[1:], logprobs, best, strict=True):
        others = {} if best_token == token else {str(tokenizer.decode([best_token])): best_logprob}
        scored.append(_scored(tokenizer, token, logprob, others))
    return scored


def _scored(
    tokenizer: PreTrainedTokenizerBase, token: int, logprob: float, others: dict[str, float] | None = None
) -> Scored:
    """The token; where another one has the same text, `top` has the larger log-prob."""
    text, value = str(tokenizer.decode([token])), max(LEAST_LOGPROB, logprob)
    others = others or {}
    return Scored(text, value, {**others, text: max(value, others.get(text, value))})


def complete_reply(
    body: Complete,
    model: str,
    prompts: Sequence[tuple[str, Sequence[int]]],
    echoes: Sequence[Sequence[Scored]],
    answers: Sequence[Sequence[Completion]],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """The reply to a `Complete`: choices by prompt, `n` of each.

    Args:
        prompts: (text, token ids) of each.
        echoes: the scored tokens of each; empty where they are not asked for.
        answers: the completions of each; a prompt that is only scored has none of them.
    """
    choices = []
    for (text, _), echo, completions in zip(prompts, echoes, answers, strict=True):
        shown = text if body.echo else ""
        for completion in completions or [None]:
            sampled = [] if completion is None else _sampled(completion, tokenizer)
            choices.append(
                {
                    "index": len(choices),
                    "text": shown + ("" if completion is None else completion.text),
                    "finish_reason": "length" if completion is None else finish_of(completion),
                    "logprobs": None if body.logprobs is None else _logprobs([*echo, *sampled]),
                }
            )
    return {
        **head("cmpl", "text_completion", model),
        "choices": choices,
        "usage": usage(sum(len(ids) for _, ids in prompts), [each for some in answers for each in some]),
    }


def _sampled(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[Scored]:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [_scored(tokenizer, token, logprob) for token, logprob in pairs]


def _logprobs(tokens: Sequence[Scored]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [token.top for token in tokens],
        "text_offset": list(accumulate((len(token.text) for token in tokens[:-1]), initial=0)),
    }
