"""The files by which people start rlft: a container, a notebook, a fork's checks, a batch script, machines of a cloud.

Containers, clouds and Slurm are not here: their files are parsed, what they say is compared with rlft, and the commands
in them are run as far as they need nothing but Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from in_one_test import each
from nbclient import NotebookClient

from rlft.config.compose import compose
from rlft.config.resolved import resolve

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
NOTEBOOK = REPOSITORY / "docs" / "tutorials" / "start.ipynb"
TARGETS = ("cpu", "cuda")


def run(*words: object, **options: Any) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, timeout=600, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


# -- the container -----------------------------------------------------------------------------------------------------
def stage(target: str) -> list[tuple[str, str]]:
    """(instruction, value) of everything that makes this target, those of the stage below it first."""
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in DockerfileParser(str(REPOSITORY / "Dockerfile"), cache_content=True).structure:
        instruction, value = line["instruction"], line["value"]
        if instruction == "FROM":
            below, _, name = value.partition(" AS ")
            stages[name] = [*stages.get(below, [(instruction, below)])]
        elif instruction != "COMMENT":
            stages[name].append((instruction, value))
    return stages[target]


def values(target: str, instruction: str) -> list[str]:
    return [value for name, value in stage(target) if name == instruction]


@pytest.mark.parametrize("target", TARGETS)
def test_a_container_is_rlft_with_the_versions_of_a_file_of_pins(target: str) -> None:
    assert values(target, "FROM") == ["python:3.12-slim"], "the Python that pins/ is for"
    assert values(target, "ENTRYPOINT") == ['["rlft"]']
    assert f"pip install --requirement pins/{target}.txt" in values(target, "RUN")
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for source in (value.split()[0] for value in values(target, "COPY")):
        assert (REPOSITORY / source).exists()
        assert not any(fnmatch(source, pattern) for pattern in ignored)
    for name in ("rlft", "configs", "recipes", "pyproject.toml", "README.md", "LICENSE"):
        assert not any(fnmatch(name, pattern) for pattern in ignored), "what the build of the wheel reads"


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_pip_and_uv_install_rlft(installer: str, tmp_path: Path) -> None:
    python = tmp_path / "there" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", python.parents[1])
    if installer == "uv":
        run(PROGRAMS / "uv", "pip", "install", "--no-deps", "--python", python, REPOSITORY)
        run(PROGRAMS / "uv", "pip", "install", "--dry-run", "--python", python, f"{REPOSITORY}[sweep]")
    else:
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", REPOSITORY)
    assert (python.parent / "rlft").is_file()


# -- the notebook ------------------------------------------------------------------------------------------------------
def pictures(notebook: Any) -> list[str]:
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    return [data["image/png"] for data in shown if "image/png" in data]


@pytest.mark.slow
def test_the_notebook_trains_until_the_reward_rises_and_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = [cell.source for cell in notebook.cells]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [cell.source for cell in notebook.cells] == kept
    metrics = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").open()]
    rewards = [line["reward/mean"] for line in metrics]
    # 0.61, then 0.83. Of 5 x 256 completions, about half of them right, a mean has a standard error of 0.014.
    assert len(rewards) == 10
    assert sum(rewards[5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    assert len(pictures(notebook)) == 1
    said = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))
    assert "runs/first/report.html" in said
    assert (tmp_path / "runs/first/report.html").is_file()


def test_the_notebook_can_be_read_without_running_it() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    text = NOTEBOOK.read_text()
    assert len(pictures(notebook)) == 1
    assert len(text) < 150_000
    assert not re.search(r"/(?:home|root|Users|tmp|work|usr|opt)/", text), "a path of the machine that ran it"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], "run once, from the top"
    assert not any(o.output_type == "error" for cell in notebook.cells for o in cell.get("outputs", ()))


# -- a fork's checks ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "does"), [("tests", ["lint", "test"]), ("docs", ["docs"])])
def test_the_workflow_of_a_fork_is_one_and_runs_what_anybody_runs(name: str, does: list[str]) -> None:
    file = REPOSITORY / ".github" / "workflows" / f"{name}.yml"
    run(PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", file)
    [job] = yaml.safe_load(file.read_text())["jobs"].values()
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    targets = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
    assert targets == does
    makefile = (REPOSITORY / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert not re.search(r"\{\{ *secrets\b", file.read_text()), "a fork has none"


def test_the_hooks_are_ones_that_a_fork_can_install() -> None:
    file = REPOSITORY / ".pre-commit-config.yaml"
    run(PROGRAMS / "pre-commit", "validate-config", file)
    hooks = [hook for repo in yaml.safe_load(file.read_text())["repos"] for hook in repo["hooks"]]
    makefile = (REPOSITORY / "Makefile").read_text()
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert program.startswith(".venv/bin/")
        assert f"$(BIN)/{Path(program).name}" in makefile, "`make lint` runs the same"


# -- a batch script, and machines of a cloud ---------------------------------------------------------------------------
def commands_in(script: str) -> Iterator[list[str]]:
    """The words of each `rlft train`, with an address in the place of variables."""
    joined = script.replace("\\\n", " ").replace('"$first:$port"', "10.0.0.1:6379")
    for line in re.findall(r"\brlft train (\+[^#&\n]*)", joined):
        yield [word for word in shlex.split(line) if not word.startswith(("hydra.", "resume="))]


def check_shell(script: str, tmp_path: Path, *without: str) -> None:
    file = tmp_path / "script.sh"
    file.write_text(script)
    run(PROGRAMS / "shellcheck", "--shell", "bash", *(f"--exclude={code}" for code in without), file)


def test_the_batch_script_is_the_one_that_the_page_explains(tmp_path: Path) -> None:
    script = (REPOSITORY / "scripts" / "slurm.sh").read_text()
    assert f"```sbatch rlft.sbatch\n{script}```\n" in (REPOSITORY / "docs" / "how-to" / "cluster.md").read_text()
    check_shell(script, tmp_path)


STUBS = {
    "ray": 'if [ "$1" = status ]; then echo " node_1"; fi',
    "srun": "",
    "scontrol": 'echo "$@" > requeued',
    "rlft": "{run}",
}
UNTIL_TERM = "trap 'exit 130' TERM; touch started; while true; do sleep 0.05; done"


@each(("run", "code"), [("exit 3", 3), ("exit 0", 0), (UNTIL_TERM, 130)])
def test_the_batch_script_ends_as_its_run_and_asks_for_another_place_after_a_signal(
    tmp_path: Path, run: str, code: int
) -> None:
    for name, body in STUBS.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{body.replace('{run}', run)}\n")
        file.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    words = ["bash", REPOSITORY / "scripts" / "slurm.sh"]
    script = subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        if run == UNTIL_TERM:
            deadline = time.monotonic() + 60
            while not ((tmp_path / "started").exists() and catches(script.pid, signal.SIGTERM)):
                assert script.poll() is None, "it ended before its run began"
                assert time.monotonic() < deadline, "its run has not begun in a minute"
                time.sleep(0.05)
            script.terminate()
        assert script.wait(60) == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    assert (tmp_path / "requeued").exists() == (code == 130)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for the signal."""
    [mask] = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


