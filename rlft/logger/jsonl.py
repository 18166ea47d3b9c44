"""The numbers a run leaves behind: metrics.jsonl, eval.jsonl and alarms.jsonl; and how such files are read.

A resumed run leaves byte for byte the files of an uninterrupted one (times aside): what lies beyond the checkpoint,
also a line torn by a kill, is cut before anything is appended.
"""

from __future__ import annotations

import json
import math
import os
import re
import string
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlft.logger.lines import Lost, complete_lines, lost_text
from rlft.system.disk import writing
from rlft.system.files import append, flush
from rlft.system.terminal import Say
from rlft.types import Completion, Evaluation, Prompt, RunInfo, StepRecord, UserError

METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
ALARMS = "alarms.jsonl"

# Legal inside a JSON string, yet able to break lines or reorder text for whoever prints the file.
_INVISIBLE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_OF_NAMES_AND_NUMBERS = (string.ascii_letters + string.digits + "_/@.+-").encode()


@dataclass(kw_only=True)
class Jsonl:
    """Writes a line a step and a line an evaluation at once.

    Neither frozen nor slotted: it holds the open files, which are no keys.
    """

    writes_metrics = True

    def __post_init__(self) -> None:
        self.folder = Path()
        self.files: dict[str, BinaryIO] = {}
        self.evaluated = 0  # no line of eval.jsonl is of a later step

    def start(self, run: RunInfo) -> None:
        self.folder, self.evaluated = run.folder, run.step
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, EVALUATIONS, ALARMS):
            self.files[name] = open_after(self.folder / name, run.step)
        if missing := missing_at_the_end(self.folder / METRICS, run.step):
            told_on_stderr(missing)

    def stage(self, name: str) -> None:
        """What a checkpoint comes after is on disk before it: a power cut leaves no gap behind a resume."""
        if name == "checkpoint":
            for file in self.files.values():
                path = Path(file.name)
                with writing(path):
                    flush(path)

    def step(self, record: StepRecord) -> None:
        self._append_alarms(record.step, record.alarms)
        self._append(METRICS, {"step": record.step, **numbers(record.metrics)})

    def evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.step <= self.evaluated:
            # A run that starts again from this step evaluates again: the new line takes the old one's place.
            self.files[EVALUATIONS].close()
            self.files[EVALUATIONS] = open_after(self.folder / EVALUATIONS, evaluation.step - 1, silent)
        self.evaluated = evaluation.step
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
        append(self.files[name], encode(line))


def evaluation_line(evaluation: Evaluation) -> dict[str, Any]:
    """One line of eval.jsonl: the headline, the metrics by name, and examples with answer, score and turns."""
    scores = evaluation.example_scores or (None,) * len(evaluation.examples)
    examples = [
        {
            "prompt_id": rollout.prompt.id,
            "question": question_of(rollout.prompt),
            "answer": rollout.prompt.answer,
            "completion": rollout.completion.text,
            "score": None if score is None else number(score),
            "finish_reason": str(rollout.completion.finish_reason),
            **turn_fields(rollout.completion),
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


def turn_fields(completion: Completion) -> dict[str, Any]:
    """{"turns": ..}, where there are some."""
    return {"turns": [asdict(turn) for turn in completion.turns]} if completion.turns else {}


def question_of(prompt: Prompt) -> str:
    """What the user asked last."""
    questions = [message["content"] for message in prompt.messages if message["role"] == "user"]
    return questions[-1] if questions else ""


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


def told_on_stderr(text: str) -> None:
    """A line for whoever reads the files of a run."""
    print(text, file=sys.stderr, flush=True)


def silent(text: str) -> None:
    """For a reader beside another one that says the same."""


def read_lines(path: Path, say: Say = told_on_stderr) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file, none where there is no file; a torn last line is left out.

    say: is told which lines are damaged, and of which steps they were.

    Raises:
        UserError: what is in the file's place cannot be read.
    """
    lost: list[Lost] = []
    try:
        with path.open("rb") as file:
            lines = [line for _, line in complete_lines(file, lost)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problem, remedy = f"cannot be read ({error.strerror})", "make it a file that you may read, or remove it"
        raise UserError(path.name, problem, got=path, remedy=remedy) from None
    if lost:
        say(lost_text(path, lost))
    return lines


def last_line(path: Path, say: Say = told_on_stderr) -> dict[str, Any]:
    """The last whole line of a JSONL file of numbers, {} where there is none.

    say: is told which lines are damaged. Only the last line is read, and those whose quotes, colons, commas and braces
    are not those of such a file: looking at these takes a tenth of the time.

    Raises:
        UserError: what is in the file's place cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        lines = []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # it is still being written
    if lines and all(map(holds_numbers, lines)):
        with suppress(ValueError):
            return json.loads(lines[-1])
    return next(reversed(read_lines(path, say)), {})


def holds_numbers(line: bytes) -> bool:
    """Whether a line has the marks of an object of numbers by name that begins with its step, and no others.

    >>> holds_numbers(b'{"step": 1, "loss/total": -2.5e-3}\\n'), holds_numbers(b'{"step": 1, "loss 2.5}\\n')
    (True, False)
    """
    marks = line.translate(None, _OF_NAMES_AND_NUMBERS)
    return line.startswith(b'{"step": ') and marks == b"{" + b", ".join([b'"": '] * marks.count(b":")) + b"}\n"


def open_after(path: Path, step: int, say: Say = told_on_stderr) -> BinaryIO:
    """The file opened to append, unbuffered, cut after the last whole line of this step or an earlier one.

    Damaged lines before that are left as they are. say: is told of them, and of those that are cut away and may have
    been of this step or an earlier one.
    """
    keep = 0
    lost: list[Lost] = []
    if path.exists():
        with path.open("rb") as file:
            for end, line in complete_lines(file, lost):
                if line["step"] > step:
                    break
                keep = end
        lost = [part for part in lost if part.may_be_until(step)]
        if lost:
            say(lost_text(path, lost))
        os.truncate(path, keep)
    with writing(path):
        return path.open("ab", buffering=0)


def missing_at_the_end(path: Path, step: int) -> str | None:
    """That the lines of the last steps up to this one are not there, as a power cut may leave it; None if they are."""
    lines = read_lines(path, silent)
    last = lines[-1]["step"] if lines else 0
    if last >= step:
        return None
    steps = f"step {step}" if step == last + 1 else f"steps {last + 1} to {step}"
    return f"{path}: there is no line of {steps}"
