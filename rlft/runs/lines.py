"""The files of a run's steps: names and lines of metrics.jsonl, eval.jsonl, alarms.jsonl and rollouts/.

Such files are read here, too, damaged lines included.
"""

from __future__ import annotations

import json
import math
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rlft.system.disk import writing
from rlft.system.terminal import Say, say
from rlft.types import Branch, Completion, Evaluation, FinishReason, Group, Prompt, ToolCall, Turn, UserError

METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
ALARMS = "alarms.jsonl"
ROLLOUTS = "rollouts"

# Legal inside a JSON string, yet able to break lines or reorder text for whoever prints the file.
_INVISIBLE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_ROLLOUT_FILE = re.compile(r"step_(\d+)\.jsonl(\.tmp)?")
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')  # how a line begins; a damaged newline joins several lines into one
_NAME_AND_NUMBER_CHARACTERS = (string.ascii_letters + string.digits + "_/@.+-").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of a completion's tokens, log-probs and entropies in nats; None where the policy did not sample one."""

    text: Sequence[str]  # the text that the token adds
    old: Sequence[float | None]  # its log-prob by the policy that sampled it, as the trainer computes it
    after: Sequence[float | None]  # its log-prob by the policy after the update
    reference: Sequence[float | None]  # by the reference, or else the bare base; None for all tokens if neither is held
    entropy: Sequence[float | None]  # the entropy of the policy's distribution at this token after the update
    advantage: Sequence[float | None]  # the advantage that it was trained with


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What the loggers get of a finished step."""

    step: int  # the number of finished steps, from 1
    metrics: Mapping[str, float]
    groups: Sequence[Group] = ()  # the completions that were trained on
    # {reward: its unweighted scores, `[P, G]`}
    rewards: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    total_rewards: Sequence[Sequence[float]] = ()  # the weighted totals, `[P, G]`
    advantages: Sequence[Sequence[float]] = ()  # the mean advantage over each completion's tokens, `[P, G]`
    tokens: Mapping[int, TokenValues] = field(default_factory=dict)  # {row of the step's completions: its values}
    alarms: Mapping[str, str] = field(default_factory=dict)  # {name: text}


def alarm_lines(step: int, alarms: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"step": step, "name": name, "text": text} for name, text in alarms.items()]


def rollout_file(folder: Path, step: int) -> Path:
    return folder / ROLLOUTS / f"step_{step:06d}.jsonl"


def rollout_lines(record: StepRecord) -> Iterator[dict[str, Any]]:
    """A line for each completion of a step, group by group; `index` counts the siblings of a group from 0."""
    for p, group in enumerate(record.groups):
        for i, rollout in enumerate(group.rollouts):
            completion, row = rollout.completion, p * len(group.rollouts) + i
            yield {
                "step": record.step,
                "prompt_id": rollout.prompt.id,
                "index": i,
                "prompt": [dict(message) for message in rollout.prompt.messages],
                **image_fields(rollout.prompt),
                **({"tail": rollout.prompt.tail} if rollout.prompt.tail else {}),
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
                **({"tokens": token_fields(values)} if (values := record.tokens.get(row)) else {}),
            }


def conversation_fields(completion: Completion) -> dict[str, Any]:
    """{"mask": 1 for each sampled token, else 0, "turns": .., "branches": ..}, as far as the completion has them."""
    mask = {} if completion.mask is None else {"mask": [int(sampled) for sampled in completion.mask]}
    branches = {"branches": [asdict(branch) for branch in completion.branches]} if completion.branches else {}
    return {**mask, **turn_fields(completion), **branches}


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
    matches = [(path, _ROLLOUT_FILE.fullmatch(path.name)) for path in files]
    return sorted(((path, int(match[1])) for path, match in matches if match), key=lambda item: item[1])


def evaluation_line(evaluation: Evaluation) -> dict[str, Any]:
    """One line of eval.jsonl: the headline, the metrics by name, and examples with answer, score and turns."""
    scores = evaluation.example_scores or (None,) * len(evaluation.examples)
    examples = [
        {
            "prompt_id": rollout.prompt.id,
            "question": question_of(rollout.prompt),
            **image_fields(rollout.prompt),
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


def image_fields(prompt: Prompt) -> dict[str, Any]:
    """{"images": the digests of a prompt's images} if it has any; else empty."""
    return {"images": [image.digest for image in prompt.images]} if prompt.images else {}


def turn_fields(completion: Completion) -> dict[str, Any]:
    """{"turns": ..} of a completion that has turns; else empty."""
    return {"turns": [asdict(turn) for turn in completion.turns]} if completion.turns else {}


def question_of(prompt: Prompt) -> str:
    """The user's last message."""
    questions = [message["content"] for message in prompt.messages if message["role"] == "user"]
    return questions[-1] if questions else ""


def number(value: float) -> float | int | None:
    """The value as strict JSON can hold it: NaN and infinity become None."""
    if isinstance(value, int):
        return value
    as_float = float(value)
    return as_float if math.isfinite(as_float) else None


def numbers(metrics: Mapping[str, float]) -> dict[str, float | int | None]:
    """The metrics sorted by name, so that runs write the same bytes in whichever order they measure."""
    return {name: number(metrics[name]) for name in sorted(metrics)}


def encode(line: Mapping[str, Any]) -> bytes:
    """One line of strict JSON, as readable text; characters that break lines or hide text are escaped."""
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    text = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def silent(text: str) -> None:
    """Prints nothing: for a reader of a file about which another reader prints the same line."""


@dataclass(slots=True, kw_only=True)
class DamagedLines:
    """Damaged lines that follow each other, the numbers of the first and the last, from 1."""

    first: int
    last: int
    steps: list[int]  # the steps that can still be read in them
    after: int | None  # the step of the undamaged line before them; None if there is none
    before: int | None = None  # the step of the undamaged line after them; None if there is none

    def may_be_until(self, step: int) -> bool:
        """Whether a line of this step or an earlier one may be among them."""
        return min(self.steps) <= step if self.steps else self.after is None or self.after < step

    def __str__(self) -> str:
        """The numbers and steps of the lines, in words."""
        lines = f"line {self.first}" if self.first == self.last else f"lines {self.first} to {self.last}"
        return f"{lines} ({self._steps()})" if self._steps() else lines

    def _steps(self) -> str:
        number = self.last - self.first + 1
        steps = self.steps
        if not steps and self.after is not None and self.before is not None and self.before - self.after == number + 1:
            steps = list(range(self.after + 1, self.before))
        if steps:
            return f"step{'s' * (len(set(steps)) > 1)} {', '.join(map(str, dict.fromkeys(steps)))}"
        if self.after is not None and self.before is not None:
            return f"between steps {self.after} and {self.before}"
        if self.after is not None:
            return f"after step {self.after}"
        return "" if self.before is None else f"before step {self.before}"


def complete_lines(
    file: Iterable[bytes], lost: list[DamagedLines] | None = None, is_whole: Callable[[Any], bool] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(bytes up to the line's end, line) of each undamaged line; a last line without a newline is still being written.

    Damaged lines are added to `lost`; `is_whole` says whether a parsed line is one of such a file.
    """
    end, step, lost_lines = 0, None, None
    for number, raw in enumerate(file, start=1):
        end += len(raw)
        if not raw.endswith(b"\n"):
            return
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and (type(line.get("step")) is int if is_whole is None else is_whole(line)):
            step = line.get("step")
            if lost_lines is not None:
                lost_lines.before, lost_lines = step, None
            yield end, line
            continue
        steps = [int(digits) for digits in _STEP.findall(raw)]
        if lost_lines is None:
            lost_lines = DamagedLines(first=number, last=number, steps=steps, after=step)
            if lost is not None:
                lost.append(lost_lines)
        else:
            lost_lines.last = number
            lost_lines.steps += steps


def lost_text(path: Path, lost: Sequence[DamagedLines]) -> str:
    verb = "is" if len(lost) == 1 and lost[0].first == lost[0].last else "are"
    return f"{path}: {', '.join(map(str, lost))} {verb} damaged and left out"


def read_lines(path: Path, say: Say = say) -> list[dict[str, Any]]:
    """The undamaged lines of a JSONL file, without a torn last line; empty if there is no file.

    `say` is called with a line about damaged ones and their steps. Raises UserError: the file cannot be read.
    """
    try:
        return list(each_line(path, say=say))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problem, remedy = f"cannot be read ({error.strerror})", "make it a file that you may read, or remove it"
        raise UserError(path.name, problem, got=path, remedy=remedy) from None


def each_line(path: Path, is_whole: Callable[[Any], bool] | None = None, say: Say = say) -> Iterator[dict[str, Any]]:
    """Like `read_lines`, line by line, of a file that is there; `is_whole` is as in `complete_lines`."""
    lost: list[DamagedLines] = []
    with path.open("rb") as file:
        yield from (line for _, line in complete_lines(file, lost, is_whole))
    if lost:
        say(lost_text(path, lost))


def last_line(path: Path, say: Say = say) -> dict[str, Any]:
    """The last undamaged line of a JSONL file of numbers; {} if there is none. `say` and errors are as in `read_lines`.

    If every line has the quotes, colons, commas and braces of such a file, only the last one is parsed; checking for
    these takes a tenth of the time.
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
    """Whether a line has the punctuation of an object of named numbers that begins with its step, and no other.

    >>> holds_numbers(b'{"step": 1, "loss/total": -2.5e-3}\\n'), holds_numbers(b'{"step": 1, "loss 2.5}\\n')
    (True, False)
    """
    marks = line.translate(None, _NAME_AND_NUMBER_CHARACTERS)
    return line.startswith(b'{"step": ') and marks == b"{" + b", ".join([b'"": '] * marks.count(b":")) + b"}\n"


def open_after(path: Path, step: int, say: Say = say) -> BinaryIO:
    """The file opened to append, unbuffered, cut after the last undamaged line of this step or an earlier one.

    Damaged lines before that are left as they are. `say` is called with a line about damaged lines that may be of this
    step or an earlier one, kept or cut off.
    """
    keep = 0
    lost: list[DamagedLines] = []
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
    """A note that lines of the last steps up to this one are missing, for instance after a power cut; else None."""
    lines = read_lines(path, silent)
    last = lines[-1]["step"] if lines else 0
    if last >= step:
        return None
    steps = f"step {step}" if step == last + 1 else f"steps {last + 1} to {step}"
    return f"{path}: there is no line of {steps}"
