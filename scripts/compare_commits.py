"""Whether two commits compute the same, bit for bit: short seeded runs of both on this machine, file by file.

    python scripts/compare_commits.py HEAD~1 HEAD                 # every case: algorithms, commands and kinds of roles
    python scripts/compare_commits.py main WORKTREE --only grpo,ppo   # what is not committed yet (`.` says the same)
    python scripts/compare_commits.py A B --keep runs/compared    # keep the runs, in A/<case> and B/<case>
    python scripts/compare_commits.py --list

For changes that must not move a number, such as moved modules. Bits depend on the processor and on the libraries, so no
file of expected numbers holds anywhere else; two commits on one machine do. Each is checked out into a temporary
folder, and its `rlft` is run from there, in this environment, on the CPU with one thread. Metrics, evaluations,
rollouts with their log-probs, samples, adapters, heads, optimizer, states, exported models and configs are compared.
Times, memory, dates, paths, versions and the commit may differ: MEASURED and IGNORED_* name what is left out.

JSON, JSON lines, YAML and CSV are compared field by field, safetensors files tensor by tensor, all others as bytes.
Numbers are equal when they are written the same: 0.0 and -0.0, 1 and 1.0 are not.

Exit codes: 0 both sides agree, 1 they differ or a run failed, 2 a mistake the user can fix, 130 stopped.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from comparison_cases import CASES, Case

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


ROOT = Path(__file__).resolve().parents[1]
FORKS = Path(__file__).resolve().with_name("rlft_forks.py")
WORKTREE = ("WORKTREE", ".")
LIBRARIES = (
    "hydra", "omegaconf", "pydantic.type_adapter", "rich.console", "torch", "peft", "safetensors.torch",
    "transformers.generation", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip
"""What the runs import of other packages: once a side instead of once a command."""
LIMIT_S = 300.0
"""A command that takes longer is ended, and the comparison with it."""
SHOWN = 5
"""Differences of a case that are printed."""
LOG = "log.txt"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "CUDA_VISIBLE_DEVICES": "",
}


class Mistake(Exception):
    """What the user can fix."""


class Failure(Exception):
    """A side that cannot run."""


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # they clean up as Ctrl-C does
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    options = parse(arguments)
    if options.list:
        print("\n".join(case.name for case in CASES))
        return 0
    try:
        cases = chosen(options.only)
        return 0 if compare(ROOT, (options.a, options.b), cases, options.keep, LIBRARIES, say=print_now) else 1
    except Mistake as mistake:
        print(f"compare_commits: {mistake}", file=sys.stderr)
        return 2
    except Failure as failure:
        print(f"compare_commits: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_commits.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A", nargs="?", default="HEAD", help="a commit (default: HEAD)")
    parser.add_argument(
        "b", metavar="B", nargs="?", default=WORKTREE[0], help="another; WORKTREE: the files as they are"
    )
    parser.add_argument("--only", metavar="CASE,..", help="these cases")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder, where the runs stay")
    return parser.parse_args(arguments)


def chosen(only: str | None) -> list[Case]:
    """The cases of these names, in the order of CASES.

    Raises:
        Mistake: there is no case of a name.
    """
    names = [case.name for case in CASES]
    wanted = names if only is None else only.split(",")
    for name in wanted:
        if name not in names:
            raise Mistake(f"--only: there is no such case, got {name}; use some of {','.join(names)}")
    return [case for case in CASES if case.name in wanted]


def compare(
    repository: Path,
    commits: tuple[str, str],
    cases: Sequence[Case],
    keep: Path | None,
    libraries: Sequence[str],
    say: Callable[[str], None],
) -> bool:
    """Whether the two commits agree in all cases.

    libraries: modules that are imported once a side. say: is given a line a case, and one a difference.

    Raises:
        Mistake: there is no such commit, or the folder to keep the runs in is not new.
        Failure: a side cannot start, or a command hangs.
    """
    if keep is not None and keep.exists():
        raise Mistake(f"--keep: is there already, got {keep}; name a new folder")
    started, num_different = time.monotonic(), 0
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlft_compare_"))).resolve()
        runs = temporary if keep is None else keep.resolve()
        checkouts = []
        for letter, commit in zip("AB", commits, strict=True):
            checkouts.append(stack.enter_context(checkout(repository, commit, temporary / f"code_{letter}")))
            say(f"{letter}: {commit} is {checkouts[-1][1]}")
        sides = [Side(code, runs / letter, stack, libraries) for letter, (code, _) in zip("AB", checkouts, strict=True)]
        for case in cases:
            num_different += not agrees(case, sides, say)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    say(f"{len(cases) - num_different} of {len(cases)} cases agree, {minutes}:{seconds:02} minutes")
    return num_different == 0


def agrees(case: Case, sides: Sequence[Side], say: Callable[[str], None]) -> bool:
    """Runs a case on one side, then on the other, and says in which files they differ."""
    seconds, failures = [], []
    for letter, side in zip("AB", sides, strict=True):
        begun = time.monotonic()
        failure = side.run(case)
        seconds.append(f"{letter} {time.monotonic() - begun:.1f} s")
        failures += [f"  {case.name}, side {letter}: {failure}"] if failure is not None else []
    a, b = sides
    found = compare_folders(case.name, a.folder(case), b.folder(case), a.paths(a.folder(case)), b.paths(b.folder(case)))
    if found.files == 0 and not failures:
        failures.append(f"  {case.name}: left no file to compare")
    for line in verdict(case, found, failures, ", ".join(seconds)):
        say(line)
    return not failures and not found.differences


def verdict(case: Case, found: Comparison, failures: Sequence[str], seconds: str) -> list[str]:
    differences = found.differences
    word = "failed" if failures else "DIFFERS" if differences else "agrees"
    result = [f"{case.name:<15} {word:<8} {found.files} files, {seconds}", *failures]
    result += [f"  {difference}" for difference in differences[:SHOWN]]
    if len(differences) > SHOWN:
        result.append(f"  {len(differences) - SHOWN} more files differ")
    return result


# -- checkouts ---------------------------------------------------------------------------------------------------------
@contextmanager
def checkout(repository: Path, commit: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """(the commit's files in this folder, which is a worktree of git until the end; the commit's short name).

    Raises:
        Mistake: there is no such commit.
    """
    name = snapshot(repository) if commit in WORKTREE else commit
    done = git(repository, "rev-parse", "--verify", "--quiet", "--short", f"{name}^{{commit}}", check=False)
    if done.returncode != 0:
        raise Mistake(f"there is no such commit, got {commit}; name a branch, a tag, a hash, or WORKTREE")
    short = done.stdout.strip()
    try:
        git(repository, "worktree", "add", "--quiet", "--detach", str(folder), short)
        yield folder, short
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave the worktree behind
        if git(repository, "worktree", "remove", "--force", str(folder), check=False).returncode != 0:
            git(repository, "worktree", "prune", check=False)  # its folder goes with the temporary one
        signal.signal(signal.SIGINT, before)


def snapshot(repository: Path) -> str:
    """A commit, on no branch, of all files as they are, those that git ignores aside."""
    with tempfile.TemporaryDirectory() as folder:
        own_index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git(repository, "read-tree", "HEAD", variables=own_index)
        git(repository, "add", "--all", variables=own_index)
        tree = git(repository, "write-tree", variables=own_index).stdout.strip()
    someone = {
        f"GIT_{role}_{what}": "compare_commits" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    return git(repository, "commit-tree", tree, "-p", "HEAD", "-m", "worktree", variables=someone).stdout.strip()


def git(
    repository: Path, *words: str, check: bool = True, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["git", "-C", str(repository), *words],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        start_new_session=True,  # Ctrl-C in the terminal is ours alone
    )
    if check and done.returncode != 0:
        raise Failure(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done


# -- sides -------------------------------------------------------------------------------------------------------------
class Side:
    """Runs `rlft` of one checkout, in folders below `runs`; see rlft_forks.py."""

    def __init__(self, code: Path, runs: Path, stack: ExitStack, libraries: Sequence[str]) -> None:
        self.code, self.runs = code, runs
        others = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(code), *([others] if others else [])])
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(FORKS), *libraries],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        stack.callback(self.close)
        imported = str(self._hear("ready"))
        if not Path(imported).resolve().is_relative_to(code):
            raise Failure(f"rlft is imported from {imported} instead of {code}")

    def folder(self, case: Case) -> Path:
        return self.runs / case.name

    def paths(self, folder: Path) -> dict[str, str]:
        """{a path of this side: what stands for it on both}, for what is run in this folder."""
        return {str(folder): "<case>", str(self.code): "<code>", os.path.relpath(self.code, folder): "<code>"}

    def run(self, case: Case) -> str | None:
        """Runs the commands of a case; returns what went wrong, in words, None if nothing did."""
        folder = self.folder(case)
        folder.mkdir(parents=True)
        for name, content in case.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        for number, command in enumerate(case.commands):
            order = {"arguments": shlex.split(command), "cwd": str(folder), "log": str(folder / LOG)}
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(order) + "\n")
            code, expected = self._hear("code"), case.codes.get(number, 0)
            if code != expected:
                said = (folder / LOG).read_text().strip().splitlines()[-3:]
                called = f"command {number + 1}, rlft {order['arguments'][0]},"
                return f"{called} ended with {code} instead of {expected}: {' | '.join(said)}"
        return None

    def close(self) -> None:
        """Ends the process, and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _hear(self, name: str) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], LIMIT_S)[0]:
            raise Failure(f"a command of {self.code} was still running after {LIMIT_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise Failure(f"{self.code}: its process ended before it said anything; what is above says why")
        return json.loads(line)[name]


def print_now(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
