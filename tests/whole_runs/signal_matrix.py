"""Every stage of a step x every signal x the main process alone or every process of the job, for every command.

    python tests/whole_runs/signal_matrix.py [train] [sft] [rm] [sample]     the whole table; minutes

A chain of processes goes on with one run. In each of them a signal comes in one stage of the first step that it does;
what it leaves is then looked at: exit code, what is said, status, processes, and every file, which must be a beginning
of what the same run leaves undisturbed, bit for bit. The last process goes on to the end, where all must be the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from run_folders import check_same, check_so_far, checkpoints
from run_processes import Nursery, Started, happens, marked

from rlft.runs import run_status
from rlft.runs.run_status import Status

SIGNALS = {"INT": "interrupt", "TERM": "terminate", "HUP": "hang up", "USR1": "warn",
           "USR2": "warn again", "QUIT": "quit", "KILL": "kill", "STOP": "stop"}  # fmt: skip
SCOPES = ("main", "everybody")
FATAL = {"QUIT": -signal.SIGQUIT, "KILL": -signal.SIGKILL}
TIMEOUT_S, PAUSE_S = 1.0, 2.5
"""scoring.timeout, and how long a job is stopped: beyond the pool's own second of grace, too."""
END_S = 60.0
HEARD = "interrupted: finishing this step, then saving; once more stops at once"

# It runs a program, which a signal to everybody ends; without that program its score is another one.
REWARD = """
import subprocess

def score(group):
    code = subprocess.run(["sleep", "0.1"]).returncode
    return [len(rollout.completion.text) / 100 if code == 0 else -1.0 for rollout in group.rollouts]
"""
SLOW = ("+reward.slow._target_=slow_reward.score", "+reward.slow.weight=0.1", "scoring.workers=1")
SLOW = (*SLOW, f"scoring.timeout={TIMEOUT_S}", "scoring.on_error=0")  # a worker that dies would be trained on
TINY = ("model.device=cpu", "generation=transformers", "generation.max_tokens=8")
DATA = ("data.size=32", "data.held_out_size=4")
TRAINS = ("lora.rank=2", "lora.dropout=0.1", "console=null", "eval.every=1")
EVALUATES = ("eval.num_prompts=2", "eval.num_samples=1")

Event = dict[str, Any]


def at(place: str, call: int = 1, **more: Any) -> Event:
    return {"at": place, "call": call, **more}


# While a worker scores: a moment after it has got its task.
SCORING = at("rlft.reward.workers.pool:packed_task", when="after", later=0.04)
UPDATE = at("rlft.trainer.optimizer:Optimizer.update", when="after")
CHECKPOINT = at("rlft.runs.checkpoint:_write_manifest")


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a command is run, and where a step's stages are. next_step: where the second step of a process begins."""

    words: Sequence[str]
    stages: Mapping[str, Event]
    next_step: Event
    steps: str = "steps"
    trains: bool = True


