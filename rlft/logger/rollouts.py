"""The completions a run leaves behind: rollouts/step_<n>.jsonl, one file for each step that `rollouts` names.

A run writes them whatever its loggers are. A resumed run leaves the files of an uninterrupted one: those of steps
beyond the checkpoint are removed before it goes on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlft.keys.bounds import NonNegativeInt, PositiveInt
from rlft.logger.jsonl import encode, number, turn_fields
from rlft.system.disk import writing
from rlft.system.files import write_atomically
from rlft.types import Branch, Completion, Evaluation, FinishReason, RunInfo, StepRecord, TokenValues, ToolCall, Turn

ROLLOUTS = "rollouts"
_NAME = re.compile(r"step_(\d+)\.jsonl(\.tmp)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsConfig:
    """Which completions are written.

    every: steps between two files, 0 for none. keep: newest files that stay, None for all.
    """

    every: NonNegativeInt
    keep: PositiveInt | None

    def writes(self, step: int) -> bool:
        """Whether the completions of this step, counted from 1, are written."""
        return self.every > 0 and step % self.every == 0

    def most_files(self, num_steps: int) -> int:
        """Files that there are at a time in a run of this many steps; a new one is whole before the oldest goes."""
        written = num_steps // self.every if self.every else 0
        return written if self.keep is None else min(written, self.keep + 1)


class Rollouts:
    """Writes a step's completions as one file, all or nothing.

    It comes before the loggers of a run: a line in metrics.jsonl promises that the step's completions are there.
    """

    def __init__(self, config: RolloutsConfig) -> None:
        self.config = config
        self.folder = Path()

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        for path, step in rollout_files(self.folder):
            if step > run.step or path.suffix == ".tmp":
                path.unlink()

    def stage(self, name: str) -> None:
        pass

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

    def evaluation(self, evaluation: Evaluation) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, status: str) -> None:
        pass


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
    """{"mask": 1 for each token that was sampled, else 0, "turns": .., "branches": ..}, each where there is one."""
    fields: dict[str, Any] = {}
    if completion.mask is not None:
        fields["mask"] = [int(sampled) for sampled in completion.mask]
    fields |= turn_fields(completion)
    if completion.branches:
        fields["branches"] = [asdict(branch) for branch in completion.branches]
    return fields


def turn_of(fields: Mapping[str, Any]) -> Turn:
    """A turn of the fields that `asdict` made of it, for instance in a line of a rollout file."""
    return Turn(**{**fields, "calls": tuple(ToolCall(**call) for call in fields["calls"])})


def completion_of(line: Mapping[str, Any]) -> Completion:
    """The completion of a line of a rollout file. A log-prob that was not finite is NaN."""
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
    """{"text": of each token, and its numbers by name}."""
    numbers_of = {
        name: [v if v is None else number(v) for v in own] for name, own in asdict(values).items() if name != "text"
    }
    return {"text": list(values.text), **numbers_of}


def rollout_files(folder: Path) -> list[tuple[Path, int]]:
    """The run's rollout files with their steps, oldest first; also temporary ones that a kill left behind."""
    files = (path for path in (folder / ROLLOUTS).glob("step_*") if path.is_file())
    matches = [(path, _NAME.fullmatch(path.name)) for path in files]
    return sorted(((path, int(match[1])) for path, match in matches if match), key=lambda item: item[1])
