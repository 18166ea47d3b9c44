"""Every reward tried on a few prompts before a run: an empty, a wrong and the reference answer, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from rlft.reward.scorer import RewardError, Scorer
from rlft.reward.spec import RewardSpec
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

ANSWERED = "<think>-</think><answer>{}</answer>"
"""How a completion looks that says its answer in the tags which `reward=format` asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one completion was given by one reward, before its weight; error: what went wrong instead."""

    reward: str
    kind: str
    prompt: str
    completion: str
    score: float | None
    error: str | None = None


def completions(prompt: Prompt, others: Sequence[Prompt]) -> list[tuple[str, str]]:
    """(kind, text): empty, a wrong answer (another prompt's) and the reference, bare and in tags."""
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
    tokens: Callable[[str], Sequence[int]],
    timeout_s: float,
) -> list[Trial]:
    """What every reward that needs no weights says of these prompts, each by itself: one that fails hides no other."""
    found: list[Trial] = []
    for name, spec in rewards.items():
        if spec.runs_in_trainer:
            continue
        for prompt in prompts:
            found += _try(name, spec, prompt, completions(prompt, prompts), tokens, timeout_s)
    return found


def _try(
    name: str,
    spec: RewardSpec,
    prompt: Prompt,
    texts: Sequence[tuple[str, str]],
    tokens: Callable[[str], Sequence[int]],
    timeout_s: float,
) -> list[Trial]:
    group = Group(prompt=prompt, rollouts=tuple(_rollout(prompt, text, tokens) for _, text in texts))
    scores: list[float | None] = [None] * len(texts)
    error = None
    try:
        with closing(Scorer({name: spec}, 1, timeout_s, "stop")) as scorer:
            scores = scorer([group]).by_reward[name][0].tolist()
    except RewardError as failed:
        error = str(failed)
    return [
        Trial(reward=name, kind=kind, prompt=prompt.id, completion=text, score=score, error=error)
        for (kind, text), score in zip(texts, scores, strict=True)
    ]


def _rollout(prompt: Prompt, text: str, tokens: Callable[[str], Sequence[int]]) -> Rollout:
    ids = tuple(tokens(text))
    said = Completion(text=text, token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason=FinishReason.stop)
    return Rollout(prompt=prompt, completion=said, policy_version=0)


def doubts(trials: Sequence[Trial]) -> list[str]:
    """What to look into: rewards that failed, or that never tell a right answer from a wrong or an empty one."""
    told = []
    for name in dict.fromkeys(trial.reward for trial in trials):
        own = [trial for trial in trials if trial.reward == name]
        if failed := next((trial for trial in own if trial.error), None):
            told.append(f"reward.{name} failed: {failed.error}")
            continue
        scores = {trial.score for trial in own}
        if len(scores) == 1:
            told.append(f"reward.{name} gave all of these {own[0].score:g}: it may look at something that is not here")
            continue
        ends = [_worse(own, "wrong", "reference"), _worse(own, "wrong, in tags", "reference, in tags")]
        if all(ends):
            told.append(f"reward.{name} gives a wrong answer more than the reference, in both forms")
    return told


def _worse(trials: Sequence[Trial], wrong: str, right: str) -> bool:
    """Whether the wrong answers score more in the mean than the right ones."""
    of = {kind: [t.score for t in trials if t.kind == kind and t.score is not None] for kind in (wrong, right)}
    return sum(of[wrong]) > sum(of[right])
