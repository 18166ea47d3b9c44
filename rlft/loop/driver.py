"""What surrounds the steps of every training run: before the first one, after each one, and at the end.

`rlft train`, `sft`, `rm` and `dpo` differ in their steps. Resuming, loggers, notes, the rehearsal, evaluations,
checkpoints and interruptions are the same for all of them, and are implemented here.
"""

from __future__ import annotations

import contextlib
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlft.config import command as commands
from rlft.config.command import LOSS
from rlft.config.trainer import FLAT, CheckpointConfig
from rlft.generation.engine import Generator
from rlft.generation.memory import in_words
from rlft.logger.alarms import Hint
from rlft.logger.interface import RunInfo
from rlft.logger.loggers import Loggers, own_loggers
from rlft.loop.metrics import Clock
from rlft.loop.parts import base_sharing_obstacle, largest_of
from rlft.plan.run_plan import Facts, Plan
from rlft.runs import checkpoint, run_folder
from rlft.runs.chain import Chain, made_on
from rlft.runs.checkpoint import CHECKSUMS, Checkpoint
from rlft.runs.forecast import newly_flat, trend_of
from rlft.runs.lines import EVALUATIONS, StepRecord, read_lines, silent
from rlft.system.device import fork_rng, peak_memory_bytes, repeatable, resolve_device, to_cpu
from rlft.system.interrupt import Interrupt, StepAbandoned
from rlft.system.machine import machine
from rlft.system.memory import explained, gc_frozen, keep_blocks
from rlft.system.terminal import Say
from rlft.types import Evaluation


