"""The prompts that a person ranks, in their order, and the file of rankings, which `rlft rm` and `rlft dpo` read.

Keys of a row: ranker (who ranked), prompt_id, messages (the prompt), completions (in the order in which they were
shown), models (what sampled each), scores (0 for the worst; equal ones are tied) and skipped (all scores are 0 then).
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.data.fields import RowError
from rlft.data.files import parsed
from rlft.data.sampled import Sampled, check_prompt_ids, is_sampled, parse_sampled
from rlft.logger.text import visible
from rlft.runs.lines import DamagedLines, complete_lines, encode
from rlft.system.disk import blame_key, writing
from rlft.system.files import append, flush
from rlft.system.locks import Taken, take
from rlft.system.terminal import say
from rlft.types import IMAGE, require

Row = dict[str, Any]

MOST_ANSWERS = 9  # of a prompt: there are as many keys to choose them
BEGINNING = b'{"ranker": '  # of each row, by which one that a kill has cut is recognised


def questions_of(paths: Iterable[str], ranker: str, seed: int) -> list[Row]:
    """Rows without scores, for the prompts of these files of `rlft sample` that have at least two different answers.

    Seed and ranker give the order of rows and of answers, and which MOST_ANSWERS are shown of more. Raises UserError.
    """
    lines = [line for path in paths for _, line in parsed(path, "samples", None, _line)]
    check_prompt_ids([sampled.prompt for sampled, _ in lines], "samples")
    models: dict[str, dict[str, str]] = {}
    for sampled, model in lines:
        models.setdefault(sampled.prompt.id, {}).setdefault(sampled.completion, model)
    messages = {sampled.prompt.id: [dict(message) for message in sampled.prompt.messages] for sampled, _ in lines}
    found: list[tuple[float, Row]] = []
    for name, model_of in models.items():
        rng = random.Random(f"{seed} {ranker} {name}")
        place, texts = rng.random(), rng.sample(sorted(model_of), min(MOST_ANSWERS, len(model_of)))
        row: Row = {"ranker": ranker, "prompt_id": name, "messages": messages[name], "completions": texts}
        found += [(place, row | {"models": [model_of[text] for text in texts]})] if len(texts) > 1 else []
    remedy = "sample several completions of each prompt: rlft sample n=4"
    require(found, "samples", "no prompt has two different answers", got=", ".join(paths), remedy=remedy)
    return [row for _, row in sorted(found, key=lambda each: each[0])]


def _line(fields: Mapping[str, Any], row_id: str) -> list[tuple[Sampled, str]]:
    """(a line of `rlft sample`, the model that sampled it). Raises RowError."""
    if not is_sampled(fields):
        raise RowError("is no line of rlft sample", remedy="name a file that rlft sample has written")
    sampled = parse_sampled(fields, with_tokens=False)
    if any(IMAGE in message["content"] for message in sampled.prompt.messages):
        raise RowError("its prompt has an image, which is not in the file", remedy="sample prompts of text alone")
    return [(sampled, str(fields.get("model")))]


def read_rows(file: Path, key: str) -> list[tuple[int, Row]]:
    """(bytes up to its end, row) of each ranking, without a last one that a kill has cut. UserError: others are bad."""
    lost, keys = list[DamagedLines](), {"ranker", "prompt_id", "messages", "completions", "scores"}
    with file.open("rb") as lines:
        rows = [*complete_lines(lines, lost, lambda row: row.keys() >= keys)]
    remedy = "remove what is no ranking, or name another file"
    require(not lost, key, f"{', '.join(map(str, lost))}: no ranking of rlft rank", got=file, remedy=remedy)
    return rows


class Rankings:
    """The rankings in one person's file; each is on disk when `add` returns.

    Attributes:
        done: (where its row begins, in bytes, question) of each ranking.
        left: the questions without one; the last is the next.

    Raises UserError: the file is another person's or of other samples, or another process writes it.
    """

    def __init__(self, file: Path, questions: Sequence[Row]) -> None:
        self.file, self.done = file, list[tuple[int, Row]]()
        with blame_key("out"), writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open("ab", buffering=0)
            flush(file.parent)
        is_free = take(self._stream.fileno()) is not Taken.no
        require(is_free, "out", "another rlft rank writes it", got=file, remedy="end that one, or name another file")
        left, end = {question["prompt_id"]: question for question in questions}, 0
        for next_end, row in read_rows(file, "out"):
            question = left.pop(row["prompt_id"], {})
            is_ours = all(row[name] == question.get(name) for name in ("ranker", "messages"))
            problem = f"its ranking {len(self.done) + 1} is by another person or of other samples"
            require(is_ours, "out", problem, got=file, remedy="name another file, one for each person")
            self.done.append((end, question))
            end = next_end
        self.left = [*reversed(left.values())]
        if rest := file.read_bytes()[end:]:
            is_row = rest.startswith(BEGINNING[: len(rest)])
            require(is_row, "out", "is no file of rankings", got=file, remedy="name another file")
            self._cut(end)
            say(f"{file}: the last ranking was cut by a kill; its prompt is shown again")

    def add(self, scores: Sequence[int] | None) -> None:
        """Adds the scores of the next question's answers; None skips it. DiskError: the file is as it was."""
        skipped = [0] * len(self.left[-1]["completions"])
        row, begin = {**self.left[-1], "scores": scores or skipped, "skipped": scores is None}, self._size()
        append(self._stream, encode(row), durable=True)
        self.done.append((begin, self.left.pop()))

    def undo(self) -> None:
        """Removes the last ranking, whose question is the next one again."""
        self._cut(self.done[-1][0])
        self.left.append(self.done.pop()[1])

    def _size(self) -> int:
        """The bytes of the file that is written. DiskError: it is no longer that of this name."""
        written = os.fstat(self._stream.fileno())
        with writing(self.file):
            if not self.file.exists() or not os.path.samestat(written, self.file.stat()):
                raise FileNotFoundError(errno.ENOENT, "the file was moved or replaced meanwhile")
        return written.st_size

    def _cut(self, end: int) -> None:
        self._size()
        with writing(self.file):
            os.ftruncate(self._stream.fileno(), end)
            os.fsync(self._stream.fileno())

    def shown(self) -> dict[str, Any]:
        """What the page is told: how many are done, of how many, and the next question, without what sampled it."""
        question = self.left[-1] if self.left else {"messages": [], "completions": []}
        return {
            "done": len(self.done),
            "of": len(self.done) + len(self.left),
            "prompt": [{"role": message["role"], "text": _text(message)} for message in question["messages"]],
            "answers": [visible(text, joiners=False) for text in question["completions"]],
        }


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message, and its other fields, such as calls of tools, as JSON."""
    others = [f"{key}: {json.dumps(value)}" for key, value in message.items() if key not in ("role", "content")]
    return visible("\n".join([message["content"], *others]), joiners=False)
