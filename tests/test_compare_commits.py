"""The comparison of two commits: one changed bit of each kind of file is found, and what it runs and leaves behind."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_commits as script
import pytest
import torch
from run_processes import happens, is_alive
from safetensors.torch import save_file

from rlft.config import catalog

SCRIPTS = Path(script.__file__).parent
Said = tuple[bool, str]

# -- two folders -------------------------------------------------------------------------------------------------------
CHECKPOINT = "run/checkpoints/step_000002"
STATE, ROLLOUTS, MODEL = f"{CHECKPOINT}/state.json", "run/rollouts/step_000002.jsonl", "model/model.safetensors"
TENSORS = [f"{CHECKPOINT}/{name}.safetensors" for name in ("policy/adapter_model", "critic/head", "optimizer")]
# A file of each kind. On the second side <k> is another digit, which may be, and <side> another name.
TEXTS = {
    "run/metrics.jsonl": """{"step": 1, "loss/total": 0.25, "time/step": 1.5<k>, "memory/peak_bytes": 100<k>}
{"step": 2, "loss/total": 0.30000000000000004, "time/step": 1.25<k>, "memory/peak_bytes": 200<k>}
""",
    "run/eval.jsonl": '{"step": 2, "accuracy": 0.5, "examples": [{"score": 1.0}]}\n',
    ROLLOUTS: '{"step": 2, "prompt_id": "1+2", "token_ids": [7, 8], "logprobs": [-0.5, -0.25]}\n',
    "samples/samples.jsonl": '{"prompt_id": "1+2", "reward": 1.2000000476837158}\n',
    "run/evaluations/step_000002_2026-11-22_10-20-3<k>.jsonl": '{"step": 2, "accuracy": 0.75}\n',
    STATE: '{"step": 2, "alarms": {"best": [0.5, 0.25], "least": 0.0}, "base": "/code/<side>/tiny"}',
    f"{CHECKPOINT}/MANIFEST": "<k>  state.json\n",
    "run/config.yaml": """trainer: {lr: 0.001}
