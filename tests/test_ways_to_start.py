"""The files by which people start rlft: a container, a notebook, a fork's checks, a batch script, machines of a cloud.

Containers, clouds and Slurm are not here: their files are parsed, what they say is compared with rlft, and the commands
in them are run as far as they need nothing but Python.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import nbformat
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from nbclient import NotebookClient
from run_processes import happens
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.resolved import build, resolve

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
DOCS, SCRIPTS = REPOSITORY / "docs", REPOSITORY / "scripts"
NOTEBOOK = DOCS / "tutorials" / "start.ipynb"


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, timeout=600, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


# -- the container -----------------------------------------------------------------------------------------------------
def stage(target):
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


def values(target, instruction):
    return [value for name, value in stage(target) if name == instruction]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_container_is_rlft_with_the_versions_of_a_file_of_pins(target):
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
def test_pip_and_uv_install_rlft(installer, tmp_path):
    python = tmp_path / "there" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", python.parents[1])
    if installer == "uv":
        run(PROGRAMS / "uv", "pip", "install", "--no-deps", "--python", python, REPOSITORY)
        run(PROGRAMS / "uv", "pip", "install", "--dry-run", "--python", python, f"{REPOSITORY}[sweep]")
    else:
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", REPOSITORY)
    assert (python.parent / "rlft").is_file()


# -- the notebook ------------------------------------------------------------------------------------------------------
def pictures(notebook):
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    return [data["image/png"] for data in shown if "image/png" in data]


@pytest.mark.slow
def test_the_notebook_trains_until_the_reward_rises_and_shows_it(tmp_path, monkeypatch):
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


def test_the_notebook_can_be_read_without_running_it():
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
@pytest.mark.parametrize(("name", "does"), [("tests", ["lint", "test"]), slow("docs", ["docs"])])
def test_the_workflow_of_a_fork_is_one_and_runs_what_anybody_runs(name, does):
    file = REPOSITORY / ".github" / "workflows" / f"{name}.yml"
    run(PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", file)
    [job] = yaml.safe_load(file.read_text())["jobs"].values()
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    targets = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
    assert targets == does
    makefile = (REPOSITORY / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert not re.search(r"\{\{ *secrets\b", file.read_text()), "a fork has none"


def test_the_hooks_are_ones_that_a_fork_can_install():
    file = REPOSITORY / ".pre-commit-config.yaml"
    run(PROGRAMS / "pre-commit", "validate-config", file)
    hooks = [hook for repo in yaml.safe_load(file.read_text())["repos"] for hook in repo["hooks"]]
    makefile = (REPOSITORY / "Makefile").read_text()
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert program.startswith(".venv/bin/")
        assert f"$(BIN)/{Path(program).name}" in makefile, "`make lint` runs the same"


# -- a batch script, machines of a cloud, and Kubernetes ---------------------------------------------------------------
BLOCK = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands_in(script):
    """The words of each `rlft train`, with an address in the place of variables."""
    joined = script.replace("\\\n", " ").replace('"$first:$port"', "10.0.0.1:6379")
    for line in re.findall(r"\brlft train (\+[^#&\n]*)", joined):
        yield [word for word in shlex.split(line) if not word.startswith(("hydra.", "resume="))]


def commands_shown(page):
    """The same of a page's blocks that no test runs, also those inside of files and scripts."""
    for language, _, text in BLOCK.findall((DOCS / "how-to" / page).read_text()):
        is_job = language == "yaml" and "entrypoint" in text
        if language != "sh":
            yield from commands_in(yaml.safe_load(text)["spec"]["entrypoint"] if is_job else text)


@pytest.mark.parametrize(("page", "at_least"), [("cluster.md", 6), ("preemptible.md", 2), ("7b-on-24gb.md", 1)])
def test_commands_that_no_machine_here_can_run_are_sound(page, at_least):
    shown = list(commands_shown(page))
    assert len(shown) >= at_least
    for words in shown:
        resolve(compose(words))


def check_shell(script, tmp_path, *without):
    file = tmp_path / "script.sh"
    file.write_text(script)
    run(PROGRAMS / "shellcheck", "--shell", "bash", *(f"--exclude={code}" for code in without), file)