class BrokenRunError(RuntimeError):
    """A number is not finite; this step was not saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The number of steps that a run has finished, and whether it ended before its last one."""

    step: int
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """What a run has before its model is loaded, which `open_run` opens and closes."""

    plan: Any
    folder: Path
    logger: Loggers  # the run's loggers; notes are printed until they have started
    interrupt: Interrupt
    # The command that resumes the run after a failure; None for an evaluation, which has no step to finish when it is
    # interrupted.
    again: str | None

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a memory error is explained by the stage in which it happens."""
        return explained(self.logger, self.plan.config, self.again, largest_of(self.plan))


class RunDriver(ABC):
    """The parts of a run around its steps. A subclass adds a command's own parts and steps.

    `chains_state` says whether the chain has digests of what a checkpoint would hold after each step; the generator
    samples in this run, if anything does.
    """

    chains_state = True

    def __init__(self, run: OpenRun, generator: Generator | None = None) -> None:
        self.run, self.folder, self.logger, self.interrupt = run, run.folder, run.logger, run.interrupt
        self.plan: Any = run.plan
        self.config: Any = run.plan.config
        self.shared_base = None if generator is None else generator.shared_base
        root = run_folder.checkpoints(run.folder)
        self.chain = Chain(run.folder)
        self.saver = Saver(root, self.config.checkpoint, run.interrupt, run.plan.num_steps, self.chain.flush)
        self.clock = Clock(self.stage)  # of the loop, which begins with `start`'s last line

    # -- what a command's run implements -------------------------------------------------------------------------------
    @abstractmethod
    def restore(self, saved: Checkpoint) -> None:
        """Restores the whole state of a checkpoint."""

    @abstractmethod
    def facts(self) -> Facts:
        """The facts about the model for the start-up table."""

    @abstractmethod
    def rehearse_sampling(self, step: int) -> None:
        """Takes the most memory that sampling needs; does nothing if nothing is sampled."""

    @abstractmethod
    def rehearse_update(self) -> None:
        """Takes the most memory that an update needs. Leaves no gradient."""

    @abstractmethod
    def evaluation(self, step: int) -> Evaluation:
        """Evaluates on the held-out data after `step` steps."""

    # -- before the first step -----------------------------------------------------------------------------------------
    @property
    def interrupted(self) -> bool:
        """Whether the run ends before its next step."""
        return self.saver.interrupted or self.saver.stopping

    def stage(self, name: str) -> None:
        """Enters a stage of the loop, unless the step is to be abandoned."""
        self.interrupt.check()
        self.logger.stage(name)

    def start(self) -> Checkpoint | None:
        """Restores the newest checkpoint of a resumed run, starts the loggers, rehearses, and evaluates a new run.

        Returns the checkpoint that the run continues from; None for a new run.
        """
        saved = None
        if self.config.resume is not None:
            saved = checkpoint.load_newest(run_folder.checkpoints(self.folder), self.logger.note)
        if saved is not None:
            self.restore(saved)
            if self.shared_base is not None:
                self.shared_base.check_content(saved.state.get(CHECKSUMS))
        step, facts = 0 if saved is None else saved.step, self.facts()
        headline = commands.named(self.config.command).headline or LOSS
        info = RunInfo(
            folder=self.folder,
            name=self.config.name,
            config=self.plan.plain,
            step=step,
            steps=self.plan.num_steps,
            sizes=self.plan.loaded_rows(facts),
            watched=(headline.label, headline.metric),
        )
        self.logger.start(info)
        made = made_on(machine(resolve_device(self.config.model.device)), self.plan.engine)
        self.chain.start(-1 if saved is None else step, self.plan.fingerprints, made)
        if self.config.resume is not None:
            where = f"after step {step}" if saved else "from the start: there was no checkpoint yet"
            self.logger.note(f"resumed {where}")
        for note in self.plan.notes_with(facts):
            self.logger.note(note)
        self.rehearse(step)
        self.saver.begin(step)
        if saved is not None:
            self.judge(step)
        self.clock.end_step()
        is_new = step == 0 and not self.interrupted
        if is_new:
            self.evaluate_if_due(0)
        with self.clock("seal"):  # no line of metrics lacks it, by which `rlft.runs.forecast` knows its meaning
            if is_new:
                self.chain.seal(0)
        return saved

    def rehearse(self, step: int) -> None:
        """Decodes the longest rows, and runs the largest micro-batch forward and backward; keeps nothing."""
        start = time.monotonic()
        with fork_rng(resolve_device(self.config.model.device)):
            self.logger.stage("rehearse sampling")
            self.rehearse_sampling(step)
            self.logger.stage("rehearse update")
            self.rehearse_update()
        time_and_memory = f"{time.monotonic() - start:.1f} s, {in_words(peak_memory_bytes())} at most so far"
        self.logger.note(f"the longest rows of this run fit into memory ({time_and_memory})")

    # -- after a step --------------------------------------------------------------------------------------------------
    def log(self, record: StepRecord, hints: Iterable[Hint]) -> None:
        """Hands a finished step and its hints to the loggers. Raises BrokenRunError: a hint is fatal."""
        self.logger.step(record)
        self.chain.add_step(record)
        for hint in hints:
            if hint.fatal:
                raise BrokenRunError(hint.text)
            self.logger.note(hint.text)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluates every `eval.every` steps and after the last one; 0 means never."""
        every = self.config.eval.every
        if not every or (step % every and step != self.plan.num_steps):
            return
        with self.clock("evaluate"):
            evaluation = self.evaluation(step)
            self.logger.evaluation(evaluation)
            self.chain.add_evaluation(evaluation)
            for text in evaluation.alarms.values():
                self.logger.note(f"step {step}: {text}")
            self.judge(step)

    def judge(self, step: int) -> None:
        """Notes that the held-out curve has gone flat; with stop.when=flat the run ends after this step.

        It depends on eval.jsonl alone, so that a resumed run ends at the same step.
        """
        lines, ends = read_lines(self.folder / EVALUATIONS, silent), self.config.stop.when == FLAT
        trend = trend_of(lines) if ends else newly_flat(lines)
        if trend is None or not trend.is_flat or trend.last != step:
            return
        self.saver.stopping = ends
        todo = "the run ends here (stop.when=flat)" if ends else "with stop.when=flat the run would end here"
        self.logger.note(f"step {step}: {trend}: {todo}")

    def checkpoint_if_due(self, step: int, make: Callable[..., Checkpoint]) -> None:
        """Adds the step to the chain, and saves a checkpoint if one is due; `make` returns the state after the step.

        `make(for_chain=True)` leaves out what takes a forward pass, other ranks, or a pass over the base.
        """
        with self.interrupt.saving():
            with self.clock("seal"):
                if self.chains_state:
                    state = make(for_chain=True)
                    self.chain.seal(step, checkpoint.plain_parts(state), checkpoint.tensors_of_parts(state))
                    del state  # before a checkpoint makes another one
                else:
                    self.chain.seal(step)
            self.saver.after_step(step, make, self.clock)

    def state_values(self, *, for_chain: bool = False) -> dict[str, Any]:
        """The values that the state.json of every checkpoint holds; `for_chain`: without checksums of the base."""
        base = None if for_chain else self.shared_base
        shared = {} if base is None else {CHECKSUMS: base.check_content()}
        return {"seed": self.config.seed, **self.plan.fingerprints, **shared}

    def base_copies(self) -> tuple[int, str] | None:
        """How many copies of the base the trainer and the engine hold; None where the engine does not report any."""
        if self.shared_base is not None:
            return (1, self.shared_base.text)
        if self.plan.engine is None:
            return None
        why = base_sharing_obstacle(self.config.generation.named(self.plan.engine), self.config.model)
        return (2, why) if why else None

    # -- from the first step to the last -------------------------------------------------------------------------------
    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Entered once everything is open; loggers get the reason of a failure before the exception propagates."""
        with gc_frozen():
            status = "interrupted"
            try:
                with self.run.explained():
                    yield
                    self.chain.close()
                status = "interrupted" if self.saver.interrupted else "finished"
            except Exception as error:
                status = f"stopped: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                raise
            finally:
                with contextlib.suppress(Exception):  # the failure that has ended the run is the one to tell
                    self.chain.close()
                self.logger.finish(status)

    def outcome_of(self, loop: Callable[[], int]) -> Outcome:
        """Runs `loop`, which returns the number of finished steps; if a step is abandoned, saves the one before it."""
        try:
            step = loop()
        except StepAbandoned:
            return Outcome(step=self.saver.save_last_finished(), interrupted=True)
        return Outcome(step=step, interrupted=self.saver.interrupted and step < self.plan.num_steps)


@contextlib.contextmanager
def open_run(plan: Plan, folder: Path, say: Say, again: str | None) -> Iterator[OpenRun]:
    """Opens a planned run, for the model to be loaded inside; `say` prints lines before the loggers have started."""
    config = plan.config
    interrupt = Interrupt(say, config.checkpoint.on_signal)
    loggers = Loggers(plan.loggers if again is None else (*own_loggers(config), *plan.loggers), say)
    run = OpenRun(plan=plan, folder=folder, logger=loggers, interrupt=interrupt, again=again)
    with ExitStack() as stack:
        if again is not None:
            stack.enter_context(interrupt)
        stack.enter_context(run.explained())
        keep_blocks(config.token_budget)
        stack.enter_context(deterministic_on_cpu(resolve_device(config.model.device)))
        yield run


def deterministic_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes torch add in a fixed order on a CPU, so that a repeated or resumed run is the same to the last bit.

    Otherwise threads that add to the same number (the gradient of a prompt that siblings share) do so in any order.
    This costs a few per cent. On CUDA it would cost more; there the two operations of a step that need it have a fixed
    order of their own (the backward of flash attention, `PackedRows.predicting`).
    """
    return repeatable(only_warns=True) if device.type == "cpu" else contextlib.nullcontext()


