"""Compares the files of two runs bit for bit, by their documented formats.

JSON, JSON lines, YAML and CSV are compared field by field, safetensors files tensor by tensor, all others as bytes.
Numbers are equal when they are written the same: 0.0 and -0.0, 1 and 1.0 are not. What has to differ between two
commits, or between two runs of one commit, is left out; all of it is named here.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

# -- what must differ --------------------------------------------------------------------------------------------------
MEASURED = re.compile(r"(time|memory)/.+|seconds")
"""Fields of metrics.jsonl and sweep.csv that say how long something took and how much memory it held."""

IGNORED_FILES = {
    "MANIFEST",  # checksums of files that are compared themselves
    "chain.jsonl",  # also of config.yaml, with its commit
    "README.md",  # the GPU of an exported model, a text with its date
    "log.txt",  # what the commands have printed, with times
}
IGNORED_KEYS = re.compile(
    r"(.+\.)?_target_"  # of config.yaml: the address of a class, which moves with the code
    r"|origin\.(?!.*fingerprint).+"  # of config.yaml: versions and commit; fingerprints of data and base are compared
)
DATE = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
"""A time in the name of a file or folder."""

ABSENT = "nothing"
LONGEST = 60
"""Characters of a value that are shown."""
KINDS = ("metrics.jsonl", "eval.jsonl", "alarms.jsonl", ".jsonl", ".safetensors")
"""Of the differences of one step those of the first kind are shown first, other files last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one file of a run differs.

    run: of which comparison. step: None for a file that is of no step. field: the first one, or the first tensor, that
    differs. values: its two values in words. count: of fields or tensors that differ. largest: absolute difference over
    all of the file's numbers, None where none of them differ.
    """

    run: str
    file: str
    step: int | None
    field: str
    values: str
    count: int = 1
    largest: float | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        field = f", {self.field}" if self.field else ""
        more = f"; {self.count} of its fields differ" if self.count > 1 else ""
        largest = "" if self.largest is None else f"; largest absolute difference {self.largest:.3g}"
        return f"{self.run}: {self.file}{step}{field}: {self.values}{more}{largest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """files: how many were compared. differences: one a file at most, those of early steps first."""

    files: int
    differences: tuple[Difference, ...]


def compare_folders(run: str, a: Path, b: Path, paths_of_a: Paths, paths_of_b: Paths) -> Comparison:
    """Compares all files below two folders.

    paths_of_a, paths_of_b: {a path: what stands for it on both sides}; replaced in texts before these are compared.
    """
    files_a, files_b = files_below(a), files_below(b)
    differences = []
    for name in sorted({*files_a, *files_b}):
        if name not in files_a or name not in files_b:
            values = f"is only on side {'A' if name in files_a else 'B'}"
            differences.append(Difference(run=run, file=name, step=step_of_path(name), field="", values=values))
            continue
        found = compare_files(run, name, files_a[name], files_b[name], paths_of_a, paths_of_b)
        differences += [found] if found is not None else []
    return Comparison(files=len({*files_a, *files_b}), differences=tuple(sorted(differences, key=urgency)))


Paths = Mapping[str, str]


def files_below(folder: Path) -> dict[str, Path]:
    """{path below the folder, times in it replaced: file}."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name not in IGNORED_FILES)
    return {DATE.sub("<time>", f.relative_to(folder).as_posix()): f for f in files}


def urgency(difference: Difference) -> tuple[int, int, str]:
    kind = next((i for i, ending in enumerate(KINDS) if difference.file.endswith(ending)), len(KINDS))
    return difference.step or 0, kind, difference.file


def step_of_path(name: str) -> int | None:
    """The step in the name of a file or of a folder above it.

    >>> step_of_path("run/checkpoints/step_000003/policy/adapter_model.safetensors")
    3
    """
    steps = re.findall(r"step_(\d+)", name)
    return int(steps[-1]) if steps else None


def compare_files(run: str, name: str, a: Path, b: Path, paths_of_a: Paths, paths_of_b: Paths) -> Difference | None:
    """How two files of this name differ, None where they agree."""
    if a.read_bytes() == b.read_bytes():
        return None
    if a.suffix == ".safetensors":
        return compare_tensors(run, name, a, b)
    records_a, records_b = (read(f, paths) for f, paths in ((a, paths_of_a), (b, paths_of_b)))
    if records_a is None or records_b is None:
        return compare_bytes(run, name, a, b)
    return compare_records(run, name, records_a, records_b)


# -- texts -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of a file, or all of a file that is one value. step: that it is of. fields: {name: plain value}."""

    label: str
    step: int | None
    fields: dict[str, Any]