SKYPILOT = {
    "": {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "service", "setup", "run"},
    "resources": {"cloud", "region", "zone", "accelerators", "cpus", "memory", "disk_size", "use_spot", "image_id"},
}
"""Keys of a task and of its resources, from `get_task_schema` and `get_resources_schema` of SkyPilot 0.14.1's
sky/utils/schemas.py, which refuse any other."""


def test_the_file_for_skypilot_is_a_task_whose_machines_have_the_gpus_of_its_run(tmp_path: Path) -> None:
    task = yaml.safe_load((REPOSITORY / "scripts" / "skypilot.yaml").read_text())
    assert {*task} <= SKYPILOT[""]
    assert {*task["resources"]} <= SKYPILOT["resources"]
    header = "export SKYPILOT_NODE_IPS SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES\n"
    check_shell(header + task["run"], tmp_path)
    check_shell(task["setup"], tmp_path, "SC2148")
    [words] = commands_in(task["run"])
    cluster = resolve(compose(words)).config.cluster
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    assert task["num_nodes"] * gpus == cluster.engines * cluster.gpus_per_engine + cluster.ranks
    assert cluster.is_joined


@pytest.mark.parametrize("rank", [0, 1])
def test_each_machine_of_skypilot_joins_the_ray_of_the_first(rank: int, tmp_path: Path) -> None:
    task = yaml.safe_load((REPOSITORY / "scripts" / "skypilot.yaml").read_text())
    programs = {
        "ray": 'echo "ray $*" >> "$HOME/calls"; [ "$1" = status ] && echo " 1 node_a" && echo " 1 node_b"; true',
        "rlft": 'echo "rlft $*" >> "$HOME/calls"',
    }
    (tmp_path / "rlft" / "bin").mkdir(parents=True)
    for name, text in programs.items():
        file = tmp_path / "rlft" / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    known = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2"}
    run("bash", "-c", task["run"], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **known})
    calls = (tmp_path / "calls").read_text().splitlines()
    if rank:
        assert calls == ["ray start --address=10.0.0.1:6379 --dashboard-agent-listen-port=52366 --block"]
        return
    assert calls[0].startswith("ray start --head --node-ip-address=10.0.0.1 --port=6379 ")
    assert calls[1] == "ray status"
    assert calls[2].startswith("rlft train +recipe=grpo_gsm8k resume=auto ")
    assert "cluster.address=10.0.0.1:6379" in calls[2]
