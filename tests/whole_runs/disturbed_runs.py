"""One run in processes that are killed, stopped or fail, one after the other, next to the same run undisturbed.

After each process what is there must be a beginning of what the undisturbed run left, and no process of it is alive.
The last one goes on to the end, where all must be the same, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from run_folders import KILLED, SAMPLED, check_same, check_so_far, checkpoints, is_whole, metrics
from run_processes import Ended, Nursery, Started, happens, is_alive, marked

from rlft.runs import run_status
from rlft.runs.run_status import Status

Event = dict[str, Any]
Check = Callable[[Ended, Path], None]
"""Of how a process has ended, and what it left in the run's folder."""
END_S = 60.0

SAMPLING = "rlft.loop.session:Session.sample"
DECODE = "rlft.generation.transformers:decode"
SCORING = "rlft.loop.session:Session.score"
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
PUBLISHED = "rlft.loop.session:Session.publish"
RECORD = "rlft.loop.session:Session.record"
EVALUATED = "rlft.loop.metrics:summarise"
SAVED = "rlft.runs.checkpoint:save"

HEARD = "interrupted: finishing this step, then saving; once more stops at once"
HEARD_BEFORE = "interrupted: ending before a step is begun; once more stops at once"
HEARD_AT_THE_END = "interrupted: saving the last step; once more stops at once"
GIVEN_UP = "interrupted: saving the last finished step; once more stops at once"
CAUSES = {
    "ENOSPC": "the disk is full (No space left on device)",
    "EDQUOT": "your disk quota is used up (Disk quota exceeded)",
    "EIO": "the disk failed (Input/output error)",
    "EROFS": "the file system can only be read (Read-only file system)",
    "EACCES": "writing is not permitted (Permission denied)",
    "ESTALE": "the file system is gone (Stale file handle)",
    "EFBIG": "no file may become that large here (File too large)",
}


def nothing(started: Started) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Hit:
    """What befalls a process of a run (launcher.py), and how it ends.

    words: what it is told in addition. meanwhile: what is done from outside. workers: how many processes it has that
    work for it, at the least.
    """

    events: Sequence[Event]
    ends: Check
    words: tuple[str, ...] = ()
    meanwhile: Callable[[Started], None] = nothing
    workers: int = 0

    def told(self, *words: str, workers: int = 0) -> Hit:
        return replace(self, words=words, workers=workers)


def killed(place: str, call: int = 1, when: str = "before", **more: Any) -> Hit:
    return Hit(events=[{"at": place, "call": call, "when": when, "do": "kill", **more}], ends=by_a_kill)


def torn(file: str, call: int = 1) -> Hit:
    """Killed when the write of a file is done by half."""
    return Hit(events=[{"half": file, "call": call}], ends=by_a_kill)


def by_a_kill(done: Ended, folder: Path) -> None:
    assert done.code == KILLED, done.err


def pressed(place: str, call: int, do: str = "interrupt", when: str = "before", seconds: float = 0.0) -> list[Event]:
    """A signal at that place; with `seconds`, the step then takes so much longer."""
    at = {"at": place, "call": call, "when": when}
    # What is planted last happens first.
    return [*([{**at, "do": "wait", "seconds": seconds}] if seconds else []), {**at, "do": do}]


def stopped(step: int, heard: str, *where: Any, **more: Any) -> Hit:
    """Told to stop, as `pressed` says, it ends after that step, which its checkpoint holds."""
    return Hit(events=pressed(*where, **more), ends=after_step(step, heard))


def after_step(step: int, heard: str) -> Check:
    def ends(done: Ended, folder: Path) -> None:
        after = f"after step {step}, which is saved" if step else "before the first step"
        check_interrupted(done, folder, [heard, f"stopped {after}; resume with: rlft resume {folder.name}"])
        assert [found.name for found in checkpoints(folder)][-1:] == [f"step_{step:06d}"] * (step > 0)
        if heard != GIVEN_UP:  # the lines of a step that is given up may be there, and are dropped when it is resumed
            assert [line["step"] for line in metrics(folder)] == list(range(1, step + 1))

    return ends


def stopped_at_once(step: int, said: Sequence[str], *events: Event) -> Hit:
    """Told so, it ends without the step in progress, and that one is the last that is saved."""

    def ends(done: Ended, folder: Path) -> None:
        saved = f"step {step} is saved" if step else "no step is saved"
        check_interrupted(done, folder, [*said, f"stopped at once; {saved}; resume with: rlft resume {folder.name}"])
        assert [found.name for found in checkpoints(folder)][-1:] == [f"step_{step:06d}"] * (step > 0)

    return Hit(events=events, ends=ends)


def check_interrupted(done: Ended, folder: Path, said: Sequence[str]) -> None:
    assert (done.code, without_notes(done)) == (130, [*said]), done.err
    assert run_status.read(folder)[0] is Status.interrupted


def failing(place: str, call: int = 1) -> Hit:
    """An exception that nobody foresaw."""

    def ends(done: Ended, folder: Path) -> None:
        assert done.code == 1
        assert "RuntimeError: this failure was planted; its traceback is in run/error.txt" in done.err

    return Hit(events=[{"at": place, "call": call, "do": "fail"}], ends=ends)


def full(named: str, file: str, call: int = 1, error: str = "ENOSPC") -> Hit:
    """The disk fails when the write of a file is done by half; named: what the message says that it was for."""
    return of_the_disk(named, error, {"half": file, "call": call, "raises": error})


