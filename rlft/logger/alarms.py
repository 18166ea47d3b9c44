"""What looks wrong in a run's numbers: `Hints` read single steps, `Alarms` series of them; each names a remedy.

What they say is in assets/alarms.yaml. Alarms are about trouble that develops slowly. Their limits are keys
(`alarms.*`); null turns an alarm off. Checkpoints save the state of both, so a resumed run says the same at the same
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from rlft.config.schema import AlarmsConfig
from rlft.runs.lines import StepRecord
from rlft.system.files import asset
from rlft.types import counted

WINDOW = 20  # number of earlier steps with which a new step is compared
FIRST = 5  # number of steps at the start of a run from whose mean growth is measured
REPEAT_STEPS = 50  # an alarm that lasts is raised again after this many steps
SPREAD = 0.25  # if a step's rewards have a larger standard deviation, groups of equal rewards are not simply all solved
WATCHED = ("policy/grad_norm", "loss/value", "length/mean")
PATIENCE = 3  # steps in a row before a hint about something that a single unlucky batch can cause
REPEAT_HINT_STEPS = 100  # a hint that still applies is given again after this many steps
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


@cache
def texts() -> Mapping[str, Mapping[str, str]]:
    """{hints or alarms: {name: text}}."""
    return asset("alarms.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A note for the person watching."""

    text: str
    alarm: str | None = None  # the alarm's name in the metrics, if the hint says that something is wrong; else None
    fatal: bool = False  # whether the numbers are broken, so that the run must stop before it saves them


class Hints:
    """Reads the record of each step, in order, and returns hints: each once, or every 100 steps while it applies."""

    def __init__(self) -> None:
        self._last_given: dict[str, int] = {}
        self._streaks: dict[str, int] = {}
        self._first_entropies: list[float] = []
        self._last_entropies: list[float] = []
        self._highest, self._lowest = -math.inf, math.inf

    def check(self, record: StepRecord) -> list[Hint]:
        """The hints about this step; a single fatal hint if a loss or the gradient is not finite."""
        if fatal_hint := not_finite(record):
            return [fatal_hint]
        found = [(key, values) for key, values in self._applying(record) if self._is_due(key, record.step)]
        self._last_given.update((key, record.step) for key, _ in found)
        alarms = ALARMS - NORMAL_WHEN_SOLVED if self._is_solved(record) else ALARMS
        common = {"patience": PATIENCE, "reward": record.metrics.get("reward/mean", math.nan)}
        return [
            Hint(
                text=f"step {record.step}: {texts()['hints'][key].format(**common, **values)}",
                alarm=key if key in alarms else None,
            )
            for key, values in found
        ]

    def _is_solved(self, record: StepRecord) -> bool:
        """Whether nearly every completion gets the highest reward so far, and some had less before.

        A reward that has never varied may as well be one that reads nothing.
        """
        rewards = [reward for group in record.total_rewards for reward in group]
        if not rewards:
            return False
        self._highest, self._lowest = max(self._highest, *rewards), min(self._lowest, *rewards)
        return self._highest > max(0.0, self._lowest) and mean(rewards) >= SOLVED * self._highest

    def state(self) -> dict[str, Any]:
        """The whole state, as values that JSON can hold."""
        entropies = {"first": self._first_entropies, "last": self._last_entropies}
        extremes = {name: value if math.isfinite(value) else None
                    for name, value in (("highest", self._highest), ("lowest", self._lowest))}  # fmt: skip
        return {"said": self._last_given, "streaks": self._streaks, "entropies": entropies, **extremes}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._last_given, self._streaks = dict(state["said"]), dict(state["streaks"])
        self._first_entropies = list(state["entropies"]["first"])
        self._last_entropies = list(state["entropies"]["last"])
        self._highest = -math.inf if state["highest"] is None else float(state["highest"])
        # A checkpoint from before `lowest` was counted says nothing: the reward may have varied.
        lowest = state.get("lowest", -math.inf)
        self._lowest = math.inf if lowest is None else float(lowest)

    def _is_due(self, key: str, step: int) -> bool:
        return key not in self._last_given or (key in LASTING and step - self._last_given[key] >= REPEAT_HINT_STEPS)

    def _lasts(self, key: str, holds: bool) -> bool:
        self._streaks[key] = self._streaks.get(key, 0) + 1 if holds else 0
        return self._streaks[key] >= PATIENCE

    def _applying(self, record: StepRecord) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(name, values for its text) of each hint that applies to this step, whether it was given before or not."""
        metrics, is_without_signal = record.metrics, no_signal(record)
        if self._lasts("no_signal", is_without_signal):
            yield "no_signal", {}
        loss, gradient = metrics.get("loss/total"), metrics.get("policy/grad_norm", 0.0)
        if loss is not None and abs(loss) <= ROUNDING:
            why = "equal" if is_without_signal else "expected" if gradient > 0 else "dead"
            yield f"zero_{why}", {"value": gradient}
        share, length = metrics.get("length/truncated_fraction", 0.0), metrics.get("length/mean", math.inf)
        if self._lasts("truncated", share >= TRUNCATED):
            yield "truncated", {"value": share}
        if self._lasts("empty", length < EMPTY_LENGTH):
            yield "empty", {"value": length}
        trained, sampled = metrics.get("tokens/trained"), metrics.get("tokens/completion")
        if trained is not None and sampled:
            # Groups without a signal are left out on purpose: only tokens of the other groups count as missing.
            expected = sampled * (1.0 - metrics.get("waste/zero_advantage_fraction", 0.0))
            if self._lasts("untrained", trained < FEW_TRAINED * expected):
                dropped = metrics.get("waste/importance_dropped_fraction", 0.0)
                yield "untrained", {"value": trained, "sampled": sampled, "dropped": dropped}
        if (entropy := metrics.get("policy/entropy")) is None:
            return
        if len(self._first_entropies) < ENTROPY_WINDOW:
            self._first_entropies.append(entropy)
            return
        self._last_entropies = [*self._last_entropies, entropy][-ENTROPY_WINDOW:]
        first, last = mean(self._first_entropies), mean(self._last_entropies)
        if len(self._last_entropies) == ENTROPY_WINDOW and last < ENTROPY_SHARE * first:
            yield "entropy", {"usual": first, "value": last}


def not_finite(record: StepRecord) -> Hint | None:
    """A fatal hint that names the step and the number if a loss or the gradient norm is NaN or infinite."""
    judged = {n: v for n, v in record.metrics.items() if n.startswith("loss/") or n.endswith("/grad_norm")}
    broken = ", ".join(f"{name} is {value}" for name, value in judged.items() if not math.isfinite(value))
    if not broken:
        return None
    return Hint(text=f"step {record.step}: {texts()['hints']['not_finite'].format(broken=broken)}", fatal=True)


def no_signal(record: StepRecord) -> bool:
    """Whether the rewards teach nothing in this step of several completions, whatever other terms the loss has."""
    several = sum(map(len, record.total_rewards)) > 1
    return several and record.metrics.get("waste/zero_advantage_fraction", 0.0) >= 1.0


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _first_mean(first: Sequence[float], last: Sequence[float]) -> float | None:
    return max(1.0, sum(first) / len(first)) if len(first) == FIRST else None


def _median(first: Sequence[float], last: Sequence[float]) -> float | None:
    return median(last) if len(last) >= WINDOW // 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An alarm about one number of a step, which is beyond its limit `alarms.<name>`."""

    name: str  # of the alarm and its key
    # Their sum is the number; a step without the first counts neither for the alarm nor against it.
    metrics: tuple[str, ...]
    # From the first values of the metric and the last ones before the step, what the limit is a multiple of; None while
    # they are too few.
    usual: Callable[[Sequence[float], Sequence[float]], float | None] = lambda first, last: 1.0
    # Whether the number is beyond the limit times what is usual, in a step with these metrics.
    is_beyond: Callable[[float, float, Mapping[str, float]], bool] = lambda value, bound, metrics: value > bound
    # Whether one step is enough, if its number is also larger than those of the first steps; others must be beyond
    # their limits in `alarms.patience` steps in a row.
    at_once: bool = False


