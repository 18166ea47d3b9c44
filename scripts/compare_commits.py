"""Whether two commits compute the same, bit for bit: short seeded runs of both on this machine, file by file.

    python scripts/compare_commits.py HEAD~1 HEAD                 # every case: algorithms, commands and kinds of roles
    python scripts/compare_commits.py main WORKTREE --only grpo,ppo   # what is not committed yet (`.` says the same)
    python scripts/compare_commits.py A B --keep runs/compared    # keep the runs, in A/<case> and B/<case>
    python scripts/compare_commits.py --list

For changes that must not move a number, such as moved modules. Bits depend on the processor and on the libraries, so no
file of expected numbers holds anywhere else; two commits on one machine do. Each is checked out into a temporary
folder, and its `rlft` is run from there, in this environment, on the CPU with one thread. Metrics, evaluations,
rollouts with their log-probs, samples, adapters, heads, optimizer, states, exported models and configs are compared.
Times, memory, dates, paths, versions and the commit may differ: folder_differences.py names what is left out.

Exit codes: 0 both sides agree, 1 they differ or a run failed, 2 a mistake the user can fix, 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from comparison_cases import CASES, Case
from folder_differences import Comparison, compare_folders

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
