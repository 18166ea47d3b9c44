"""The loop of `rlft sft`, `rm` and `dpo`: a step is one optimizer update on examples that derive from (seed, step).

A Lesson says what is learned, from which data and how it is measured. The run around it (folder, loggers, checkpoints,
saved interruptions, exact resume) is the same for all lessons, and the same as that of `rlft train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import Parameter

from rlft.algorithm.ops.likelihood import negative_log_likelihood
from rlft.batch import select
from rlft.config.model import LoraSettings
from rlft.logger.hints import not_finite
from rlft.logger.loggers import Loggers
from rlft.loop.base_loading import load_for_training
from rlft.loop.metrics import Clock, peak_memory_bytes
from rlft.loop.outcome import Outcome
from rlft.loop.shell import RunShell, open_run, shared_base_of
from rlft.model.backbone import Adopt
from rlft.model.full_weights import WholeModel
from rlft.model.roles import POLICY, Roles, policy_alone
from rlft.plan.run_plan import Plan
from rlft.plan.startup_table import Facts, facts_of
from rlft.runs.checkpoint import Checkpoint
from rlft.system.interrupt import Interrupt
from rlft.system.seeds import derive
from rlft.system.terminal import Say, resuming
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.schedule import learning_rate
from rlft.types import Batch, Evaluation, StepRecord

AnyPlan = TypeVar("AnyPlan", bound=Plan)


class Lesson(Protocol):
    """What a supervised run learns. `role` names the trained network in metrics, checkpoints and messages."""

    role: str

    def parameters(self) -> list[tuple[str, Parameter]]:
        """The trained parameters with their names, in a fixed order."""
        ...

    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the update that follows `step` steps; returns its metrics, loss/total among them."""
        ...

    def rehearse(self) -> None:
        """Adds the gradient of the largest micro-batch of the longest examples, to take the most memory."""
        ...

    def rehearse_evaluation(self, step: int) -> None:
        """Takes the most memory that sampling for an evaluation needs; does nothing if nothing is sampled."""
        ...

    def evaluate(self, step: int) -> Evaluation:
        """Evaluates on the held-out examples after `step` steps."""
        ...

    def saved(self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint: all trained weights, the optimizer's tensors and these plain values."""
        ...

    def restore(self, saved: Checkpoint) -> None:
        """Loads what `saved` returned."""
        ...

    def facts(self) -> Facts:
        """The facts about the model that the start-up table prints."""
        ...


class AdapterLesson(Generic[AnyPlan]):
    """A lesson of one adapter on the frozen base; a subclass says what it learns: backward, rehearse, evaluate."""

    def __init__(self, plan: AnyPlan, roles: Roles, role: str = POLICY) -> None:
        self.plan, self.config, self.roles, self.role = plan, plan.config, roles, role

    def parameters(self) -> list[tuple[str, Parameter]]:
        return self.roles.named_parameters(self.role)

    def rehearse_evaluation(self, step: int) -> None:
        """Nothing is sampled."""

    def saved(self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        return Checkpoint(
            step=step,
            adapters={self.role: self.roles.weights(self.role)},
            adapter_config=self.roles.adapter_config(),
            optimizer=optimizer,
            state=state,
        )

    def restore(self, saved: Checkpoint) -> None:
        self.roles.restore_role(self.role, saved.adapters[self.role])

    def facts(self) -> Facts:
        return facts_of(self.roles.model, self.parameters(), self.roles.backbone, self.roles.forward)


def open_policy(
    config: Any, lora: LoraSettings, stack: ExitStack, adopt: Adopt | None = None, reference: str = "none"
) -> Roles:
    """Loads the base of this config with the policy's adapter; the stack closes them.

    adopt: as in `read_backbone`. reference: as in `policy_alone`.
    """
    backbone = load_for_training(config.model, lora, config.token_budget, adopt=adopt)
    roles = policy_alone(backbone, lora, token_budget=config.token_budget, seed=config.seed, reference=reference)
    stack.callback(roles.close)
    return roles


def likelihood_gradient(learner: Roles | WholeModel, batch: Batch, token_budget: int) -> dict[str, float]:
    """Adds the gradient of the mean negative log-prob (nats) over the batch's learned tokens; returns its metrics."""
    forward, num_tokens, total, real, network = learner.forward, int(batch.loss_mask.sum()), 0.0, 0, 0
    with learner.training():
        for part in forward.micro_batches(batch, torch.arange(len(batch.rewards)), token_budget):
            micro = learner.to_device(select(batch, part))
            loss = negative_log_likelihood(forward(micro, 1.0).logprobs, micro.loss_mask, num_tokens)
            loss.backward()
            learner.check_gradients()
            total += loss.item()
            real += forward.real_tokens(micro)
            network += forward.network_tokens(micro)
    return {
        "loss/total": total,
        "tokens/completion": num_tokens,
        "tokens/trained": real,
        "waste/padding_fraction": (network - real) / network,
    }


def supervise(session: Supervised) -> int:
    """Runs steps until the last one or an interruption; returns the number of steps done."""
    step, num_steps = session.begin(), session.plan.num_steps
    while step < num_steps and not session.interrupted:
        clock = Clock(session.stage)
        with clock("update"):
            metrics = session.update(step)
        step += 1
        metrics |= clock.metrics() | {"memory/peak_bytes": peak_memory_bytes()}
        session.record(step, metrics)
        session.evaluate_if_due(step)
        session.checkpoint_if_due(step, partial(session.checkpoint, step))
    return step


class Supervised(RunShell):
    """The state of one supervised run, which `learn` opens and closes."""

    def __init__(
        self, plan: Plan, folder: Path, lesson: Lesson, logger: Loggers, interrupt: Interrupt, say: Say
    ) -> None:
        super().__init__(plan, folder, logger, interrupt, say)
        self.plan, self.config, self.lesson = plan, plan.config, lesson
        self.shared_base = shared_base_of(getattr(lesson, "generator", None))
        self.optimizer = Optimizer(lesson.parameters(), self.config.trainer, lesson.role)

    def begin(self) -> int:
        """Restores the newest checkpoint of a resumed run, evaluates a new one; returns the steps done."""
        saved = self.start()
        return 0 if saved is None else saved.step

    def restore(self, saved: Checkpoint) -> None:
        self.lesson.restore(saved)
        self.optimizer.restore(saved.optimizer)

    def facts(self) -> Facts:
        return replace(self.lesson.facts(), base_copies=self.base_copies())

    def rehearse_sampling(self, step: int) -> None:
        self.lesson.rehearse_evaluation(step)

    def rehearse_update(self) -> None:
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
        """Hands a finished step to the loggers; stops the run if a number is not finite."""
        record = StepRecord(step=step, metrics=metrics, groups=(), rewards={}, total_rewards=(), advantages=())
        broken = not_finite(record)
        self.log(record, [] if broken is None else [broken])

    def evaluation(self, step: int) -> Evaluation:
        return self.lesson.evaluate(step)

    def checkpoint(self, step: int) -> Checkpoint:
        """The checkpoint after these steps."""
        return self.lesson.saved(step, self.optimizer.state(), self.state_values())


def learn(plan: Plan, folder: Path, open_lesson: Callable[[ExitStack], Lesson], say: Say) -> Outcome:
    """Does the whole run, up to its end or an interruption.

    Args:
        plan: the planned run.
        folder: the run's folder.
        open_lesson: loads the model; the stack closes whatever it opens.
        say: prints a line.
    """

    def put_together(stack: ExitStack, logger: Loggers, interrupt: Interrupt) -> Supervised:
        return Supervised(plan, folder, open_lesson(stack), logger, interrupt, say)

    with open_run(plan, say, resuming(folder), put_together) as session:
        return session.outcome_of(lambda: supervise(session))