RULES = (
    Rule(name="kl", metrics=("kl/reference",)),
    Rule(
        name="logprob_gap",
        metrics=("sampler/logprob_gap_mean",),
        is_beyond=lambda value, bound, metrics: abs(value) > bound,
    ),
    Rule(name="sampler_kl", metrics=("sampler/kl",)),
    Rule(
        name="effective_samples",
        metrics=("sampler/effective_sample_size",),
        is_beyond=lambda value, bound, metrics: value < bound,
    ),
    Rule(name="clipped", metrics=("ratio/clip_low_fraction", "ratio/clip_high_fraction")),
    Rule(
        name="equal_groups",
        metrics=("waste/zero_advantage_fraction",),
        is_beyond=lambda value, bound, metrics: bound < value < 1 and metrics.get("reward/std", 0.0) > SPREAD,
    ),
    Rule(name="length_growth", metrics=("length/mean",), usual=_first_mean),
    Rule(name="value_loss", metrics=("loss/value",), usual=_median),
    Rule(
        name="grad_norm",
        metrics=("policy/grad_norm",),
        usual=lambda first, last: _median(first, [value for value in last if value > 0]),
        at_once=True,
    ),
)


class Alarms:
    """Reads the metrics of every step and of every evaluation, in order."""

    def __init__(self, settings: AlarmsConfig) -> None:
        self.settings = settings
        self._series: dict[str, list[float]] = {}
        self._first: dict[str, list[float]] = {}
        self._streaks: dict[str, int] = {}
        self._last_raised: dict[str, int] = {}
        # {reward: [its first mean, number of steps, 1 if it has ever varied, else 0]}
        self._reward_history: dict[str, list[float]] = {}
        # Accuracy, its standard error and reward/mean of the best evaluation; no reward before the first step.
        self._best: tuple[float, float, float | None] | None = None
        self._reward_mean = math.nan

    def state(self) -> dict[str, Any]:
        """The whole state, as values that JSON can hold."""
        return {
            "series": self._series, "first": self._first, "streaks": self._streaks, "said": self._last_raised,
            "rewards": self._reward_history, "best": None if self._best is None else list(self._best),
            "reward": None if math.isnan(self._reward_mean) else self._reward_mean,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        self._series = {name: list(values) for name, values in state["series"].items()}
        self._first = {name: list(values) for name, values in state["first"].items()}
        self._streaks, self._last_raised = dict(state["streaks"]), dict(state["said"])
        self._reward_history = {name: list(values) for name, values in state["rewards"].items()}
        self._best = None if state["best"] is None else tuple(state["best"])
        self._reward_mean = math.nan if state["reward"] is None else float(state["reward"])

    def step(self, step: int, metrics: Mapping[str, float], varied: Collection[str] = ()) -> dict[str, str]:
        """{alarm: its text} of this step; each is raised once, and again every 50 steps while its cause lasts.

        `varied` are the rewards that were not the same for all completions of the step.
        """
        raised = {rule.name: text for rule in RULES if (text := self._text(rule, metrics))}
        raised |= dict(self._constant(metrics, varied))
        self._reward_mean = metrics.get("reward/mean", math.nan)
        for name in WATCHED:
            if name in metrics:
                first = self._first.setdefault(name, [])
                if len(first) < FIRST:
                    first.append(metrics[name])
                self._series[name] = [*self._series.get(name, []), metrics[name]][-WINDOW:]
        return self._not_repeated(raised, step)

    def evaluation(self, step: int, accuracy: float | None, error: float | None) -> dict[str, str]:
        """As `step`, for an evaluation: raises an alarm if accuracy falls while the reward rises."""
        drop = self.settings.accuracy_drop
        if accuracy is None or drop is None:
            return {}
        raised = {}
        if self._best is not None and not math.isnan(self._reward_mean):
            best, best_error, reward = self._best
            noise = math.hypot(best_error, error or 0.0)
            if accuracy < best - drop * noise and noise > 0 and (reward is None or self._reward_mean > reward):
                change = "is" if reward is None else f"rose from {reward:.3f} to"
                raised["accuracy_falls"] = texts()["alarms"]["accuracy_falls"].format(
                    usual=best, value=accuracy, change=change, reward=self._reward_mean
                )
        if self._best is None or accuracy > self._best[0]:
            reward_mean = None if math.isnan(self._reward_mean) else self._reward_mean
            self._best = None if reward_mean is None and step else (accuracy, error or 0.0, reward_mean)
        return self._not_repeated(raised, step)

    def _not_repeated(self, raised: Mapping[str, str], step: int) -> dict[str, str]:
        new = {
            name: text
            for name, text in raised.items()
            if name not in self._last_raised or step - self._last_raised[name] >= REPEAT_STEPS
        }
        self._last_raised |= dict.fromkeys(new, step)
        return new

    def _lasts(self, name: str, holds: bool) -> bool:
        self._streaks[name] = self._streaks.get(name, 0) + 1 if holds else 0
        return self._streaks[name] >= self.settings.patience

    def _text(self, rule: Rule, metrics: Mapping[str, float]) -> str | None:
        """What is said of a step with these metrics, if the rule's number is beyond its limit."""
        limit, metric = getattr(self.settings, rule.name), rule.metrics[0]
        usual = rule.usual(self._first.get(metric, []), self._series.get(metric, []))
        if limit is None or usual is None or metric not in metrics:
            return None
        value = sum(metrics.get(name, 0.0) for name in rule.metrics)
        is_beyond = rule.is_beyond(value, limit * usual, metrics)
        is_beyond = (
            value > max(self._first[metric]) and is_beyond if rule.at_once else self._lasts(rule.name, is_beyond)
        )
        return texts()["alarms"][rule.name].format(value=value, limit=limit, usual=usual) if is_beyond else None

    def _constant(self, metrics: Mapping[str, float], varied: Collection[str]) -> Iterator[tuple[str, str]]:
        limit = self.settings.constant_reward
        if limit is None:
            return
        for name, value in metrics.items():
            reward = name.removeprefix("reward/")
            if not name.startswith("reward/") or reward in ("mean", "std"):
                continue
            first, steps, moved = self._reward_history.get(reward, [value, 0.0, 0.0])
            moved = max(moved, float(value != first or reward in varied))
            self._reward_history[reward] = [first, steps + 1, moved]
            if steps + 1 >= limit and not moved:
                seen = counted(int(steps) + 1, "step")
                text = texts()["alarms"]["constant_reward"]
                yield f"constant_reward_{reward}", text.format(reward=reward, value=value, steps=seen)
