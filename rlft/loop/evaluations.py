"""The metrics of evaluations: one table for what computes, prints, compares and explains them.

A row with `of_prompt` is computed from the samples of each prompt; it is their mean over prompts. What counts all
completions, texts or rankings at once is computed where they are (`loop/metrics.py`, the tasks). Metrics of turns have
the names that they have in training, after `eval/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlft.algorithm.ops.aggregate import majority, pass_at, pass_sizes
from rlft.reward.workers.reward_spec import says

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of evaluations."""

    name: str  # its name in eval.jsonl; <k> stands for a number of samples, <name> for a reward
    when: Callable[[Config], Any]  # whether evaluations of a run with this plain config have it
    has_error: bool = False  # whether `<its name>_se` is its standard error, over prompts or rankings
    label: str = ""  # how `rlft eval` calls it; "": by its name without eval/
    is_compared: bool = True  # whether a study can compare trials by it
    # Its value for a prompt at this k, by which of the prompt's samples are right, and their answers.
    of_prompt: Callable[[int, Sequence[bool], Sequence[str | None]], float] | None = None
    of_answers: bool = False  # whether there is one only where the first reward reads answers
    # The values of <k>, by the number of samples of a prompt.
    sizes: Callable[[int], Sequence[int]] = lambda num_samples: [num_samples]


def _samples(config: Config) -> bool:
    return config["command"] == "train" or (config["command"] == "sft" and bool(config.get("data")))


def _reads_answers(config: Config) -> bool:
    first = next(iter((config.get("reward") or {}).values()), None)
    return _samples(config) and first is not None and says(first["_target_"], "reads_answers")


def _of(*commands: str) -> Callable[[Config], bool]:
    return lambda config: config["command"] in commands


METRICS = (
    Metric(name="accuracy", when=lambda config: _samples(config) or _of("rm", "dpo")(config), has_error=True),
    Metric(
        name="eval/<name>",
        when=_samples,
        has_error=True,
        label="mean@<k> (<name>)",
        is_compared=False,  # it is the accuracy
        of_prompt=lambda k, right, answers: sum(right) / k,
    ),
    Metric(
        name="eval/pass@<k>",
        when=_samples,
        has_error=True,
        of_prompt=lambda k, right, answers: pass_at(k, len(right), sum(right)),
        sizes=pass_sizes,
    ),
    Metric(
        name="eval/maj@<k>",
        when=_reads_answers,
        has_error=True,
        of_prompt=lambda k, right, answers: majority(answers, right),
        of_answers=True,
        sizes=lambda num_samples: [num_samples] if num_samples > 1 else [],
    ),
    Metric(name="eval/loss", when=_of("sft", "rm", "dpo")),
    Metric(name="eval/pairs", when=_of("rm", "dpo"), has_error=True, is_compared=False),  # it is the accuracy
    Metric(name="eval/margin", when=_of("dpo")),
    Metric(name="eval/chosen_logprob", when=_of("dpo")),
    *(
        Metric(name=f"eval/{name}", when=_of("dpo"), is_compared=False)
        for name in ("rejected_logprob", "chosen_reward", "rejected_reward", "loss/preference", "loss/sft")
    ),
    Metric(name="eval/score_best", when=_of("rm"), is_compared=False),
    Metric(name="eval/score_worst", when=_of("rm"), is_compared=False),
    Metric(name="eval/reward/<name>", when=_samples),
    Metric(name="eval/length/mean", when=_samples, is_compared=False),
    Metric(name="eval/length/truncated_fraction", when=_samples, is_compared=False),
    Metric(name="eval/kl_base", when=lambda config: _samples(config) and config["eval"].get("kl_base")),
    Metric(name="eval/pretrain_loss", when=lambda config: (config.get("pretrain") or {}).get("path")),
)


def filled(text: str, k: object, name: str) -> str:
    return text.replace("<k>", str(k)).replace("<name>", name)


def compared(config: Config) -> list[str]:
    """The names of the metrics by which a study can compare runs with this plain config."""
    num_samples = config["eval"].get("num_samples", 1)
    found = [
        filled(metric.name, k, reward)
        for metric in METRICS
        if metric.is_compared and metric.when(config)
        for k in metric.sizes(num_samples)
        for reward in (config.get("reward") or () if "<name>" in metric.name else ("",))
    ]
    return list(dict.fromkeys(found))


def metric_of(name: str) -> Metric | None:
    """The row of this name in eval.jsonl, the most specific one; None if there is none."""
    rows = [m for m in METRICS if re.fullmatch(filled(re.escape(m.name), r"\d+", "[^/]+"), name)]
    return max(rows, key=lambda metric: len(filled(metric.name, "", "")), default=None)


def label_of(name: str, num_samples: int) -> str:
    """How `rlft eval` calls the metric of this name in eval.jsonl."""
    metric, short = metric_of(name), name.removeprefix("eval/")
    return filled(metric.label, num_samples, short) if metric is not None and metric.label else short