def read(file: Path, paths: Paths) -> list[Record] | None:
    """What the file says, without what must differ; None for one that is not JSON, JSON lines, YAML or CSV."""
    if file.suffix not in (".json", ".jsonl", ".yaml", ".csv"):
        return None
    text = file.read_text()
    match file.suffix:
        case ".json":
            values, labels = [json.loads(text)], [""]
        case ".yaml":
            values, labels = [yaml.safe_load(text)], [""]
        case ".jsonl":
            values = [json.loads(line) for line in text.splitlines()]
            labels = [f"line {i}: " for i in range(1, len(values) + 1)]
        case _:
            values = list(csv.DictReader(text.splitlines()))
            labels = [f"row {i}: " for i in range(1, len(values) + 1)]
    return [
        Record(label=label, step=step_in(value, file), fields=dict(fields_of(value, paths)))
        for label, value in zip(labels, values, strict=True)
    ]


def step_in(value: Any, file: Path) -> int | None:
    step = value.get("step") if isinstance(value, dict) else None
    return step if isinstance(step, int) else step_of_path(file.as_posix())


def fields_of(value: Any, paths: Paths, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, plain value) of everything inside, in the order of the file; `logprobs[3]`, `rewards.format`."""
    if MEASURED.fullmatch(name) or IGNORED_KEYS.fullmatch(name):
        return
    if isinstance(value, dict):
        yield f"{name}{{}}", len(value) == 0
        for key, inner in value.items():
            yield from fields_of(inner, paths, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        yield f"{name}[]", len(value) == 0
        for i, inner in enumerate(value):
            yield from fields_of(inner, paths, f"{name}[{i}]")
    elif isinstance(value, str):
        for path in sorted(paths, key=len, reverse=True):
            value = value.replace(path, paths[path])
        yield name, DATE.sub("<time>", value)
    else:
        yield name, value


def compare_records(run: str, name: str, a: list[Record], b: list[Record]) -> Difference | None:
    first, count, largest = None, 0, None
    for of_a, of_b in zip_longest(a, b):
        record = of_a or of_b
        fields_a, fields_b = (r.fields if r is not None else {} for r in (of_a, of_b))
        for field in [*fields_a, *(f for f in fields_b if f not in fields_a)]:
            value_a, value_b = fields_a.get(field, ABSENT), fields_b.get(field, ABSENT)
            if repr(value_a) == repr(value_b):
                continue
            count += 1
            largest = larger(largest, distance(value_a, value_b))
            first = first or (record.step, record.label + field, in_words(value_a, value_b))
    if first is None:
        return None
    step, field, values = first
    return Difference(run=run, file=name, step=step, field=field, values=values, count=count, largest=largest)


def distance(a: Any, b: Any) -> float | None:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return abs(a - b) if numbers else None


def larger(a: float | None, b: float | None) -> float | None:
    known = [x for x in (a, b) if x is not None]
    return next((x for x in known if math.isnan(x)), max(known, default=None))


def in_words(a: Any, b: Any) -> str:
    """The two values; of long texts what surrounds the first character that differs."""
    start = 0
    if isinstance(a, str) and isinstance(b, str):
        start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        start = max(0, start - LONGEST // 2)
        a, b = a[start:], b[start:]
    place = f" (from character {start})" if start else ""
    return f"{shortened(repr(a))} against {shortened(repr(b))}{place}"


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}.."


# -- tensors and bytes -------------------------------------------------------------------------------------------------
def tensors_of(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """{name: (dtype, shape, bytes)} of a safetensors file; its metadata as one more entry."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = json.dumps(header.pop("__metadata__", {}), sort_keys=True).encode()
    found = {
        name: (entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
        for name, entry in sorted(header.items())
        for begin, end in [entry["data_offsets"]]
    }
    return {**found, "__metadata__": ("text", (), metadata)}


def compare_tensors(run: str, name: str, a: Path, b: Path) -> Difference | None:
    all_a, all_b = tensors_of(a), tensors_of(b)
    names = [n for n in sorted({*all_a, *all_b}) if all_a.get(n) != all_b.get(n)]
    if not names:
        return None
    first = names[0]
    of_a, of_b = (f"{x[0]} of {list(x[1])}" if x is not None else ABSENT for x in (all_a.get(first), all_b.get(first)))
    values = f"{of_a} against {of_b}" if of_a != of_b else f"{of_a} with other bits"
    largest = largest_distance(a, b, names)
    return Difference(
        run=run, file=name, step=step_of_path(name), field=first, values=values, count=len(names), largest=largest
    )


def largest_distance(a: Path, b: Path, names: Iterable[str]) -> float | None:
    """Over those of the tensors that both files have, in one shape; None if there is none."""
    from safetensors.torch import load_file

    all_a, all_b = load_file(a), load_file(b)
    largest = None
    for name in names:
        if name in all_a and name in all_b and all_a[name].shape == all_b[name].shape and all_a[name].numel():
            largest = larger(largest, (all_a[name].double() - all_b[name].double()).abs().max().item())
    return largest


def compare_bytes(run: str, name: str, a: Path, b: Path) -> Difference:
    bytes_a, bytes_b = a.read_bytes(), b.read_bytes()
    pairs = zip(bytes_a, bytes_b, strict=False)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(bytes_a), len(bytes_b)))
    values = in_words(bytes_a[at : at + LONGEST], bytes_b[at : at + LONGEST])
    return Difference(run=run, file=name, step=step_of_path(name), field=f"byte {at}", values=values)
