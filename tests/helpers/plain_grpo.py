"""GRPO in plain Python, written from its formulas, whose steps are recorded as `rlft audit of=trl` reads them.

Each field of `Plain` is something that trainers get wrong: another value is a bug that is planted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from pathlib import Path
from statistics import mean
from typing import Any

PROMPT, WIDTH, GROUP, ROWS, WEIGHTS, LONGEST = 2, 12, 4, 12, (1.0, 0.5), 8
SETTINGS = {
    "reward_weights": list(WEIGHTS), "loss_type": "grpo", "beta": 0.1, "kl_estimator": "k3",
    "mask_truncated_completions": True, "max_completion_length": LONGEST,
}  # fmt: skip
Row = dict[str, Any]


def counts(row: Row, t: int) -> bool:
    """Whether a token counts: not in prompts, padding, tools' answers or truncated completions."""
    return is_completion(row, t) and row["tool_mask"][t] == 1 and not row["truncated"]


def is_completion(row: Row, t: int) -> bool:
    return PROMPT <= t < PROMPT + row["length"]


@dataclass(kw_only=True)
class Plain:
    """How it computes; the defaults are right with SETTINGS."""

    scale: str = "group"
    ddof: int = 1
    eps: float = 1e-4
    weights: Sequence[float] = WEIGHTS
    group_of: Callable[[int], int] = lambda i: i // GROUP
    advantage_of: Callable[[int], int] = lambda i: i
    sign: float = 1.0
    counts: Callable[[Row, int], bool] = counts
    writes_wrong_mask: bool = False
    aggregate: str = "grpo"
    level: str = "token"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    beta: float = 0.1
    kl: str = "k3"
    old_of: Callable[[int], int | None] = lambda i: i
    credited: Callable[[int], int] = lambda i: i
    averages: bool = True
    longest: int = LONGEST

    def advantages(self, rows: Sequence[Row]) -> list[float]:
        totals = [sum(w * r for w, r in zip(self.weights, row["rewards"].values(), strict=True)) for row in rows]
        found = []
        for i, total in enumerate(totals):
            group = [t for j, t in enumerate(totals) if self.group_of(j) == self.group_of(i)]
            spread = {"group": std(group, self.ddof), "batch": std(totals, self.ddof), "none": 1.0 - self.eps}
            found.append((total - mean(group)) / (spread[self.scale] + self.eps))
        return [self.sign * found[self.advantage_of(i) % len(rows)] for i in range(len(rows))]

    def terms(self, rows: Sequence[Row], i: int, logprobs: Sequence[float], advantage: float) -> dict[int, float]:
        """{place: the loss of the token there} of the tokens that count."""
        row, source = rows[i], self.old_of(i)
        old = logprobs if source is None else rows[source % len(rows)]["old_logprobs"]
        places = [t for t in range(WIDTH) if self.counts(row, t)]
        ratios = {t: exp(logprobs[t] - old[t]) for t in places}
        if self.level == "sequence" and places:
            ratios = dict.fromkeys(places, exp(mean(logprobs[t] - old[t] for t in places)))
        found = {}
        for t in places:
            clipped = min(max(ratios[t], 1 - self.low), 1 + self.high)
            ratio = ratios[t] if self.dual is None else min(ratios[t], self.dual)
            distance = logprobs[t] - row["ref_logprobs"][t]
            k3 = exp(-distance) - 1 + distance
            kl = {"k1": distance, "k2": distance**2 / 2, "k3": k3, "k3_unbiased": ratios[t] * k3}[self.kl]
            found[t] = -min(ratio * advantage, clipped * advantage) + self.beta * kl
        return found

    def loss(self, rows: Sequence[Row], batches: Sequence[Sequence[int]], logprobs: Sequence[Any]) -> float:
        total = 0.0
        tokens = sum(self.counts(row, t) for row in rows for t in range(WIDTH))
        for batch, values in zip(batches, logprobs, strict=True):
            advantages = [rows[batch[self.credited(k) % len(batch)]]["advantage"] for k in range(len(batch))]
            terms = [
                list(self.terms(rows, i, v, a).values()) for i, v, a in zip(batch, values, advantages, strict=True)
            ]
            of_all = sum(map(sum, terms))
            total += {
                "grpo": mean(sum(t) / max(len(t), 1) for t in terms),
                "bnpo": of_all / max(sum(map(len, terms)), 1),
                "dr_grpo": of_all / (len(batch) * self.longest),
                "luspo": of_all / len(batch),
                "dapo": of_all / (tokens * sum(map(len, batches)) / len(rows)),
            }[self.aggregate]
        return total / len(batches) if self.averages and self.aggregate != "dapo" else total

    def lines(self) -> list[Row]:
        """Settings, and two steps of three groups of four completions with two updates of two micro-batches each."""
        random_numbers = random.Random(3)
        found: list[Row] = [{"settings": SETTINGS}]
        for step in (1, 2):
            rows = [self.row(step, i, random_numbers) for i in range(ROWS)]
            for row, advantage in zip(rows, self.advantages(rows), strict=True):
                row["advantage"] = advantage
                row["mask"] = [int((self.counts if self.writes_wrong_mask else counts)(row, t)) for t in range(WIDTH)]
            found += rows
            order = random_numbers.sample(range(ROWS), ROWS)
            for half in (order[:6], order[6:]):
                batches = [half[:3], half[3:]]
                logprobs = [[moved(rows[i]["old_logprobs"], 0.3, random_numbers) for i in batch] for batch in batches]
                loss = self.loss(rows, batches, logprobs)
                found.append({"step": step, "loss": loss, "rows": batches, "logprobs": logprobs})
        return found

    def row(self, step: int, i: int, random_numbers: random.Random) -> Row:
        length = random_numbers.randint(3, LONGEST)
        old = [-3 * random_numbers.random() for _ in range(WIDTH)]
        return {
            "step": step,
            "group": f"{step}/{i // GROUP}",
            "rewards": {"right": float((i + step) % 3 > 0), "short": (i * i + 3 * step) % 5 / 4},
            "length": length,
            "truncated": i % 5 == 0,
            "prompt_entries": PROMPT,
            "tool_mask": [int(t != PROMPT + 1 or i % 3 > 0) for t in range(WIDTH)],
            "old_logprobs": old,
            "ref_logprobs": moved(old, 0.4, random_numbers),
        }