def programs(folder, bodies):
    """Writes programs of these bodies into a folder; returns the PATH that finds them first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_the_batch_script_is_the_one_that_the_page_explains_with_the_options_that_signals_need(tmp_path):
    script = (SCRIPTS / "slurm.sh").read_text()
    assert f"```sbatch rlft.sbatch\n{script}```\n" in (DOCS / "how-to" / "cluster.md").read_text()
    assert {"--signal=B:TERM@900", "--requeue"} <= set(re.findall(r"^#SBATCH (\S+)", script, re.MULTILINE))
    check_shell(script, tmp_path)


STUBS = {
    "hostname": 'echo "10.0.0.1 fe80::1"',
    "srun": 'echo "srun $*" >> calls',
    "scontrol": 'echo "scontrol $*" >> calls',
    # As with Ray, the other machines are listed once srun has started them.
    "ray": 'echo "ray $*" >> calls; [ "$1" = status ] || exit 0\n'
    'for i in $(seq 400); do grep -q "^srun" calls && break; sleep 0.05; done\n'
    'for i in 1 2 3 4; do echo " 1 node_$i"; done',
}
SAVES = (
    'trap "sleep 0.3; echo saved >> calls; exit 130" TERM; echo "rlft began $*" >> calls; while :; do sleep 0.05; done'
)


@pytest.mark.parametrize(
    ("rlft", "code"), [("exit 2", 2), ("exit 0", 0), (SAVES, 130)], ids=["fails", "ends", "is told to stop"]
)
def test_the_batch_script_ends_as_its_run_and_asks_for_another_place_after_a_signal(rlft, code, tmp_path):
    environment = {"PATH": programs(tmp_path, {**STUBS, "rlft": rlft}), "SLURM_JOB_ID": "7", "SLURM_NNODES": "4"}
    calls = tmp_path / "calls"
    job = subprocess.Popen(["bash", SCRIPTS / "slurm.sh"], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        if code == 130:
            assert happens(lambda: calls.exists() and "rlft began" in calls.read_text(), within_s=60)
            assert happens(lambda: catches(job.pid, signal.SIGTERM), within_s=60)
            job.terminate()
        assert job.wait(120) == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    made = calls.read_text().splitlines()
    assert "ray start --head --node-ip-address=10.0.0.1 --port=20007" in made
    if code == 130:
        assert made[-3:] == ["saved", "ray stop", "scontrol requeue 7"]
        assert any("cluster.address=10.0.0.1:20007" in call for call in made)
    else:
        assert made[-1] == "ray stop"


def catches(pid, number):
    """Whether a process has a handler of its own for the signal."""
    [mask] = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_the_job_of_kubernetes_has_the_gpus_of_its_run():
    [text] = [text for _, name, text in BLOCK.findall((DOCS / "how-to/cluster.md").read_text()) if "rayjob" in name]
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"], job["spec"]["entrypointNumGpus"]) == ("ray.io/v1", "RayJob", 1)
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"]["spec"]]
    pods += [group["template"]["spec"] for group in cluster["workerGroupSpecs"] for _ in range(group["replicas"])]
    gpus = [pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods]
    [words] = commands_in(job["spec"]["entrypoint"])
    config = build(compose(words)).cluster
    assert {"cluster.address=auto", "cluster.engines=24"} <= {*words}
    assert sum(gpus) == config.engines * config.gpus_per_engine + config.ranks
    volumes = {volume["name"] for volume in pods[-1]["volumes"]}
    assert {mount["name"] for mount in pods[0]["containers"][0]["volumeMounts"]} == volumes


SKYPILOT = {
    "": {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "service", "setup", "run"},
    "resources": {"cloud", "region", "zone", "accelerators", "cpus", "memory", "disk_size", "use_spot", "image_id"},
}
"""Keys of a task and of its resources, from `get_task_schema` and `get_resources_schema` of SkyPilot 0.14.1's
sky/utils/schemas.py, which refuse any other."""


def test_the_file_for_skypilot_is_a_task_whose_machines_have_the_gpus_of_its_run(tmp_path):
    task = yaml.safe_load((SCRIPTS / "skypilot.yaml").read_text())
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
def test_each_machine_of_skypilot_joins_the_ray_of_the_first(rank, tmp_path):
    task = yaml.safe_load((SCRIPTS / "skypilot.yaml").read_text())
    ray = 'echo "ray $*" >> "$HOME/calls"; [ "$1" = status ] && echo " 1 node_a" && echo " 1 node_b"; true'
    programs(tmp_path / "rlft" / "bin", {"ray": ray, "rlft": 'echo "rlft $*" >> "$HOME/calls"'})
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