COMMANDS = {
    "train": Command(
        words=(
            *("train", "+recipe=grpo_arithmetic", *TINY, *DATA, *TRAINS, *EVALUATES, *SLOW),
            *("prompts_per_step=2", "group_size=2"),
        ),
        stages={
            "sampling": at("rlft.loop.session:Session.sample"),
            "scoring": SCORING,
            "annotate": at("rlft.trainer.local:LocalTrainer.annotate"),
            "update": UPDATE,
            "publish": at(
                "rlft.loop.session:Session.publish", 2
            ),  # the first one is of the policy that it goes on with
            "metrics": at("rlft.logger.loggers:Jsonl.step"),
            "evaluation": at("rlft.loop.metrics:summarise"),
            "checkpoint": CHECKPOINT,
        },
        next_step=at("rlft.loop.session:Session.sample", 2),
    ),
    "sft": Command(
        words=("sft", "+recipe=sft_arithmetic", *TINY, *DATA, *TRAINS, *EVALUATES, *SLOW, "examples_per_step=4"),
        stages={
            "update": UPDATE,
            "metrics": at("rlft.logger.loggers:Jsonl.step"),
            "sampling": at("rlft.loop.supervised:evaluate"),
            "scoring": SCORING,
            "evaluation": at("rlft.loop.metrics:summarise"),
            "checkpoint": CHECKPOINT,
        },
        next_step=at("rlft.loop.supervised:SupervisedRun.update", 2),
    ),
    "rm": Command(
        words=(
            "rm", "+recipe=rm_arithmetic", "model.device=cpu", *TRAINS, "rankings_per_step=4", "eval.num_rankings=8",
        ),
        stages={
            "update": UPDATE,
            "metrics": at("rlft.logger.loggers:Jsonl.step"),
            "evaluation": at("rlft.logger.loggers:Jsonl.evaluation"),
            "checkpoint": CHECKPOINT,
        },
        next_step=at("rlft.loop.supervised:SupervisedRun.update", 2),
    ),
    "sample": Command(
        words=("sample", *TINY, "data.size=64", "data.held_out_size=4", *SLOW, "n=2", "prompts_per_step=2"),
        stages={
            "sampling": at("rlft.commands.sample:sample"),
            "scoring": SCORING,
            "writing": at("rlft.commands.sample:write_atomically"),
        },
        next_step=at("rlft.commands.sample:sample", 2),
        steps="num_prompts",
        trains=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    stage: str
    signal: str
    scope: str

    def events(self, command: Command) -> list[Event]:
        """Of the process that gets the signal; after a pause it does one more step and is killed."""
        event = {**command.stages[self.stage], "do": SIGNALS[self.signal], "who": self.scope}
        return [event] if self.signal != "STOP" else [event, {**command.next_step, "do": "kill"}]


def cells(command: Command) -> Iterator[Cell]:
    for stage in command.stages:
        for name in SIGNALS:
            for scope in SCOPES:
                yield Cell(stage=stage, signal=name, scope=scope)


class Chain:
    """One run that is disturbed again and again. place: a folder for it and for the undisturbed one."""

    def __init__(self, name: str, command: Command, chosen: Sequence[Cell], nursery: Nursery, place: Path) -> None:
        self.name, self.command, self.nursery, self.place = name, command, nursery, place
        self.undisturbed, self.folder = place / "undisturbed", place / "run"
        (place / "slow_reward.py").write_text(REWARD)
        advances = sum(self.advances(cell) for cell in chosen)
        steps = advances + 3  # one before the first signal, one that is killed at its beginning, and a last one
        self.words = (*command.words, f"{command.steps}={steps if command.trains else 2 * steps}")
        keep = ("checkpoint.every=1", "checkpoint.keep=999") if command.trains else ()
        nursery.run(*self.words, *keep, "hydra.run.dir=undisturbed", cwd=place, ends=0)
        begun = [{**command.next_step, "do": "kill"}]
        keep = ("checkpoint.every=1",) if command.trains else ()
        done = nursery.run(*self.words, *keep, "hydra.run.dir=run", cwd=place, events=begun)
        assert done.code == -signal.SIGKILL, done.err
        self.step = 1
        assert self.saved() == 1

    def advances(self, cell: Cell) -> bool:
        """Whether the step that the signal meets is done afterwards."""
        return cell.signal == "STOP" or (self.command.trains and cell.signal not in FATAL)

    def disturb(self, cell: Cell) -> None:
        """One process of the chain; AssertionError where anything is not as it should be."""
        started = self.nursery.start("resume", "run", cwd=self.place, events=cell.events(self.command))
        if cell.signal == "STOP":
            pause(started)
        done = started.wait()
        self.step += self.advances(cell)
        expected = -signal.SIGKILL if cell.signal == "STOP" else FATAL.get(cell.signal, 130)
        assert done.code == expected, (done.code, done.err)
        said = self.said() if expected == 130 else []
        assert [line for line in done.err.splitlines() if not line.startswith("note:")] == said, done.err
        status = run_status.read(self.folder)[0]
        assert status is (Status.interrupted if expected == 130 else Status.killed), status
        assert happens(lambda: not marked(started.mark), END_S), "processes are left"
        assert self.saved() == self.step
        self.check_so_far()

    def finish(self) -> None:
        done = self.nursery.run("resume", "run", cwd=self.place)
        assert done.code == 0, done.err
        if self.command.trains:
            check_same(self.folder, self.undisturbed)
        else:
            for name in ("samples.jsonl", "progress.json"):
                assert (self.folder / name).read_bytes() == (self.undisturbed / name).read_bytes()

    def said(self) -> list[str]:
        go_on = "resume with: rlft resume run"
        if self.command.trains:
            return [HEARD, f"stopped after step {self.step}, which is saved; {go_on}"]
        state = self.progress()
        kept = f"{state['kept']:,} of {state['sampled']:,} completions are kept in run/samples.jsonl"
        return [f"interrupted after step {self.step}: {kept}; {go_on}"]

    def progress(self) -> dict[str, Any]:
        return json.loads((self.folder / "progress.json").read_text())

    def saved(self) -> int:
        """The step after which a resume goes on."""
        if not self.command.trains:
            return self.progress()["step"]
        return int(checkpoints(self.folder)[-1].name.removeprefix("step_"))

    def check_so_far(self) -> None:
        if self.command.trains:
            check_so_far(self.folder, self.undisturbed)
            return
        size, file = self.progress()["bytes"], "samples.jsonl"
        assert size > 0
        assert (self.folder / file).read_bytes()[:size] == (self.undisturbed / file).read_bytes()[:size]


def pause(started: Started) -> None:
    """Waits until the job is stopped, and lets all of it go on after longer than any of its limits."""
    started.wait_until_stopped()
    time.sleep(PAUSE_S)
    for pid in {*marked(started.mark), started.pid}:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def run_command(
    name: str, nursery: Nursery, place: Path, chosen: Iterable[Cell] | None = None
) -> list[tuple[Cell, str]]:
    """Each cell with what was wrong with it, empty for nothing; AssertionError where the end is not the same."""
    command = COMMANDS[name]
    all_cells = list(cells(command) if chosen is None else chosen)
    chain = Chain(name, command, all_cells, nursery, place)
    found = []
    for cell in all_cells:
        problem = ""
        try:
            chain.disturb(cell)
        except (AssertionError, psutil.Error) as error:
            problem = " ".join(str(error).split())[:400] or "failed"
            chain.step = chain.saved()
        print(f"{name:<7}{cell.stage:<12}{cell.signal:<6}{cell.scope:<11}{problem or 'same'}", flush=True)
        found.append((cell, problem))
    chain.finish()
    print(f"{name}: resumed to the end, bit for bit the undisturbed run", flush=True)
    return found


def main() -> None:
    failed = 0
    with closing(Nursery(hash_seed=3)) as nursery, tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or COMMANDS:
            (place := Path(folder) / name).mkdir()
            begun, used = time.monotonic(), psutil.cpu_times()
            found = run_command(name, nursery, place)
            bad = [cell for cell, problem in found if problem]
            failed += len(bad)
            seconds, processor = time.monotonic() - begun, psutil.cpu_times().user - used.user
            print(f"{name}: {len(found) - len(bad)} of {len(found)} cells; {seconds:.0f} s, machine {processor:.0f} s")
            for stage in COMMANDS[name].stages:
                row = [[not p for c, p in found if (c.stage, c.signal) == (stage, s)] for s in SIGNALS]
                counts = (f"{s} {sum(r)}/{len(r)}" for s, r in zip(SIGNALS, row, strict=True))
                print(f"  {stage:<12}{'  '.join(counts)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
