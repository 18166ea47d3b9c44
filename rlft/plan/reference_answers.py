"""Scores every reference answer by the rewards that compare answers, before a run: each must be right by itself.

A reference that no completion can match costs a prompt's completions in every epoch, or ends the run where its reward
refuses it; one that other references match rewards wrong answers. Only rewards that say how a completion gives
an answer take part (`reference_text`); the others are tried on a few prompts by `rlft plan` (reward_trial.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from rlft.config.schema import SamplingRoot
from rlft.plan.reward_trial import as_sampled
from rlft.reward.answer import AnswerIn, AnswerKeys
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.reward.workers.worker import NOWHERE, Cause, Failure, Loaded, score
from rlft.system.terminal import with_progress
from rlft.types import Completion, Group, Prompt, Rollout, Sampling, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.tokens.ends import TurnEnds

LIMIT_S = 20.0
"""Processor seconds that a reward may take for all references together; GSM8K's 7,473 take less than one."""
NUM_PAIRS, FEW_PAIRS = 64, 4
"""The most pairs of rows that are compared, and the least that tell anything."""
NUM_SHOWN = 3
CHUNK = 256


@dataclass(slots=True, kw_only=True)
class Found:
    """What a reward says of the references: how many were scored, and which of them are not right by themselves."""

    num_scored: int = 0
    num_unscorable: int = 0
    num_formless: int = 0  # no completion is known that gives the reference
    examples: list[str] = field(default_factory=list)

    def add(self, prompt: Prompt, problem: str | None) -> None:
        self.num_scored += 1
        if problem is not None:
            self.num_unscorable += 1
            if len(self.examples) < NUM_SHOWN:
                self.examples.append(f"{prompt.answer!r:.60} of prompt {prompt.id!r}{problem}")


def check_references(
    config: SamplingRoot,
    rewards: Mapping[str, RewardSpec],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    ends: TurnEnds,
    limit_s: float = LIMIT_S,
) -> Iterator[str]:
    """Scores all reference answers as completions, as far as the time limit allows, and yields notes about them.

    Args:
        config: says how completions end, and whether unscorable references are only noted (data.allow_unscorable).
        rewards: the run's.
        prompts: of both splits.
        tokenizer: the policy's: what it cannot write is not right.
        ends: what ends a turn.
        limit_s: processor seconds for each reward; with streamed data and slow rewards only a part is scored.

    Raises:
        UserError: references are not right by themselves, or a reward takes each for every other.
    """
    allowed = config.allows_unscorable
    for name, spec in rewards.items():
        reward = None if spec.runs_in_trainer else spec.build()
        if not isinstance(reward, AnswerKeys) or not _says_what_is_right(reward):
            continue
        start = getattr(reward, "start", None)
        if callable(start):
            start()
        judge = _Judge(reward, tokenizer, config.generation.sampling, ends, config.scoring.timeout)
        found = _scored(judge, prompts, limit_s, f"reward.{name}: scoring the reference answers")
        if found.num_formless and reward.answer_in is AnswerIn.pattern:
            yield f"reward.{name}: its pattern is too intricate for scoring the reference answers beforehand"
        yield from _reported(name, found, len(prompts), allowed)
        yield from _confused(name, judge, prompts, allowed)


def _says_what_is_right(reward: AnswerKeys) -> bool:
    """Not so a class of a user's own, on one of rlft's, whose full marks may be another number than 1."""
    return type(reward).__module__.startswith("rlft.") or "right" in vars(type(reward))


