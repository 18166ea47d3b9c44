"""Tries every reward on a few prompts before a run, with an empty, a wrong and the reference answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlft.generation.stops import shown_texts
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.reward.workers.scorer import RewardError, Scorer
from rlft.tokens.text import without_tail
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.tokens.ends import TurnEnds

ANSWERED = "<think>-</think><answer>{}</answer>"
"""A completion with its answer in the tags that `reward=format` requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrial:
    """One reward's score of one completion, before weighting, and the error that it raised in its group.

    `score` is None where the error would end the run, else what its `on_error` gives.
    """

    reward: str
    kind: str
    prompt: str
    completion: str
    score: float | None
    error: str | None = None


def completions(prompt: Prompt, others: Sequence[Prompt]) -> list[tuple[str, str]]:
    """(kind, text) of the completions to try: empty, another prompt's answer, the reference; these two also in tags."""
    wrong = next((p.answer for p in others if p.answer != prompt.answer), f"{prompt.answer}0")
    return [
        ("empty", ""),
        ("wrong", wrong),
        ("reference", prompt.answer),
        ("wrong, in tags", ANSWERED.format(wrong)),
        ("reference, in tags", ANSWERED.format(prompt.answer)),
    ]


def try_rewards(
    rewards: Mapping[str, RewardSpec],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    ends: TurnEnds,
    timeout_s: float,
) -> list[RewardTrial]:
    """Scores completions of these prompts with every rule reward, one at a time, so that no failure hides another."""
    trials: list[RewardTrial] = []
    for name, spec in rewards.items():
        if spec.runs_in_trainer:
            continue
        for prompt in prompts:
            texts = completions(prompt, prompts)
            said = as_sampled([(prompt, text) for _, text in texts], tokenizer, sampling, ends)
            trials += _try(name, spec, prompt, texts, said, timeout_s)
    return trials


def _try(
    name: str,
    spec: RewardSpec,
    prompt: Prompt,
    texts: Sequence[tuple[str, str]],
    said: Sequence[Completion],
    timeout_s: float,
) -> list[RewardTrial]:
    rollouts = tuple(Rollout(prompt=prompt, completion=completion, policy_version=0) for completion in said)
    group = Group(prompt=prompt, rollouts=rollouts)
    scores: list[float | None] = [None] * len(texts)
    error = None
    try:
        with closing(Scorer({name: spec}, 1, timeout_s, "stop")) as scorer:
            scores = scorer([group]).by_reward[name][0].tolist()
            error = scorer.last_failure  # of a reward whose on_error is a number
    except RewardError as failed:
        error = str(failed)
    return [
        RewardTrial(reward=name, kind=kind, prompt=prompt.id, completion=text, score=score, error=error)
        for (kind, text), score in zip(texts, scores, strict=True)
    ]


def as_sampled(
    turns: Sequence[tuple[Prompt, str]], tokenizer: PreTrainedTokenizerBase, sampling: Sampling, ends: TurnEnds
) -> list[Completion]:
    """The completions of a policy that says these texts, each as the rest of a turn that its prompt may have begun.

    As in a run they consist of the tokenizer's tokens with those that end a turn, and their texts are what these decode
    to.
    """
    if not turns:
        return []
    texts = [without_tail(text, prompt.tail) + ends.lead for prompt, text in turns]
    rows: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
    said = [[*row, *ends.closing] for row in rows]
    shown = shown_texts(tokenizer, said, [True] * len(said), sampling, ends.ids)
    return [
        Completion(text=text, token_ids=tuple(ids), logprobs=(0.0,) * len(ids), finish_reason=FinishReason.stop)
        for text, ids in zip(shown, said, strict=True)
    ]


def doubts(trials: Sequence[RewardTrial]) -> list[str]:
    """Warnings about rewards that failed, or that do not tell a right answer from a wrong or an empty one."""
    texts = []
    for name in dict.fromkeys(trial.reward for trial in trials):
        tried = [trial for trial in trials if trial.reward == name]
        if failed := next((trial for trial in tried if trial.error), None):
            texts.append(f"reward.{name} failed: {failed.error}")
            continue
        scores = {trial.score for trial in tried}
        if len(scores) == 1:
            texts.append(
                f"reward.{name} gave all of these {tried[0].score:g}: it may read something that they do not have"
            )
            continue
        is_worse = [_worse(tried, "wrong", "reference"), _worse(tried, "wrong, in tags", "reference, in tags")]
        if all(is_worse):
            texts.append(f"reward.{name} gives a wrong answer more than the reference, in both forms")
    return texts


def _worse(trials: Sequence[RewardTrial], wrong: str, right: str) -> bool:
    """Whether the wrong answers have a higher mean score than the right ones."""
    scores = {kind: [t.score for t in trials if t.kind == kind and t.score is not None] for kind in (wrong, right)}
    return sum(scores[wrong]) > sum(scores[right])
