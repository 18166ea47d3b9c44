"""What looks wrong in a run's numbers: `Hints` read single steps, `Alarms` series of them; each names a remedy.

Alarms are about trouble that develops slowly. Their thresholds are keys (`alarms.*`); null turns an alarm off.
Checkpoints save the state of both, so a resumed run says the same at the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlft.config.schema import AlarmsConfig
from rlft.logger.interface import StepRecord
from rlft.types import counted

WINDOW = 20
"""Number of earlier steps with which a new step is compared."""

FIRST = 5
"""Number of steps at the start of a run from whose mean growth is measured."""

REPEAT_STEPS = 50
"""An alarm that lasts is raised again after this many steps."""

SPREAD = 0.25
"""If a step's rewards have a larger standard deviation, groups of equal rewards are not simply all solved."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A note for the person watching.

    Attributes:
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
        self._highest, self._lowest = -math.inf, math.inf

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

    def _due(self, key: str, step: int) -> bool:
        return key not in self._last_given or (key in LASTING and step - self._last_given[key] >= REPEAT_HINT_STEPS)

    def _lasts(self, key: str, holds: bool) -> bool:
        self._streaks[key] = self._streaks.get(key, 0) + 1 if holds else 0
        return self._streaks[key] >= PATIENCE

    def _no_signal(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        if self._lasts("no_signal", no_signal(record)):
            reward = record.metrics.get("reward/mean", math.nan)
            yield (
                "no_signal",
                f"in each of the last {PATIENCE} steps all completions of a prompt got the same reward (reward/mean"
                f" {reward:.3g}), so the rewards taught nothing. If they are all wrong, use easier prompts or a reward"
                " that gives part marks; if all right, harder prompts; a larger group_size or generation.temperature"
                " tells completions apart",
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
    """Whether the rewards teach nothing in this step of several completions, whatever other terms the loss has."""
    several = sum(map(len, record.total_rewards)) > 1
    return several and record.metrics.get("waste/zero_advantage_fraction", 0.0) >= 1.0


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


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
        rules = (
            self._kl, self._gap, self._sampler_kl, self._effective_samples, self._clipped, self._groups, self._length,
            self._value, self._gradient,
        )  # fmt: skip
        raised = {name: text for rule in rules for name, text in rule(metrics)} | dict(self._constant(metrics, varied))
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
                raised["accuracy_falls"] = (
                    f"held-out accuracy fell from {best:.3f} to {accuracy:.3f} while reward/mean {change}"
                    f" {self._reward_mean:.3f}: the reward is being gamed, or the training prompts are learned by"
                    " heart. Read completions that score high; tie the policy to its start (algorithm.kl_coef), fix the"
                    " reward, or take the checkpoint of the best accuracy"
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

    def _exceeds(self, name: str, value: float | None, limit: float | None) -> bool:
        """Whether the value has exceeded the limit for `patience` steps; False where there is no value or no limit."""
        return limit is not None and value is not None and self._lasts(name, value > limit)

    # -- rules ---------------------------------------------------------------------------------------------------------
    def _kl(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, kl = self.settings.kl, metrics.get("kl/reference")
        if self._exceeds("kl", kl, limit):
            yield (
                "kl",
                f"kl/reference is {kl:.3g} nats per token (alarms.kl={limit:g}): the policy has left its reference."
                " Raise algorithm.kl_coef, lower trainer.lr, or refresh the reference (snapshot.refresh_every)",
            )

    def _gap(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, gap = self.settings.logprob_gap, metrics.get("sampler/logprob_gap_mean")
        if self._exceeds("logprob_gap", None if gap is None else abs(gap), limit):
            yield (
                "logprob_gap",
                f"engine and trainer disagree by {gap:.3g} nats per token (alarms.logprob_gap={limit:g}): what is"
                " trained is not what was sampled. Use model.dtype=float32, generation.transformers.weights=merged, or"
                " a mismatch correction (algorithm.mismatch)",
            )

    def _sampler_kl(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, kl = self.settings.sampler_kl, metrics.get("sampler/kl")
        if self._exceeds("sampler_kl", kl, limit):
            yield (
                "sampler_kl",
                f"the policy is {kl:.3g} nats per token from the version that sampled (alarms.sampler_kl={limit:g}):"
                " the update is far off policy. Lower trainer.lr, epochs or minibatches, set"
                " algorithm.off_policy_limit=0.1, or use overlap.lag=0",
            )

    def _effective_samples(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, share = self.settings.effective_samples, metrics.get("sampler/effective_sample_size")
        if limit is None or share is None:
            return
        if self._lasts("effective_samples", share < limit):
            yield (
                "effective_samples",
                f"the step's tokens are worth {share:.0%} of as many on-policy ones"
                f" (alarms.effective_samples={limit:g}): a few with large importance weights decide. Lower trainer.lr,"
                " use algorithm.mismatch=token_mask, or overlap.lag=0",
            )

    def _clipped(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit = self.settings.clipped
        share = metrics.get("ratio/clip_low_fraction", 0.0) + metrics.get("ratio/clip_high_fraction", 0.0)
        if self._exceeds("clipped", share, limit):
            yield (
                "clipped",
                f"{share:.0%} of the trained tokens were clipped (alarms.clipped={limit:g}), so most of an update does"
                " nothing. Lower trainer.lr, epochs or minibatches, or widen algorithm.clip_low and clip_high",
            )

    def _groups(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, share = self.settings.equal_groups, metrics.get("waste/zero_advantage_fraction")
        spread = metrics.get("reward/std", 0.0)
        if limit is None or share is None:
            return
        if self._lasts("equal_groups", limit < share < 1 and spread > SPREAD):
            yield (
                "equal_groups",
                f"{share:.0%} of the completions have siblings of equal reward (alarms.equal_groups={limit:g}), some"
                " all right and some all wrong: few prompts teach anything. Leave out what is too easy or too hard, use"
                " dynamic_sampling.max_rounds=2, or a larger group_size",
            )

    def _length(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, first = self.settings.length_growth, self._first.get("length/mean", [])
        length = metrics.get("length/mean")
        if limit is None or length is None or len(first) < FIRST:
            return
        initial = max(1.0, sum(first) / len(first))
        if self._lasts("length_growth", length > limit * initial):
            yield (
                "length_growth",
                f"completions grew from {initial:.0f} to {length:.0f} tokens (alarms.length_growth={limit:g}). Where"
                " length itself pays, add reward=[...,overlong] or length, or use algorithm=dr_grpo, which does not"
                " favour long wrong answers",
            )

    def _value(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, loss = self.settings.value_loss, metrics.get("loss/value")
        earlier = self._series.get("loss/value", [])
        if limit is None or loss is None or len(earlier) < WINDOW // 2:
            return
        if self._lasts("value_loss", loss > limit * median(earlier)):
            yield (
                "value_loss",
                f"loss/value is {loss:.3g}, {limit:g} times that of the steps before: the critic diverges, and with it"
                " the advantages. Lower critic.lr, set critic.normalize_values=true, or give critic.warmup_steps",
            )

    def _gradient(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit, norm = self.settings.grad_norm, metrics.get("policy/grad_norm")
        earlier = [value for value in self._series.get("policy/grad_norm", []) if value > 0]
        if limit is None or norm is None or len(earlier) < WINDOW // 2:
            return
        if norm > max(limit * median(earlier), *self._first["policy/grad_norm"]):
            yield (
                "grad_norm",
                f"policy/grad_norm is {norm:.3g}, and {median(earlier):.3g} in the steps before"
                f" (alarms.grad_norm={limit:g}): one batch pulls far harder than the others."
                " trainer.max_grad_norm bounds it; look at this step's completions, and lower trainer.lr if it comes"
                " again",
            )

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
                yield (
                    f"constant_reward_{reward}",
                    f"reward.{reward} has given {value:g} to every completion of {seen}, so it teaches"
                    " nothing. Look at completions in rollouts/ and at what it reads (rlft plan tries it), or leave it"
                    " out",
                )
