"""Hints about a step's numbers that look wrong: what they mean, and a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlft.types import StepRecord

PATIENCE = 3  # steps in a row before a hint about something that a single unlucky batch can cause
REPEAT_STEPS = 100  # a hint that still applies is given again after this many steps
LASTING = {"no_signal", "truncated", "empty", "untrained"}
ALARMS = LASTING | {"entropy"}
NORMAL_WHEN_SOLVED = {"entropy", "no_signal"}  # normal, and so no alarms, once a task is solved
SOLVED = 0.95  # share of the highest reward so far
TRUNCATED = 0.9  # share of completions that hit the length limit
FEW_TRAINED = 0.05  # share of completion tokens that enter the loss
EMPTY_LENGTH = 2.0  # mean completion length in tokens, the end token included
ENTROPY_SHARE = 0.05  # share of the mean entropy of the first ENTROPY_WINDOW steps
ENTROPY_WINDOW = 5
ROUNDING = 1e-6  # a float32 loss below this is 0 up to rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A note for the person watching.

    Attributes:
        text: the note.
        alarm: the alarm's name in the metrics, if the hint says that something is wrong; else None.
        fatal: whether the numbers are broken, so that the run must stop before it saves them.
    """

    text: str
    alarm: str | None = None
    fatal: bool = False


