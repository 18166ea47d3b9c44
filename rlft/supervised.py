"""The loop of `rlft sft` and `rlft rm`: a step is one optimizer update on examples that derive from (seed, step).

What is learned, from what and how it is measured is a Lesson's; the run around it (folder, loggers, checkpoints, an
interruption saved, exact resume) is the same for all of them, and the same as `rlft train`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from rlft import runfolder
from rlft.interrupt import Interrupt
from rlft.logger.hints import not_finite
from rlft.logger.loggers import Loggers
from rlft.memory import keep_blocks
from rlft.metrics import Clock, peak_memory_bytes
from rlft.model.backbone import resolve_device
from rlft.out_of_memory import explained
from rlft.rehearsal import told
from rlft.seeds import derive
from rlft.session import BrokenRunError, same_every_time, told_how_it_ends
from rlft.trainer import checkpoint
from rlft.trainer.checkpoint import Checkpoint
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.schedule import learning_rate
from rlft.types import Evaluation, Logger, RunInfo, StepRecord
from rlft.work import Outcome, Say, resuming

WATCHED = ("loss", "loss/total")


class SupervisedPlan(Protocol):
    """What is known of a supervised run before a weight is loaded. notes: what the person watching should know."""

    @property
    def config(self) -> Any: ...

    @property
    def plain(self) -> Mapping[str, Any]: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def fingerprints(self) -> Mapping[str, str]: ...

    @property
    def loggers(self) -> Sequence[Logger]: ...

    @property
    def notes(self) -> Sequence[str]: ...


class Lesson(Protocol):
    """What a run learns. role: whose parameters they are, in metrics, checkpoints and messages."""

    role: str

    def parameters(self) -> list[tuple[str, Parameter]]:
        """What is trained, in a fixed order."""
        ...

    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the update that follows `step` steps; returns its metrics, loss/total among them."""
        ...

    def rehearse(self) -> None:
        """Adds the gradient of the longest examples there are, as many as are learned from at once."""
        ...

    def rehearse_evaluation(self, step: int) -> None:
        """Takes the memory that sampling for an evaluation takes at most; nothing where nothing is sampled."""
        ...

    def evaluate(self, step: int) -> Evaluation:
        """How the held-out examples are met after `step` steps."""
        ...

    def saved(self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        """All that moves, with the optimizer's tensors and these plain values."""
        ...

    def restore(self, saved: Checkpoint) -> None:
        """Goes on from what `saved` gave."""
        ...

    def sizes(self) -> Sequence[tuple[str, str, str]]:
        """Rows of the start-up table, (what, value, explanation)."""
        ...


def supervise(session: Supervised) -> int:
    """Runs steps until the last one or an interruption; returns how many are done."""
    step, num_steps = session.begin(), session.plan.num_steps
    while step < num_steps and not session.interrupted:
        clock = Clock(session.logger.stage)
        with clock("update"):
            metrics = session.update(step)
        step += 1
        metrics |= clock.metrics() | {"memory/peak_bytes": peak_memory_bytes()}
        session.record(step, metrics)
        session.evaluate_if_due(step)
        session.checkpoint_if_due(step)
    return step


class Supervised:
    """The parts of one supervised run, alive. Made by `open_supervised`, which also ends them."""

    def __init__(
        self,
        plan: SupervisedPlan,
        folder: Path,
        lesson: Lesson,
        logger: Loggers,
        interrupt: Interrupt,
        say: Say,
    ) -> None:
        self.plan, self.config, self.folder, self.lesson = plan, plan.config, folder, lesson
        self.logger, self.interrupt, self.say = logger, interrupt, say
        self.interrupted = False
        self.optimizer = Optimizer(lesson.parameters(), self.config.trainer, lesson.role)

    def begin(self) -> int:
        """Restores the newest checkpoint of a resumed run, evaluates a new one; returns the steps done."""
        saved = None
        if self.config.resume is not None:
            saved = checkpoint.load_newest(runfolder.checkpoints(self.folder), self.say)
        if saved is not None:
            self.lesson.restore(saved)
            self.optimizer.restore(saved.optimizer)
        step = 0 if saved is None else saved.step
        self.logger.start(
            RunInfo(
                folder=self.folder,
                name=self.config.name,
                config=self.plan.plain,
                step=step,
                steps=self.plan.num_steps,
                sizes=self.lesson.sizes(),
                watched=WATCHED,
            )
        )
        for note in self.plan.notes:
            self.logger.note(note)
        if self.config.resume is not None:
            self.logger.note(
                f"resumed after step {step}" if saved else "resumed from the start: there was no checkpoint yet"
            )
        self.rehearse(step)
        self.interrupt.in_step = step < self.plan.num_steps
        self.interrupted = self.interrupt.requested
        if step == 0 and not self.interrupted:
            self.evaluate_if_due(0)
        return step

    def rehearse(self, step: int) -> None:
        """The longest rows decoded, and the largest micro-batch forward and backward; nothing of it is kept."""
        with told(self.logger.note), torch.random.fork_rng():
            self.logger.stage("rehearse sampling")
            self.lesson.rehearse_evaluation(step)
            self.logger.stage("rehearse update")
            self.lesson.rehearse()
        for _, parameter in self.lesson.parameters():
            parameter.grad = None

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step, the one that follows `step` steps; returns its metrics."""
        if self.config.trainer.reset_every and step % self.config.trainer.reset_every == 0:
            self.optimizer.reset()
        torch.manual_seed(derive(self.config.seed, step, "dropout"))
        metrics = self.lesson.backward(step)
        rate = learning_rate(self.config.trainer, step, self.plan.num_steps)
        norm = self.optimizer.update(rate)
        return metrics | {f"{self.lesson.role}/lr": rate, f"{self.lesson.role}/grad_norm": norm}

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Hands a finished step to the loggers and stops the run if its numbers are broken."""
        record = StepRecord(step=step, metrics=metrics, groups=(), rewards={}, total_rewards=(), advantages=())
        self.logger.step(record)
        if broken := not_finite(record):
            raise BrokenRunError(broken.text)

    def evaluate_if_due(self, step: int) -> None:
        every = self.config.eval.every
        if not every or (step % every and step != self.plan.num_steps):
            return
        self.logger.stage("evaluate")
        self.logger.evaluation(self.lesson.evaluate(step))

    def checkpoint_if_due(self, step: int) -> None:
        every, last = self.config.checkpoint.every, step == self.plan.num_steps
        self.interrupted = self.interrupt.requested
        self.interrupt.in_step = not last
        if not (last or self.interrupted or (every and step % every == 0)):
            return
        self.logger.stage("checkpoint")
        state = {"seed": self.config.seed, **self.plan.fingerprints}
        saved = self.lesson.saved(step, self.optimizer.state(), state)
        checkpoint.save(runfolder.checkpoints(self.folder), saved, self.config.checkpoint.keep)


@contextlib.contextmanager
def open_supervised(
    plan: SupervisedPlan,
    folder: Path,
    open_lesson: Callable[[ExitStack], Lesson],
    say: Say,
) -> Iterator[Supervised]:
    """The session of this plan in this folder; open_lesson loads the model, and leaves on the stack how to end it."""
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(say))
        logger = Loggers(plan.loggers)
        stack.enter_context(explained(logger, plan.config, resuming(folder)))
        keep_blocks(plan.config.token_budget)
        stack.enter_context(same_every_time(resolve_device(plan.config.model.device)))
        lesson = open_lesson(stack)
        session = Supervised(plan, folder, lesson, logger, interrupt, say)
        ending = told_how_it_ends(logger, lambda: session.interrupted)
        with ending, explained(logger, plan.config, resuming(folder)):
            yield session


def learn(plan: SupervisedPlan, folder: Path, open_lesson: Callable[[ExitStack], Lesson], say: Say) -> Outcome:
    """Does the whole run, or what of it comes before an interruption."""
    with open_supervised(plan, folder, open_lesson, say) as session:
        step = supervise(session)
        return Outcome(step=step, interrupted=session.interrupted and step < plan.num_steps)