def of_the_disk(named: str, error: str, *events: Event) -> Hit:
    """One line, nothing half written, and the run, if there is one, says why it has stopped."""

    def ends(done: Ended, folder: Path) -> None:
        [line] = without_notes(done)
        assert done.code == 1, line
        assert line.startswith(f"rlft: stopped: {CAUSES[error]}: {folder.name}")
        assert f" for {named} and has " in line
        assert [path.name for path in folder.rglob("*") if ".writing" in path.name or path.suffix == ".tmp"] == []
        assert all(map(is_whole, checkpoints(folder)))
        if (folder / "config.yaml").exists():
            assert line.endswith(f", then resume with: rlft resume {folder.name}")
            status = json.loads((folder / "status.json").read_text())
            assert (status["status"], f"rlft: stopped: {status['reason']}") == ("stopped", line)
        else:
            assert line.endswith(", then repeat the command")
            assert not folder.exists()

    return Hit(events=events, ends=ends)


def finished(said: list[str] | None = None) -> Check:
    """With these lines and no other, if any are given: none for an empty list."""

    def ends(done: Ended, folder: Path) -> None:
        assert (done.code, said is None or without_notes(done)) == (0, said is None or said), done.err

    return ends


def to_the_end(*words: str) -> Hit:
    return Hit(events=[], ends=finished(), words=words)


def without_notes(done: Ended) -> list[str]:
    return [line for line in done.err.splitlines() if not line.startswith("note: ")]


def check_disturbed(
    nursery: Nursery, place: Path, undisturbed: Path, begin: Sequence[str], hits: Sequence[Hit], last: Hit | None = None
) -> None:
    """The run in `place`/run, which these words begin, and which ends with the last process."""
    folder, seen = place / "run", place / "seen"
    look = {"at": SCORING, "do": "note", "when": "after", "to": str(seen)}
    for hit in (*hits, last or to_the_end()):
        words = ("resume", "run") if (folder / "config.yaml").exists() else (*begin, "hydra.run.dir=run")
        seen.write_text("")
        events = [look, *hit.events] if hit.workers else hit.events
        started = nursery.start(*words, *hit.words, cwd=place, events=events)
        hit.meanwhile(started)
        hit.ends(started.wait(), folder)
        children = [child for line in seen.read_text().splitlines()[:1] for child in json.loads(line)["children"]]
        assert len(children) >= hit.workers, "they were there"
        # Both: a process on its way out has no environment any more, and one that came later was not seen.
        mark = started.mark
        assert happens(lambda mark=mark, had=children: not marked(mark) and not any(map(is_alive, had)), END_S)
        check_so_far(folder, undisturbed)
    check_same(folder, undisturbed)


# -- every signal in every stage of a step -----------------------------------------------------------------------------
SIGNALS = {"INT": "interrupt", "TERM": "terminate", "HUP": "hang up", "USR1": "warn",
           "USR2": "warn again", "QUIT": "quit", "KILL": "kill", "STOP": "stop"}  # fmt: skip
FATAL = {"QUIT": -signal.SIGQUIT, "KILL": KILLED, "STOP": KILLED}
"""What ends a process at once. After a stop and a pause it does one more step, and is killed."""
PAUSE_S = 2.5
"""How long a job is stopped: beyond `scoring.timeout` and the pool's own second of grace."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a command is run, and where a step's stages are. next_step: where the second step of a process begins."""

    words: tuple[str, ...]
    stages: Sequence[Event]
    next_step: Event
    steps: str = "steps"

    @property
    def trains(self) -> bool:
        return self.steps == "steps"

    def hits(self) -> tuple[int, list[Hit]]:
        """Every stage x signal x the main process alone or every process of the job; and the run's steps."""
        begun = {**self.next_step, "do": "kill"}
        step, hits = 1, [Hit(events=[begun], ends=self._after(1, "KILL"))]
        for at in self.stages:
            for name, do in SIGNALS.items():
                for who in ("main", "everybody"):
                    events = [{**at, "do": do, "who": who}, *([begun] if name == "STOP" else [])]
                    step += name == "STOP" or (self.trains and name not in FATAL)
                    meanwhile = pause if name == "STOP" else nothing
                    hits.append(Hit(events=events, ends=self._after(step, name), meanwhile=meanwhile))
        return step + 2, hits  # one that is killed at its beginning, and a last one

    def _after(self, step: int, name: str) -> Check:
        def ends(done: Ended, folder: Path) -> None:
            state = {} if self.trains else json.loads((folder / SAMPLED[1]).read_text())
            saved = int(checkpoints(folder)[-1].name.removeprefix("step_")) if self.trains else state["step"]
            assert saved == step, "a resume goes on after it"
            if name in FATAL:
                assert (done.code, without_notes(done)) == (FATAL[name], []), done.err
                assert run_status.read(folder)[0] is Status.killed
            elif self.trains:
                go_on = "resume with: rlft resume run"
                check_interrupted(done, folder, [HEARD, f"stopped after step {step}, which is saved; {go_on}"])
            else:
                kept = f"{state['kept']:,} of {state['sampled']:,} completions are kept in run/samples.jsonl"
                go_on = "resume with: rlft resume run"
                check_interrupted(done, folder, [f"interrupted after step {step}: {kept}; {go_on}"])

        return ends


def pause(started: Started) -> None:
    """Waits until the job is stopped, and lets all of it go on after longer than any of its limits."""
    started.wait_until_stopped()
    time.sleep(PAUSE_S)
    for pid in {*marked(started.mark), started.pid}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
