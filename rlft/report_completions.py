"""The completions that a report shows: whole groups of a few steps, within a number of bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft.logger.jsonl import EVALUATIONS, complete_lines, read_lines, rollout_files
from rlft.logger.text import visible

MAX_STEPS = 40
MAX_GROUPS_PER_STEP = 16
MAX_RECURRING = 8
MAX_EVALUATIONS = 20
MAX_SEARCHED = 200  # steps that are searched for prompts that come again
MAX_TEXT = 20_000
"""Characters of a prompt or completion; what is cut is said."""

DIGITS = 3
TRAINED, HELD_OUT = "trained on", "held out"
_PROMPT_ID = re.compile(rb'^\{"step": \d+, "prompt_id": ("(?:[^"\\]|\\.)*"), "index": 0,', re.MULTILINE)

Group = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Groups, as the page's script reads them, and of how many steps and completions on disk they are."""

    groups: Sequence[Group]
    steps: int
    steps_on_disk: int
    completions: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def choose(folder: Path, max_bytes: int) -> Shown:
    """Of a run, at most about `max_bytes` of JSON.

    The held-out examples of evaluations, then groups of steps that lie evenly, those with values of single tokens and
    of prompts that come again first.
    """
    files = {step: path for path, step in rollout_files(folder) if path.suffix == ".jsonl"}
    found = [*fitting(held_out_groups(read_lines(folder / EVALUATIONS)), max_bytes // 2)]
    recurring = recurring_prompts(files)
    wanted = in_halves(sorted(files)) if len(files) <= MAX_STEPS else in_halves(spread(sorted(files), MAX_STEPS))
    steps = dict.fromkeys([*wanted, *(step for both in recurring.values() for step in both)])

    def candidates() -> Iterator[Group]:
        for step in steps:
            only = None if step in wanted else {name for name, both in recurring.items() if step in both}
            yield from groups_of(files[step], step, set(recurring), only)

    found += fitting(candidates(), max_bytes - sum(map(_size, found)))
    found.sort(key=lambda group: (group["kind"] != TRAINED, group["step"]))
    trained = [group for group in found if group["kind"] == TRAINED]
    return Shown(
        groups=found,
        steps=len({group["step"] for group in trained}),
        steps_on_disk=len(files),
        completions=sum(len(group["rows"]) for group in trained),
    )


def fitting(groups: Iterable[Group], max_bytes: int) -> Iterator[Group]:
    """Those that there is room for, in turn; one that is too large is tried without its tokens' values."""
    left = max_bytes
    for group in groups:
        for shape in (group, without_tokens(group)):
            if (size := _size(shape)) <= left:
                left -= size
                yield shape
                break


def without_tokens(group: Group) -> Group:
    return group | {"rows": [{name: v for name, v in row.items() if name != "tokens"} for row in group["rows"]]}


def spread(steps: Sequence[int], number: int) -> list[int]:
    """That many of the steps, evenly, the first and the last among them.

    >>> spread([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    [1, 5, 9]
    """
    return [steps[round(i * (len(steps) - 1) / (number - 1))] for i in range(number)]


def in_halves(steps: Sequence[int]) -> list[int]:
    """The same steps in an order in which any first few of them lie evenly.

    >>> in_halves([1, 2, 3, 4, 5])
    [1, 5, 3, 2, 4]
    """
    if len(steps) < 3:
        return list(steps)
    found, gaps = [steps[0], steps[-1]], [(0, len(steps) - 1)]
    while gaps:
        first, last = gaps.pop(0)
        if last - first < 2:
            continue
        middle = (first + last) // 2
        found.append(steps[middle])
        gaps += [(first, middle), (middle, last)]
    return found


def recurring_prompts(files: Mapping[int, Path]) -> dict[str, tuple[int, int]]:
    """{prompt: the first and the last step it is in} of a few prompts of the first step that come again."""
    steps = sorted(files)
    if len(steps) < 2:
        return {}
    wanted = set(_prompt_ids(files[steps[0]]))
    found: dict[str, tuple[int, int]] = {}
    later = steps[1:] if len(steps) <= MAX_SEARCHED else spread(steps, MAX_SEARCHED)[1:]
    for step in reversed(later):
        for name in wanted.intersection(_prompt_ids(files[step])) - found.keys():
            found[name] = (steps[0], step)
        if len(found) >= min(len(wanted), MAX_RECURRING):
            break
    return dict(sorted(found.items())[:MAX_RECURRING])


def _prompt_ids(file: Path) -> Iterator[str]:
    """Of every group; without reading its completions as JSON, as a long run has gigabytes of them."""
    for name in _PROMPT_ID.findall(_content(file)):
        with suppress(ValueError):  # of a damaged file
            yield json.loads(name)


def _content(file: Path) -> bytes:
    """Nothing of a file that a run which is going on has just replaced by a newer step's, or that cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def groups_of(file: Path, step: int, first: set[str], only: set[str] | None) -> list[Group]:
    """The step's groups: those with tokens' values, then those of `first` prompts, then others; `only`: of these."""
    found: list[tuple[str, Group]] = []  # by the prompt's id as it is, which may have signs that are not shown
    for _, line in complete_lines(_content(file).splitlines(keepends=True)):
        try:
            if line["index"] == 0:
                found.append((line["prompt_id"], {"kind": TRAINED, "step": step, **_prompt_of(line), "rows": []}))
            found[-1][1]["rows"].append(trained_row(line))
        except (KeyError, IndexError, TypeError, AttributeError):  # a damaged file: what came before is shown
            break
    if only is not None:
        return [group for name, group in found if name in only]

    def turn(item: tuple[str, Group]) -> int:
        return 0 if any("tokens" in row for row in item[1]["rows"]) else 1 if item[0] in first else 2

    return [group for _, group in sorted(found, key=turn)[:MAX_GROUPS_PER_STEP]]


def _prompt_of(line: Mapping[str, Any]) -> dict[str, Any]:
    messages = [{"role": safe(str(m["role"])), **shortened(str(m["content"]))} for m in line["prompt"]]
    return {"id": safe(line["prompt_id"]), "prompt": messages, "answer": shortened(str(line["answer"]))}


def trained_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """A completion of a rollout file; values of tokens are rounded, and left out where the text is cut."""
    row = {
        **shortened(line["completion"]),
        "reward": line["reward"],
        "rewards": {safe(name): value for name, value in line["rewards"].items()},
        "advantage": line["advantage"],
        "finish": line["finish_reason"],
        "version": line["policy_version"],
        "length": len(line["token_ids"]),
    }
    values = line.get("tokens")
    if values is not None and "cut" not in row:
        numbers = {name: _rounded(values[name]) for name in values if name != "text"}
        row["tokens"] = {
            "text": [safe(text) for text in values["text"]],
            **numbers,
            "sampled": _rounded(line["logprobs"]),
        }
    return row


def held_out_groups(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """A group of one for each example of the evaluations, at most 20 of them."""
    if len(evaluations) > MAX_EVALUATIONS:
        evaluations = [evaluations[i] for i in spread(range(len(evaluations)), MAX_EVALUATIONS)]
    for line in evaluations:
        for example in line.get("examples", ()):
            yield {
                "kind": HELD_OUT,
                "step": line["step"],
                "id": safe(example["prompt_id"]),
                "prompt": [{"role": "user", **shortened(example["question"])}],
                "answer": shortened(str(example["answer"])),
                "rows": [
                    {
                        **shortened(example["completion"]),
                        "reward": example["score"],
                        "rewards": {},
                        "finish": example["finish_reason"],
                    }
                ],
            }


def safe(text: str) -> str:
    """The text with nothing in it that a reader could not see."""
    return visible(text, joiners=False)


def shortened(text: str) -> dict[str, Any]:
    """{"text"} and, where it was cut, {"cut": how many characters it had}."""
    return {"text": safe(text)} if len(text) <= MAX_TEXT else {"text": safe(text[:MAX_TEXT]), "cut": len(text)}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]


def _size(value: Group) -> int:
    return len(json.dumps(value, ensure_ascii=False))
