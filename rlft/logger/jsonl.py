"""The files a run leaves behind: metrics.jsonl, eval.jsonl, alarms.jsonl and rollouts/step_<n>.jsonl.

A resumed run leaves byte for byte the files of an uninterrupted one (times aside): what lies beyond the checkpoint,
also a line torn by a kill, is cut before anything is appended.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlft.fields import NonNegativeInt, PositiveInt
from rlft.types import Evaluation, Prompt, RunInfo, StepRecord, TokenValues, UserError

METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
ALARMS = "alarms.jsonl"
ROLLOUTS = "rollouts"

# Legal inside a JSON string, yet able to break lines or reorder text for whoever prints the file.
_INVISIBLE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_ROLLOUT_NAME = re.compile(r"step_(\d+)\.jsonl(\.tmp)?")


@dataclass(kw_only=True)
class Jsonl:
    """Writes a line a step and a line an evaluation at once, and a step's completions as one file, all or nothing.

    rollouts_every: steps between two rollout files, 0 for none. rollouts_max: newest files kept, None for all.
    Neither frozen nor slotted: it holds the open files, which are no keys.
    """

    rollouts_every: NonNegativeInt
    rollouts_max: PositiveInt | None

    def __post_init__(self) -> None:
        self.folder = Path()
        self.files: dict[str, BinaryIO] = {}

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, EVALUATIONS, ALARMS):
            self.files[name] = open_after(self.folder / name, run.step)
        for path, step in rollout_files(self.folder):
            if step > run.step or path.suffix == ".tmp":
                path.unlink()

    def stage(self, name: str) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        # Rollouts first: a line in metrics.jsonl promises that the step's completions are there.
        if record.groups and self.rollouts_every and record.step % self.rollouts_every == 0:
            self._write_rollouts(record)
        self._append_alarms(record.step, record.alarms)
        self._append(METRICS, {"step": record.step, **numbers(record.metrics)})

    def evaluation(self, evaluation: Evaluation) -> None:
        # A run that starts again from this step evaluates again: the new line takes the old one's place.
        self.files[EVALUATIONS].close()
        self.files[EVALUATIONS] = open_after(self.folder / EVALUATIONS, evaluation.step - 1)
        self._append_alarms(evaluation.step, evaluation.alarms)
        self._append(EVALUATIONS, evaluation_line(evaluation))

    def note(self, text: str) -> None:
        pass

    def finish(self, status: str) -> None:
        for file in self.files.values():
            file.close()
        self.files.clear()

    def _append_alarms(self, step: int, alarms: Mapping[str, str]) -> None:
        for name, text in alarms.items():
            self._append(ALARMS, {"step": step, "name": name, "text": text})

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        file = self.files[name]
        file.write(encode(line))
        file.flush()

    def _write_rollouts(self, record: StepRecord) -> None:
        path = self.folder / ROLLOUTS / f"step_{record.step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(b"".join(map(encode, rollout_lines(record))))
        temporary.replace(path)
        if self.rollouts_max is not None:
            for old, _ in rollout_files(self.folder)[: -self.rollouts_max]:
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
                **(
                    {"tokens": token_fields(values)}
                    if (values := record.tokens.get(p * len(group.rollouts) + i))
                    else {}
                ),
            }


def token_fields(values: TokenValues) -> dict[str, list[Any]]:
    """{"text": of each token, and its numbers by name}."""
    numbers_of = {name: [number(v) for v in own] for name, own in asdict(values).items() if name != "text"}
    return {"text": list(values.text), **numbers_of}


def evaluation_line(evaluation: Evaluation) -> dict[str, Any]:
    """One line of eval.jsonl: the headline, the metrics by name, and examples with question, answer and score."""
    scores = evaluation.example_scores or (None,) * len(evaluation.examples)
    examples = [
        {
            "prompt_id": rollout.prompt.id,
            "question": question_of(rollout.prompt),
            "answer": rollout.prompt.answer,
            "completion": rollout.completion.text,
            "score": None if score is None else number(score),
            "finish_reason": str(rollout.completion.finish_reason),
        }
        for rollout, score in zip(evaluation.examples, scores, strict=True)
    ]
    return {
        "step": evaluation.step,
        "accuracy": None if evaluation.accuracy is None else number(evaluation.accuracy),
        "accuracy_se": None if evaluation.accuracy_se is None else number(evaluation.accuracy_se),
        **numbers(evaluation.metrics),
        "examples": examples,
    }


def question_of(prompt: Prompt) -> str:
    """What the user asked last."""
    asked = [message["content"] for message in prompt.messages if message["role"] == "user"]
    return asked[-1] if asked else ""


def number(value: float) -> float | int | None:
    """The value as strict JSON knows it: NaN and infinity become None."""
    if isinstance(value, int):
        return value
    real = float(value)
    return real if math.isfinite(real) else None


def numbers(metrics: Mapping[str, float]) -> dict[str, float | int | None]:
    """The metrics in name order, so that two runs write the same bytes whatever order they measured in."""
    return {name: number(metrics[name]) for name in sorted(metrics)}


def encode(line: Mapping[str, Any]) -> bytes:
    """One line of strict JSON, readable text, with every character that breaks lines or hides text escaped."""
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    text = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file, none where there is no file; a torn last line is left out.

    Raises:
        UserError: what is in the file's place cannot be read.
    """
    try:
        with path.open("rb") as file:
            return [line for _, line in complete_lines(file)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problem, remedy = f"cannot be read ({error.strerror})", "make it a file that you may read, or remove it"
        raise UserError(path.name, problem, got=path, remedy=remedy) from None


def complete_lines(file: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(bytes up to the line's end, line), as far as the lines are whole: objects with a `step`."""
    end = 0
    for raw in file:
        end += len(raw)
        if not raw.endswith(b"\n"):
            return
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            return  # torn by a crash of the machine, say: what comes after it can't be trusted either
        yield end, line


def open_after(path: Path, step: int) -> BinaryIO:
    """The file opened to append, cut after the last whole line of this step or an earlier one."""
    keep = 0
    if path.exists():
        with path.open("rb") as file:
            for end, line in complete_lines(file):
                if line["step"] > step:
                    break
                keep = end
        os.truncate(path, keep)
    return path.open("ab")


def rollout_files(folder: Path) -> list[tuple[Path, int]]:
    """The run's rollout files with their steps, oldest first; also temporary ones that a kill left behind."""
    files = (path for path in (folder / ROLLOUTS).glob("step_*") if path.is_file())
    found = [(path, _ROLLOUT_NAME.fullmatch(path.name)) for path in files]
    return sorted(((path, int(match[1])) for path, match in found if match), key=lambda item: item[1])