algorithm: {_target_: rlft.algorithm.ppo<k>.PPO}
lora: {path: /runs/<side>/sft}
origin: {rlft: 0.1.<k>, commit: 7ad35a<k>, base_fingerprint: 9e854fe0239b55ee}
""",
    "sweep.csv": "job,accuracy,seconds\n0,0.5,1.<k>\n1,0.75,2.<k>\n",
    "log.txt": "took <k> s\n",
}


@pytest.fixture
def two_runs(tmp_path):
    """Two folders with a file of each kind, the same bit for bit but for times, paths and versions."""
    weights = torch.linspace(0.0, 1.0, 6).reshape(2, 3)
    for k, side in enumerate("AB"):
        for name, text in TEXTS.items():
            file = tmp_path / side / name.replace("<k>", str(k))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("<k>", str(k)).replace("<side>", side))
        for name in (*TENSORS, MODEL):
            (tmp_path / side / name).parent.mkdir(parents=True, exist_ok=True)
            save_file({"other": weights, "weight": weights + 1}, tmp_path / side / name)
        save_file({"embed": weights.to(torch.bfloat16)}, tmp_path / side / MODEL)
        (tmp_path / side / "model/tokenizer.bin").write_bytes(bytes(range(32)))
    return tmp_path / "A", tmp_path / "B"


@pytest.fixture
def compare(two_runs):
    """Compares the two folders as they are now."""
    of_a, of_b = ({f"/code/{k}": "<code>", f"/runs/{k}": "<case>"} for k in "AB")
    return lambda: script.compare_folders("ppo", *two_runs, of_a, of_b)


def change(file, old, new=""):
    """Replaces a text once; of a number in binary, (format, number), changes the last bit of its first place."""
    content = file.read_bytes()
    bits = old.encode() if isinstance(old, str) else struct.pack(*old)
    place = content.index(bits)
    changed = new.encode() if isinstance(old, str) else bytes([bits[0] ^ 1]) + bits[1:]
    file.write_bytes(content[:place] + changed + content[place + len(bits) :])


LAST = ("<f", 2.0)  # of `weight`: in [2, 4) neighbours in float32 are 2^-22 apart
OTHER_BITS = "F32 of [2, 3] with other bits"
# (file, what is replaced by what, the step, field and largest difference that are found, words of it)
CHANGES: list[tuple[str, Any, str, Any, str]] = [
    # 0.1 + 0.2 is 0.30000000000000004, and 0.3 its neighbour, 2^-54 below.
    ("run/metrics.jsonl", "0.30000000000000004", "0.3", (2, "line 2: loss/total", 2**-54), "0.30000000000000004"),
    ("run/eval.jsonl", "0.5,", "0.5000000000000001,", (2, "line 1: accuracy", 2**-53), "0.5"),
    (ROLLOUTS, "-0.25", "-0.25000000000000006", (2, "line 1: logprobs[1]", 2**-54), "-0.25"),
    ("samples/samples.jsonl", "476837158", "47683716", (None, "line 1: reward", 2**-52), "1.2000000476837158"),
    (STATE, "0.25", "0.25000000000000006", (2, "alarms.best[1]", 2**-54), "0.25"),
    ("run/config.yaml", "0.001", "0.0010000000000000002", (None, "trainer.lr", 2**-62), "0.001"),
    ("sweep.csv", "0.75", "0.7500000000000001", (None, "row 2: accuracy", None), "0.75"),  # texts, as a table has them
    *((name, LAST, "", (2, "weight", 2**-22), OTHER_BITS) for name in TENSORS),
    (MODEL, ("<H", 0x3F80), "", (None, "embed", 2**-7), ""),  # 1 in bfloat16, which has 7 bits after the point
    ("model/tokenizer.bin", ("B", 5), "", (None, "byte 5", None), ""),
    # A number may be written otherwise; signs of zero, types, lengths and fingerprints of data or base count.
    (STATE, "0.25", "2.5e-1", None, ""),
    (STATE, "0.25", "null", (2, "alarms.best[1]", None), "None"),
    (STATE, "[0.5, 0.25]", "[0.5]", (2, "alarms.best[1]", None), "nothing"),
    (STATE, "0.0}", "-0.0}", (2, "alarms.least", 0.0), "-0.0"),
    (STATE, "2,", "2.0,", (2, "step", 0.0), "2.0"),
    ("run/config.yaml", "9e854", "0e854", (None, "origin.base_fingerprint", None), "0e854"),
]


def test_the_last_bit_of_a_number_is_found_and_nothing_in_what_must_differ(two_runs, compare):
    # metrics, eval, rollouts, samples, an evaluation, 3 tensor files, model, state, config, sweep, a binary
    assert compare().files == 13
    assert compare().differences == (), "times, memory, paths, versions and classes' addresses may differ"
    for name, old, new, expected, words in CHANGES:
        file = two_runs[1] / name
        before = file.read_bytes()
        change(file, old, new)
        found = compare().differences
        assert [(d.step, d.field, d.largest) for d in found if d.file == name] == [expected] * (expected is not None)
        assert all(d.count == 1 and words in str(d) and str(d).startswith(f"ppo: {name}") for d in found)
        file.write_bytes(before)


def test_a_file_or_a_line_that_only_one_side_has_is_a_difference_and_the_earliest_step_comes_first(two_runs, compare):
    change(two_runs[1] / CHECKPOINT / "policy/adapter_model.safetensors", LAST)
    change(two_runs[1] / ROLLOUTS, "-0.25", "-0.125")
    change(two_runs[1] / "run/metrics.jsonl", "0.30000000000000004", "0.3")
    change(two_runs[1] / "run/metrics.jsonl", "0.25", "0.75")
    first, second, third = compare().differences
    assert (first.file, first.step, first.count, first.largest) == ("run/metrics.jsonl", 1, 2, 0.5)
    assert second.file == ROLLOUTS
    assert third.file.endswith("policy/adapter_model.safetensors")
    (two_runs[0] / "run/eval.jsonl").unlink()
    shutil.copy(two_runs[0] / "sweep.csv", two_runs[0] / "extra.csv")
    metrics = two_runs[1] / "run/metrics.jsonl"
    metrics.write_text((two_runs[0] / "run/metrics.jsonl").read_text().splitlines(keepends=True)[0])
    found = {d.file: (d.step, d.field, d.values) for d in compare().differences}
    assert found["run/metrics.jsonl"][:2] == (2, "line 2: {}")
    assert found["run/eval.jsonl"] == (None, "", "is only on side B")
    assert found["extra.csv"] == (None, "", "is only on side A")


# -- two commits -------------------------------------------------------------------------------------------------------
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


def git(repository, *words):
    command = ["git", "-C", str(repository), "-c", "user.name=someone", "-c", "user.email=a@b", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit(repository, program):
    (repository / "rlft" / "cli.py").write_text(program)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "-m", "a change")


@pytest.fixture
def repository(tmp_path):
    """A repository of one commit, of a package `rlft` whose command line writes one line of metrics."""
    folder = tmp_path / "repository"
    (folder / "rlft").mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / "rlft" / "__init__.py").write_text("")
    commit(folder, PROGRAM)
    return folder


@pytest.fixture
def compared(repository):
    """Compares commits in one case of this command; gives whether they agree and all that was said."""

    def compare(a: str, b: str, command: str = "train", keep: Path | None = None) -> Said:
        said: list[str] = []
        cases = [script.Case(name="grpo", commands=[command])]
        agree = script.compare(repository, (a, b), cases, keep, ["json"], said.append)
        assert worktrees(repository) == 1
        return agree, "\n".join(said)

    return compare


def worktrees(repository):
    return len(git(repository, "worktree", "list").splitlines())


def test_a_last_bit_that_a_commit_or_a_file_changes_is_found(compared, repository, tmp_path):
    agree, said = compared("HEAD", "HEAD")
    assert (agree, "1 of 1 cases agree" in said) == (True, True), said
    commit(repository, PROGRAM.replace("0.1 + 0.2", "0.3"))
    agree, said = compared("HEAD~1", "HEAD", keep=tmp_path / "kept")
    assert not agree
    assert "grpo: metrics.jsonl, step 1, line 1: loss/total: 0.30000000000000004 against 0.3" in said
    assert "largest absolute difference 5.55e-17" in said  # 2^-54
    values = [json.loads((tmp_path / "kept" / k / "grpo/metrics.jsonl").read_text())["loss/total"] for k in "AB"]
    assert values == [0.1 + 0.2, 0.3]
    # What is not committed yet can be compared, new files as well.
    (repository / "rlft" / "numbers.py").write_text("LOSS = 0.25\n")
    text = PROGRAM.replace("0.1 + 0.2", "LOSS").replace("import json", "import json\nfrom rlft.numbers import LOSS")
    (repository / "rlft" / "cli.py").write_text(text)
    before = git(repository, "status", "--porcelain")
    for name in ("WORKTREE", "."):
        agree, said = compared("HEAD", name)
        assert (agree, "0.3 against 0.25" in said) == (False, True)
    assert git(repository, "status", "--porcelain") == before


def test_a_command_that_fails_or_leaves_no_file_is_no_agreement(compared, repository):
    agree, said = compared("HEAD", "HEAD", command="fail")
    assert not agree
    for side in "AB":
        assert f"grpo, side {side}: command 1, rlft fail, ended with 1 instead of 0: rlft: there is no such key" in said
    commit(repository, "def main():\n    pass\n")
    agree, said = compared("HEAD", "HEAD")
    assert (agree, "left no file" in said) == (False, True)


def test_a_package_from_elsewhere_is_refused(compared, repository):
    """The environment has an rlft of its own, which would agree with itself."""
    git(repository, "rm", "-r", "--quiet", "rlft")
    git(repository, "commit", "--quiet", "-m", "nothing is left")
    with pytest.raises(script.Failure, match=r"rlft is imported from .* instead of"):
        compared("HEAD", "HEAD")
    assert worktrees(repository) == 1


def test_stopped_in_a_run_it_leaves_neither_worktree_nor_process(repository, tmp_path):
    place, pid = tmp_path / "temporary", tmp_path / "pid"
    place.mkdir()
    driver = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
import compare_commits
compare_commits.ROOT, compare_commits.LIBRARIES = Path({str(repository)!r}), ()
compare_commits.CASES = (compare_commits.Case(name="grpo", commands=["sleep {pid}"]),)
compare_commits.main()
"""
    words, environment = [sys.executable, "-c", driver, "HEAD", "HEAD"], {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert happens(lambda: pid.exists() and pid.read_text() != "", 60)
            assert worktrees(repository) == 3
            process.send_signal(signal.SIGTERM)
            told = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    assert (process.returncode, told) == (130, "\nstopped\n")
    assert worktrees(repository) == 1
    assert list(place.iterdir()) == []
    assert happens(lambda: not is_alive(int(pid.read_text())), 60)


def test_every_algorithm_and_command_is_in_a_case():
    commands = [command for case in script.CASES for command in case.commands]
    recipes = {word.removeprefix("+recipe=") for command in commands for word in command.split() if "+recipe=" in word}
    assert {f"{name}_arithmetic" for name in catalog.choices("algorithm")} <= recipes
    assert recipes <= set(catalog.choices("recipe"))
    called = {command.split()[0] for command in commands}
    assert called == {"train", "sft", "rm", "dpo", "sample", "eval", "export", "resume"}
    names = [case.name for case in script.CASES]
    assert len(names) == len(set(names))
