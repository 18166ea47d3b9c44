"""The comparison of two commits: what it checks out, runs, finds and leaves behind, on a made-up package."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import compare_commits as script
import comparison_cases
import pytest
from run_processes import happens

from rlft.config import catalog

SCRIPTS = Path(__file__).parents[1] / "scripts"
PROGRAM = """\
import json
import os
import sys
import time
from pathlib import Path


def main():
    command = sys.argv[1]
    Path("pid.txt").write_text("")
    if command == "sleep":
        Path(sys.argv[2]).write_text(str(os.getpid()))
        time.sleep(100)
    if command == "fail":
        sys.exit("rlft: there is no such key")
    line = {"step": 1, "loss/total": 0.1 + 0.2, "time/step": time.monotonic()}
    Path("metrics.jsonl").write_text(json.dumps(line) + "\\n")
"""


def git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), "-c", "user.name=someone", "-c", "user.email=a@b", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit(repository: Path, program: str) -> None:
    (repository / "rlft" / "cli.py").write_text(program)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "-m", "a change")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit, of a package `rlft` whose command line writes one line of metrics."""
    folder = tmp_path / "repository"
    (folder / "rlft").mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / "rlft" / "__init__.py").write_text("")
    commit(folder, PROGRAM)
    return folder


@pytest.fixture
def compared(repository: Path) -> Callable[..., tuple[bool, str]]:
    """Compares commits in one case of this command; gives whether they agree and all that was said."""

    def compare(a: str, b: str, command: str = "train", keep: Path | None = None) -> tuple[bool, str]:
        said: list[str] = []
        cases = [script.Case(name="grpo", commands=[command])]
        agree = script.compare(repository, (a, b), cases, keep, ["json"], said.append)
        return agree, "\n".join(said)

    return compare


def worktrees(repository: Path) -> int:
    return len(git(repository, "worktree", "list").splitlines())


def test_a_commit_agrees_with_itself_and_leaves_no_worktree(
    compared: Callable[..., tuple[bool, str]], repository: Path
) -> None:
    agree, said = compared("HEAD", "HEAD")
    assert agree, said
    assert "1 of 1 cases agree" in said
    assert worktrees(repository) == 1


def test_a_last_bit_that_a_commit_changes_is_found(
    compared: Callable[..., tuple[bool, str]], repository: Path, tmp_path: Path
) -> None:
    commit(repository, PROGRAM.replace("0.1 + 0.2", "0.3"))
    agree, said = compared("HEAD~1", "HEAD", keep=tmp_path / "kept")
    assert not agree
    assert "grpo: metrics.jsonl, step 1, line 1: loss/total: 0.30000000000000004 against 0.3" in said
    assert "largest absolute difference 5.55e-17" in said  # 2^-54
    values = [json.loads((tmp_path / "kept" / k / "grpo/metrics.jsonl").read_text())["loss/total"] for k in "AB"]
    assert values == [0.1 + 0.2, 0.3]


def test_what_is_not_committed_yet_can_be_compared(compared: Callable[..., tuple[bool, str]], repository: Path) -> None:
    (repository / "rlft" / "numbers.py").write_text("LOSS = 0.3\n")
    text = PROGRAM.replace("0.1 + 0.2", "LOSS").replace("import json", "import json\nfrom rlft.numbers import LOSS")
    (repository / "rlft" / "cli.py").write_text(text)
    before = git(repository, "status", "--porcelain")
    for name in ("WORKTREE", "."):
        agree, said = compared("HEAD", name)
        assert not agree
        assert "0.30000000000000004 against 0.3" in said
    assert git(repository, "status", "--porcelain") == before
    assert worktrees(repository) == 1


def test_a_command_that_fails_or_leaves_no_file_is_no_agreement(
    compared: Callable[..., tuple[bool, str]], repository: Path
) -> None:
    agree, said = compared("HEAD", "HEAD", command="fail")
    assert not agree
    for side in "AB":
        assert f"grpo, side {side}: command 1, rlft fail, ended with 1 instead of 0: rlft: there is no such key" in said
    commit(repository, "def main():\n    pass\n")
    agree, said = compared("HEAD", "HEAD")
    assert (agree, "left no file" in said) == (False, True)


def test_a_package_from_elsewhere_is_refused(compared: Callable[..., tuple[bool, str]], repository: Path) -> None:
    """The environment has an rlft of its own, which would agree with itself."""
    git(repository, "rm", "-r", "--quiet", "rlft")
    git(repository, "commit", "--quiet", "-m", "nothing is left")
    with pytest.raises(script.Failure, match=r"rlft is imported from .* instead of"):
        compared("HEAD", "HEAD")
    assert worktrees(repository) == 1


def test_stopped_in_a_run_it_leaves_neither_worktree_nor_process(repository: Path, tmp_path: Path) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    driver = f"""
import signal
import sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
import compare_commits
compare_commits.ROOT, compare_commits.LIBRARIES = Path({str(repository)!r}), ()
compare_commits.CASES = (compare_commits.Case(name="grpo", commands=["sleep {tmp_path / "pid"}"]),)
compare_commits.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", driver, "HEAD", "HEAD"],
        env={**os.environ, "TMPDIR": str(place)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert happens(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", 60)
        assert worktrees(repository) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130
    finally:
        process.kill()
    assert process.stderr is not None
    assert process.stderr.read() == "\nstopped\n"
    process.stderr.close()
    assert worktrees(repository) == 1
    assert list(place.iterdir()) == []
    assert has_ended(int((tmp_path / "pid").read_text()))


def has_ended(pid: int) -> bool:
    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # Killed, and not waited for by whoever inherits it: that may be nobody in a container.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    return happens(gone, 60)


def test_of_a_key_that_is_given_twice_the_last_value_is_taken() -> None:
    result = doctest.testmod(comparison_cases)
    assert (result.attempted, result.failed) == (1, 0)


def test_every_algorithm_and_command_is_in_a_case() -> None:
    commands = [command for case in script.CASES for command in case.commands]
    recipes = {word.removeprefix("+recipe=") for command in commands for word in command.split() if "+recipe=" in word}
    assert {f"{name}_arithmetic" for name in catalog.choices("algorithm")} <= recipes
    assert recipes <= set(catalog.choices("recipe"))
    called = {command.split()[0] for command in commands}
    assert called == {"train", "sft", "rm", "dpo", "sample", "eval", "export", "resume"}
    names = [case.name for case in script.CASES]
    assert len(names) == len(set(names))
