"""Writes a run's completions to rollouts/step_<n>.jsonl, one file for each step that the `rollouts` section chooses.

A run writes them whichever loggers it has. A resumed run leaves the same files as an uninterrupted one: those of steps
beyond the checkpoint are removed before it continues.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlft.config.schema import RolloutsConfig
from rlft.logger.jsonl import encode, number, turn_fields
from rlft.system.disk import writing
from rlft.system.files import write_atomically
from rlft.types import Branch, Completion, FinishReason, Logger, RunInfo, StepRecord, TokenValues, ToolCall, Turn

ROLLOUTS = "rollouts"
_NAME = re.compile(r"step_(\d+)\.jsonl(\.tmp)?")


class Rollouts(Logger):
    """Writes a step's completions as one file, completely or not at all.

    It comes before the other loggers of a run: a line in metrics.jsonl promises that the step's completions exist.
    """

    def __init__(self, config: RolloutsConfig) -> None:
        self.config = config
        self.folder = Path()

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        for path, step in rollout_files(self.folder):
            if step > run.step or path.suffix == ".tmp":
                path.unlink()

    def step(self, record: StepRecord) -> None:
        if not record.groups or not self.config.writes(record.step):
            return
        path = self.folder / ROLLOUTS / f"step_{record.step:06d}.jsonl"
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        content = map(encode, rollout_lines(record))
        write_atomically(path, content, temporary=path.with_name(path.name + ".tmp"), durable=False)
        if self.config.keep is not None:
            for old, _ in rollout_files(self.folder)[: -self.config.keep]:
                old.unlink()


def rollout_lines(record: StepRecord) -> Iterator[dict[str, Any]]:
    """A line for each completion of a step, group by group; `index` counts the siblings of a group from 0."""
    for p, group in enumerate(record.groups):
        for i, rollout in enumerate(group.rollouts):
            completion = rollout.completion
            yield {
                "step": record.step,
                "prompt_id": rollout.prompt.id,
                "index": i,
                "prompt": [dict(message) for message in rollout.prompt.messages],
                "answer": rollout.prompt.answer,
                "completion": completion.text,
                "token_ids": [int(token) for token in completion.token_ids],
                "logprobs": [number(logprob) for logprob in completion.logprobs],
                "rewards": {name: number(values[p][i]) for name, values in sorted(record.rewards.items())},
                "reward": number(record.total_rewards[p][i]),
                "advantage": number(record.advantages[p][i]),
                "policy_version": rollout.policy_version,
                "finish_reason": str(completion.finish_reason),
                **conversation_fields(completion),
                **(
                    {"tokens": token_fields(values)}
                    if (values := record.tokens.get(p * len(group.rollouts) + i))
                    else {}
                ),
            }


def conversation_fields(completion: Completion) -> dict[str, Any]:
    """{"mask": 1 for each sampled token, else 0, "turns": .., "branches": ..}, as far as the completion has them."""
    fields: dict[str, Any] = {}
    if completion.mask is not None:
        fields["mask"] = [int(sampled) for sampled in completion.mask]
    fields |= turn_fields(completion)
    if completion.branches:
        fields["branches"] = [asdict(branch) for branch in completion.branches]
    return fields


def turn_of(fields: Mapping[str, Any]) -> Turn:
    """The turn from which `asdict` made these fields, for instance in a line of a rollout file."""
    return Turn(**{**fields, "calls": tuple(ToolCall(**call) for call in fields["calls"])})


def completion_of(line: Mapping[str, Any]) -> Completion:
    """The completion in a line of a rollout file. A log-prob that was not finite becomes NaN."""
    return Completion(
        text=line["completion"],
        token_ids=tuple(line["token_ids"]),
        logprobs=tuple(math.nan if value is None else value for value in line["logprobs"]),
        finish_reason=FinishReason(line["finish_reason"]),
        mask=tuple(map(bool, line["mask"])) if "mask" in line else None,
        turns=tuple(map(turn_of, line.get("turns", ()))),
        branches=tuple(Branch(**branch) for branch in line.get("branches", ())),
    )


def token_fields(values: TokenValues) -> dict[str, list[Any]]:
    """{"text": each token's text, name: each token's number, ..}."""
    by_name = {name: column for name, column in asdict(values).items() if name != "text"}
    numbers_by_name = {name: [v if v is None else number(v) for v in column] for name, column in by_name.items()}
    return {"text": list(values.text), **numbers_by_name}


def rollout_files(folder: Path) -> list[tuple[Path, int]]:
    """The run's rollout files with their steps, oldest first, including temporary ones that a kill has left behind."""
    files = (path for path in (folder / ROLLOUTS).glob("step_*") if path.is_file())
    matches = [(path, _NAME.fullmatch(path.name)) for path in files]
    return sorted(((path, int(match[1])) for path, match in matches if match), key=lambda item: item[1])