def std(values: Sequence[float], ddof: int) -> float:
    return sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - ddof))


def moved(values: Sequence[float], by: float, random_numbers: random.Random) -> list[float]:
    return [value + random_numbers.gauss(0, by) for value in values]


def written(file: Path, lines: Sequence[Row]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def in_a_row(of: Callable[[Row, int], bool]) -> Callable[[Row, int], bool]:
    """Counts these tokens as well, where the completion is not truncated."""
    return lambda row, t: counts(row, t) or (of(row, t) and row["tool_mask"][t] == 1 and not row["truncated"])


BUGS: dict[str, tuple[dict[str, Any], str]] = {
    # explanation: (what is computed in another way, the row that is wrong)
    "scale_rewards=batch": ({"scale": "batch"}, "advantages"),
    "scale_rewards=none": ({"scale": "none"}, "advantages"),
    "std=population": ({"ddof": 0}, "advantages"),
    "eps=1e-06": ({"eps": 1e-6}, "advantages"),
    "reward_weights=null": ({"weights": (1.0, 1.0)}, "advantages"),
    "groups that begin a row too early": ({"group_of": lambda i: (i + 1) % ROWS // GROUP}, "advantages"),
    "groups that begin a row too late": ({"group_of": lambda i: (i - 1) % ROWS // GROUP}, "advantages"),
    "groups of rows that do not stand together": ({"group_of": lambda i: i % 3}, "advantages"),
    "all rows of the step as one group": ({"group_of": lambda i: 0}, "advantages"),
    "num_generations=2": ({"group_of": lambda i: i // 2}, "advantages"),
    "advantages of the row before": ({"advantage_of": lambda i: i - 1}, "advantages"),
    "advantages of the row after": ({"advantage_of": lambda i: i + 1}, "advantages"),
    "advantages with the other sign": ({"sign": -1.0}, "advantages"),
    "mask_truncated_completions=false": (
        {"counts": lambda row, t: is_completion(row, t) and row["tool_mask"][t] == 1}, "masks"
    ),
    "padding counted": ({"counts": in_a_row(lambda row, t: t >= PROMPT + row["length"])}, "masks"),
    "prompt tokens counted": ({"counts": in_a_row(lambda row, t: t < PROMPT)}, "masks"),
    "tokens of tools counted": (
        {"counts": lambda row, t: is_completion(row, t) and not row["truncated"]}, "masks"
    ),
    "each completion's last token not counted": (
        {"counts": lambda row, t: counts(row, t) and is_completion(row, t + 1)}, "masks"
    ),
    "each completion's first token not counted": ({"counts": lambda row, t: counts(row, t) and t > PROMPT}, "masks"),
    "one token too many counted": (
        {"counts": in_a_row(lambda row, t: is_completion(row, t - 1) and not is_completion(row, t))}, "masks"
    ),
    "loss_type=bnpo": ({"aggregate": "bnpo"}, "losses"),
    "loss_type=dr_grpo": ({"aggregate": "dr_grpo"}, "losses"),
    "loss_type=luspo": ({"aggregate": "luspo"}, "losses"),
    "loss_type=dapo": ({"aggregate": "dapo"}, "losses"),
    "importance_sampling_level=sequence": ({"level": "sequence"}, "losses"),
    "epsilon=0.1 epsilon_high=null": ({"low": 0.1, "high": 0.1}, "losses"),
    "epsilon=0.2 epsilon_high=0.28": ({"high": 0.28}, "losses"),
    "ratios that are not clipped": ({"low": 1.0, "high": 1e9}, "losses"),
    "beta=0": ({"beta": 0.0}, "losses"),
    "kl_estimator=k1": ({"kl": "k1"}, "losses"),
    "kl_estimator=k2": ({"kl": "k2"}, "losses"),
    "kl_estimator=k3_unbiased": ({"kl": "k3_unbiased"}, "losses"),
    "old_logprobs that are those of the update": ({"old_of": lambda i: None}, "losses"),
    "old_logprobs of the row before": ({"old_of": lambda i: i - 1}, "losses"),
    "old_logprobs of the row after": ({"old_of": lambda i: i + 1}, "losses"),
    "advantages of the row before in the micro-batch": ({"credited": lambda k: k - 1}, "losses"),
    "advantages of the row after in the micro-batch": ({"credited": lambda k: k + 1}, "losses"),
    "divide_by_micro_batches=false": ({"averages": False}, "losses"),
}  # fmt: skip