class Hints:
    """Reads the record of each step, in order, and returns hints: each once, or every 100 steps while it applies."""

    def __init__(self) -> None:
        self._last_given: dict[str, int] = {}
        self._streaks: dict[str, int] = {}
        self._first_entropies: list[float] = []
        self._last_entropies: list[float] = []
        self._highest = -math.inf

    def check(self, record: StepRecord) -> list[Hint]:
        """The hints about this step; a single fatal hint if a loss or the gradient is not finite."""
        if fatal_hint := not_finite(record):
            return [fatal_hint]
        rules = (self._no_signal, self._zero_loss, self._truncated, self._empty, self._untrained, self._entropy)
        hints = [hint for rule in rules for hint in rule(record)]
        new = [(key, text) for key, text in hints if self._due(key, record.step)]
        self._last_given.update((key, record.step) for key, _ in new)
        alarms = ALARMS - NORMAL_WHEN_SOLVED if self._is_solved(record) else ALARMS
        return [Hint(text=f"step {record.step}: {text}", alarm=key if key in alarms else None) for key, text in new]

    def _is_solved(self, record: StepRecord) -> bool:
        """Whether nearly every completion gets the highest reward so far."""
        rewards = [reward for group in record.total_rewards for reward in group]
        if not rewards:
            return False
        self._highest = max(self._highest, *rewards)
        return self._highest > 0 and mean(rewards) >= SOLVED * self._highest

    def state(self) -> dict[str, Any]:
        """The whole state, as values that JSON can hold."""
        entropies = {"first": self._first_entropies, "last": self._last_entropies}
        highest = self._highest if math.isfinite(self._highest) else None
        return {"said": self._last_given, "streaks": self._streaks, "entropies": entropies, "highest": highest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""
        self._last_given, self._streaks = dict(state["said"]), dict(state["streaks"])
        self._first_entropies = list(state["entropies"]["first"])
        self._last_entropies = list(state["entropies"]["last"])
        self._highest = -math.inf if state["highest"] is None else float(state["highest"])

    def _due(self, key: str, step: int) -> bool:
        return key not in self._last_given or (key in LASTING and step - self._last_given[key] >= REPEAT_STEPS)

    def _lasts(self, key: str, holds: bool) -> bool:
        self._streaks[key] = self._streaks.get(key, 0) + 1 if holds else 0
        return self._streaks[key] >= PATIENCE

    def _no_signal(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        if self._lasts("no_signal", no_signal(record)):
            reward = record.metrics.get("reward/mean", math.nan)
            yield (
                "no_signal",
                f"in each of the last {PATIENCE} steps all completions of a prompt got the same reward (reward/mean"
                f" {reward:.3g}), so nothing was learned. If they are all wrong, use easier prompts or a reward that"
                " gives part marks; if all right, harder prompts; a larger group_size or generation.temperature tells"
                " completions apart",
            )

    def _zero_loss(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        loss = record.metrics.get("loss/total")
        if loss is None or abs(loss) > ROUNDING:
            return
        gradient = record.metrics.get("policy/grad_norm", 0.0)
        if no_signal(record):
            yield (
                "zero_equal",
                "the loss is 0 because all completions of each prompt got the same reward: no learning signal in this"
                " step. Now and then that is normal; use more prompts_per_step or a larger group_size if it goes on",
            )
        elif gradient > 0:
            yield (
                "zero_expected",
                "the loss is 0 and that is expected: before the first update of a batch the ratio is 1 and a group's"
                f" advantages add up to 0. The gradient is not 0 (policy/grad_norm {gradient:.3g}): watch reward/mean",
            )
        else:
            yield (
                "zero_dead",
                "loss and gradient are both 0 although rewards differ, so the policy does not change: no token reached"
                " the loss, or all were clipped or masked. See tokens/trained, ratio/* and waste/* in metrics.jsonl",
            )

    def _truncated(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        share = record.metrics.get("length/truncated_fraction", 0.0)
        if self._lasts("truncated", share >= TRUNCATED):
            yield (
                "truncated",
                f"{share:.0%} of the completions hit the length limit before they ended, so few reach an answer."
                " Raise generation.max_tokens, or check that the model knows its end token (chat template)",
            )

    def _empty(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        length = record.metrics.get("length/mean", math.inf)
        if self._lasts("empty", length < EMPTY_LENGTH):
            yield (
                "empty",
                f"completions are nearly empty (length/mean {length:.3g} tokens): the model ends at once. Check the"
                " chat template and the prompt, and that no reward pays for short answers",
            )

    def _untrained(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        trained, sampled = record.metrics.get("tokens/trained"), record.metrics.get("tokens/completion")
        if trained is None or not sampled:
            return
        # Groups without a signal are left out on purpose: only tokens of the other groups count as missing.
        expected = sampled * (1.0 - record.metrics.get("waste/zero_advantage_fraction", 0.0))
        if self._lasts("untrained", trained < FEW_TRAINED * expected):
            dropped = record.metrics.get("waste/importance_dropped_fraction", 0.0)
            yield (
                "untrained",
                f"only {trained:.0f} of {sampled:.0f} sampled tokens entered the loss although rewards differ. The"
                f" mismatch correction dropped {dropped:.0%}: if that is much, see how far sampler/logprob_gap_mean is"
                " from 0; else look at the completions in rollouts/",
            )

    def _entropy(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        entropy = record.metrics.get("policy/entropy")
        if entropy is None:
            return
        if len(self._first_entropies) < ENTROPY_WINDOW:
            self._first_entropies.append(entropy)
            return
        self._last_entropies = [*self._last_entropies, entropy][-ENTROPY_WINDOW:]
        first, last = mean(self._first_entropies), mean(self._last_entropies)
        if len(self._last_entropies) == ENTROPY_WINDOW and last < ENTROPY_SHARE * first:
            reward = record.metrics.get("reward/mean", math.nan)
            yield (
                "entropy",
                f"policy/entropy fell from {first:.3g} to {last:.3g}: the completions of a prompt hardly differ, so"
                f" little is left to learn from. Fine if the task is solved (reward/mean is {reward:.3g}); if not,"
                " start again with a lower trainer.lr, an entropy bonus or a KL term",
            )


def not_finite(record: StepRecord) -> Hint | None:
    """A fatal hint that names the step and the number if a loss or the gradient norm is NaN or infinite."""
    broken_metrics = {
        name: value
        for name, value in record.metrics.items()
        if (name.startswith("loss/") or name.endswith("/grad_norm")) and not math.isfinite(value)
    }
    if not broken_metrics:
        return None
    items = ", ".join(f"{name} is {value}" for name, value in broken_metrics.items())
    text = (
        f"step {record.step}: {items}, so the run stops here; checkpoints of earlier steps are good. Start again with a"
        " lower trainer.lr, or with model.dtype=float32 if it was a 16-bit type"
    )
    return Hint(text=text, fatal=True)


def no_signal(record: StepRecord) -> bool:
    """Whether no group has two different rewards and, where that is measured, no completion has an advantage.

    The second condition is for critics, which can learn from equal rewards; groups of one completion do not count.
    """
    groups = [group for group in record.total_rewards if len(group) > 1]
    equal = bool(groups) and all(min(group) == max(group) for group in groups)
    return equal and record.metrics.get("waste/zero_advantage_fraction", 1.0) >= 1.0


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
