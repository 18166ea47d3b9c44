"""What `rlft plan` says of the rewards: what they give a few completions, and in three lines what they pay for.

The few are scored as a run would score them, as one group of each prompt and by any rule reward. Hundreds of texts are
tried (`tester.py`) with rules of rlft's own only: a reward of the user's own may have side effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlft.config.schema import SamplingRoot
from rlft.logger.text import one_line
from rlft.plan.rewards.tester import RewardTester
from rlft.plan.rewards.verdicts import summary_of
from rlft.plan.rewards.writer import Writer, group_of
from rlft.reward.answer import AnswerKeys
from rlft.reward.code import Code
from rlft.reward.http import ServerKeys
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.reward.workers.scorer import RewardError, Scorer
from rlft.types import Prompt, counted

TRIED_PROMPTS = 2
SHOWN_CHARACTERS = 32
ANSWERED = "<think>-</think><answer>{}</answer>"
"""A completion with its answer in the tags that `reward=format` requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrial:
    """One reward's score of one completion, before weighting, and the error that it raised in its group."""

    reward: str
    kind: str
    prompt: str
    completion: str
    score: float | None  # None where the error would end the run, else what its `on_error` gives
    error: str | None = None

    @property
    def shown(self) -> str:
        """The kind and the beginning of the completion."""
        return f"{self.kind}: {one_line(self.completion, SHOWN_CHARACTERS)}" if self.completion else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """What a plan says of the rewards."""

    trials: Sequence[RewardTrial] = ()  # their scores of a few completions
    lines: Sequence[str] = ()  # what texts that a policy may find are paid; none unless all are rules of rlft's


def brief_of(config: SamplingRoot, prompts: Sequence[Prompt], writer: Writer) -> Brief:
    """The brief on the config's rewards, which score completions of these prompts."""
    rewards, few = specs(config.reward), prompts[:TRIED_PROMPTS]
    trials = try_rewards(config, rewards, few, writer)
    lines = paid_for(config, rewards, few, writer)
    return Brief(trials=trials, lines=lines and [*lines, *most_common_answer([prompt.answer for prompt in prompts])])


def tried_completions(
    prompt: Prompt, others: Sequence[Prompt], readers: Mapping[str, AnswerKeys] = MappingProxyType({})
) -> list[tuple[str, str]]:
    """(kind, text) of the completions to try: empty, another prompt's answer, the reference.

    These two are also tried in tags, and in the form that each of `readers`, {name: reward}, reads if that is another.
    """
    right = prompt.answer, *prompt.other_answers
    wrong = next((p.answer for p in others if p.answer not in right), f"{prompt.answer}0")
    answers = {"wrong": wrong, "reference": prompt.answer}
    texts = {"empty": "", **answers, **{f"{kind}, in tags": ANSWERED.format(text) for kind, text in answers.items()}}
    for name, reader in readers.items():
        with suppress(ValueError):  # such an answer is of no use to it
            told = {
                f"{kind}, as {name} reads it": reader.reference_text(replace(prompt, answer=answer))
                for kind, answer in answers.items()
            }
            texts |= {kind: text for kind, text in told.items() if text and not any(text in t for t in texts.values())}
    return list(texts.items())


def try_rewards(
    config: SamplingRoot, rewards: Mapping[str, RewardSpec], prompts: Sequence[Prompt], writer: Writer
) -> list[RewardTrial]:
    """Scores completions of these prompts with every rule reward, one at a time, so that no failure hides another."""
    trials: list[RewardTrial] = []
    rules = {name: spec for name, spec in rewards.items() if not spec.runs_in_trainer}
    built = {name: spec.build() for name, spec in rules.items()}
    readers = {name: reward for name, reward in built.items() if isinstance(reward, AnswerKeys)}
    groups = []
    for prompt in prompts:
        texts = tried_completions(prompt, prompts, readers)
        groups.append((texts, group_of(prompt, writer.completions([(prompt, text) for _, text in texts]))))
    timeout_s, on_error, allowed = config.scoring.timeout, config.scoring.on_error, config.allows_unscorable
    for name, spec in rules.items():
        with closing(Scorer({name: spec}, 1, timeout_s, on_error, allow_unscorable=allowed)) as scorer:
            for texts, group in groups:
                scores: Sequence[float | None] = [None] * len(texts)
                scorer.last_failure = None
                try:
                    scores = scorer([group]).by_reward[name][0].tolist()
                    error = scorer.last_failure  # of a reward whose on_error is a number
                except RewardError as failed:
                    error = str(failed)
                of_group = {"reward": name, "prompt": group.prompt.id, "error": error}
                trials += [
                    RewardTrial(kind=kind, completion=text, score=score, **of_group)
                    for (kind, text), score in zip(texts, scores, strict=True)
                ]
    return trials


def doubts(trials: Sequence[RewardTrial]) -> list[str]:
    """Warnings about rewards that failed, or that do not tell a right answer from a wrong or an empty one."""
    texts = []
    for name in dict.fromkeys(trial.reward for trial in trials):
        tried = [trial for trial in trials if trial.reward == name]
        if failed := next((trial for trial in tried if trial.error), None):
            texts.append(f"reward.{name} failed: {failed.error}")
        elif len({trial.score for trial in tried}) == 1:
            same = f"gave all of these {tried[0].score:g}"
            texts.append(f"reward.{name} {same}: it may read something that they do not have")
        elif _pays_wrong_more(tried, "") and _pays_wrong_more(tried, ", in tags"):
            texts.append(f"reward.{name} gives a wrong answer more than the reference, in both forms")
    return texts


def _pays_wrong_more(trials: Sequence[RewardTrial], form: str) -> bool:
    """Whether wrong answers in this form have a higher mean score than right ones."""
    wrong, right = (
        sum(trial.score or 0.0 for trial in trials if trial.kind == f"{answer}{form}")
        for answer in ("wrong", "reference")
    )
    return wrong > right


def paid_for(
    config: SamplingRoot, rewards: Mapping[str, RewardSpec], prompts: Sequence[Prompt], writer: Writer
) -> list[str]:
    """What these rewards pay for; nothing unless all are rules of rlft's own, and each prompt has an answer."""
    is_rule = [
        spec.target.startswith("rlft.") and not spec.runs_in_trainer and not isinstance(spec.build(), ServerKeys | Code)
        for spec in rewards.values()
    ]
    if not is_rule or not all(is_rule) or config.environment or not all(prompt.answer.strip() for prompt in prompts):
        return []
    return summary_of(RewardTester(config, rewards, writer, is_isolated=False).try_all(prompts))


def most_common_answer(answers: Sequence[str]) -> list[str]:
    """What a policy gets that answers all prompts alike, which a small model learns first; nothing if no two answers
    are the same."""
    [(answer, number)] = Counter(answers).most_common(1)
    if number == 1:
        return []
    share = f"{number / len(answers):.1%} of the {counted(len(answers), 'prompt')}"
    return [
        f"most common answer: '{one_line(answer, SHOWN_CHARACTERS)}', of {share}: always written, it is right as often"
    ]