class _Judge:
    """Asks a reward whether texts are right, as completions that the policy would have sampled."""

    def __init__(
        self, reward: AnswerKeys, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, ends: TurnEnds, each_s: float
    ) -> None:
        self.reward, self.tokenizer, self.sampling, self.ends, self.each_s = reward, tokenizer, sampling, ends, each_s
        self._right = Loaded(reward=lambda group: [float(right) for right in reward.right(group)], scores_steps=False)

    def written(self, prompt: Prompt) -> str | None:
        """A completion that gives the prompt's reference. None: the reward has none; Unscorable: it is of no use."""
        return self.reward.reference_text(prompt)

    def as_sampled(self, turns: Sequence[tuple[Prompt, str]]) -> list[Completion]:
        """The texts as completions of the policy, after these prompts."""
        return as_sampled(turns, self.tokenizer, self.sampling, self.ends)

    def problem(self, prompt: Prompt, completion: Completion) -> str | None:
        """Why a completion is not right; None if it is. TimeoutError: the reward did not say so in time."""
        read = replace(completion, text=prompt.tail + completion.text)
        rollout = Rollout(prompt=prompt, completion=read, policy_version=None)
        outcome = score(self._right, Group(prompt=prompt, rollouts=(rollout,)), self.each_s, [0, NOWHERE])
        if isinstance(outcome, Failure):
            if outcome.cause is Cause.time_limit:
                raise TimeoutError
            return f" ({outcome.problem})"
        return None if outcome == [1.0] else ""


def _scored(judge: _Judge, prompts: Sequence[Prompt], limit_s: float, title: str) -> Found:
    found, began = Found(), time.process_time()
    progress = with_progress(iter(prompts), title, len(prompts))
    while chunk := list(islice(progress, CHUNK)):
        written: list[tuple[Prompt, str]] = []
        for prompt in chunk:
            try:
                text = judge.written(prompt)
            except ValueError as error:
                found.add(prompt, f" ({error})")
                continue
            if text is None:
                found.num_formless += 1
            else:
                written.append((prompt, text))
        for (prompt, _), completion in zip(written, judge.as_sampled(written), strict=True):
            if time.process_time() - began > limit_s:
                return found
            with suppress(TimeoutError):  # how fast the machine is says nothing of the reference
                found.add(prompt, judge.problem(prompt, completion))
    return found


def _reported(name: str, found: Found, total: int, allowed: bool) -> Iterator[str]:
    """Notes about what was found. UserError for unscorable references, unless they are allowed."""
    if found.num_unscorable:
        problem = f"{found.num_unscorable} of {found.num_scored} reference answers are not right by themselves"
        problem += f": {', '.join(found.examples)}"
        if not allowed:
            remedy = (
                "correct them, change how the reward reads answers (answer_in, pattern) or the data (answer_pattern)"
            )
            remedy += ", or start nevertheless with data.allow_unscorable=true"
            raise UserError(f"reward.{name}", problem, remedy=remedy)
        yield f"reward.{name}: {problem}"
    if (left := total - found.num_scored - found.num_formless) > 0:
        yield f"reward.{name}: only {found.num_scored:,} reference answers were scored in time, {left:,} were left out"


def _confused(name: str, judge: _Judge, prompts: Sequence[Prompt], allowed: bool) -> Iterator[str]:
    """A note where many references are right for other rows. UserError where all are, unless that is allowed."""
    number = min(NUM_PAIRS, len(prompts))
    rows = [prompts[k * len(prompts) // number] for k in range(number)]
    pairs = [(one, other) for one, other in pairwise(rows) if _key(one) != _key(other)]
    texts = [_or_none(judge, other) for _, other in pairs]
    if len(pairs) < FEW_PAIRS or None in texts:
        return
    turns = [(one, text) for (one, _), text in zip(pairs, texts, strict=True) if text is not None]
    completions = judge.as_sampled(turns)
    right = [pair for pair, c in zip(pairs, completions, strict=True) if _is_right(judge, pair[0], c)]
    if 4 * len(right) < len(pairs):
        return
    one, other = right[0]
    problem = f"in {len(right)} of {len(pairs)} pairs of rows, the reference answer of one is right for the other"
    problem += f" (such as {other.answer!r:.60} for {one.answer!r:.60})"
    if len(right) == len(pairs) and not allowed:
        remedy = (
            "change how the reward reads and compares answers, or start nevertheless with data.allow_unscorable=true"
        )
        raise UserError(f"reward.{name}", problem, remedy=remedy)
    yield f"reward.{name}: {problem}"


def _is_right(judge: _Judge, prompt: Prompt, completion: Completion) -> bool:
    try:
        return judge.problem(prompt, completion) is None
    except TimeoutError:
        return False


def _key(prompt: Prompt) -> str:
    return " ".join(prompt.answer.casefold().split())


def _or_none(judge: _Judge, prompt: Prompt) -> str | None:
    try:
        return judge.written(prompt)
    except ValueError:
        return None