# -- checkpoints -------------------------------------------------------------------------------------------------------
class Saver:
    """Writes the checkpoints of one run into the folder `root`.

    `interrupted` says whether a signal ends the run before its next step, `stopping` whether it has done enough. If a
    step may be abandoned (checkpoint.on_signal), the state after the last finished step is kept in main memory until it
    is on disk, because the next step changes weights and optimizer. `before_saving` is called before each checkpoint.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointConfig,
        interrupt: Interrupt,
        num_steps: int,
        before_saving: Callable[[], None],
    ) -> None:
        self._root, self._settings, self._interrupt, self._num_steps = root, settings, interrupt, num_steps
        self._before_saving = before_saving
        self._finished = 0
        self._unsaved: Checkpoint | None = None
        self.interrupted = self.stopping = False

    def begin(self, step: int) -> None:
        """Called before the first step, which follows `step` steps whose state is saved or initial."""
        self._finished = step
        self._interrupt.in_step = step < self._num_steps
        self.interrupted = self._interrupt.requested

    def after_step(self, step: int, make: Callable[[], Checkpoint], clock: Clock) -> None:
        """Called after `step` steps, while none can be abandoned.

        `make` returns their state; `clock` measures how long it takes to keep it.
        """
        last, every = self.stopping or step == self._num_steps, self._settings.every
        self.interrupted = self._interrupt.requested
        self._interrupt.in_step = not last
        self._finished = step
        if self.interrupted or last or (every > 0 and step % every == 0):
            with clock("checkpoint"):
                self._save(make())
            self.interrupted = self._interrupt.requested  # a signal during the write ends the run, too
        elif self._settings.on_signal != "step":
            with clock("seal"):
                self._unsaved = in_memory(make())

    def save_last_finished(self) -> int:
        """Called when a step is abandoned: saves the state before it and returns the number of finished steps."""
        self.interrupted = True
        if self._unsaved is not None:
            self._save(self._unsaved)
        return self._finished

    def _save(self, state: Checkpoint) -> None:
        self._before_saving()
        checkpoint.save(self._root, state, self._settings.keep)
        self._unsaved = None


def in_memory(state: Checkpoint) -> Checkpoint:
    """A copy of the state in main memory, independent of the run. Its tensors must be copies already.

    Raises ValueError: the state has folders, which are written from the run's current weights.
    """
    if state.write_folders:
        raise ValueError(f"{sorted(state.write_folders)} cannot be copied: they change with the run")
    return replace(
        state,
        adapters={role: to_cpu(tensors) for role, tensors in state.adapters.items()},
        heads={role: to_cpu(tensors) for role, tensors in state.heads.items()},
        optimizer=to_cpu(state.optimizer),
        tensors={name: to_cpu(tensors) for name, tensors in state.tensors.items()},
        state=copy.deepcopy(state.state),
        records=copy.deepcopy(state.records),
    )
