"""The loop of `rlft sft`, `rm` and `dpo`: a step is one optimizer update on examples that derive from (seed, step).

A SupervisedTask says what is learned, from which data and how it is measured. The run around it (folder, loggers,
checkpoints, saved interruptions, exact resume) is the same for all tasks, and the same as that of `rlft train`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.nn import Parameter

from rlft.algorithm.ops.aggregate import negative_log_likelihood
from rlft.config.model import LoraSettings
from rlft.generation.engine import NO_FACTS, Generator
from rlft.logger.alarms import not_finite
from rlft.loop.driver import OpenRun, Outcome, RunDriver, open_run
from rlft.loop.parts import load_for_training
from rlft.model.backbone import Adopt
from rlft.model.full_weights import MODEL
from rlft.model.networks import Networks
from rlft.model.roles import POLICY, Roles, policy_alone
from rlft.plan.run_plan import Plan
from rlft.plan.startup_table import Facts, facts_of
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.lines import StepRecord
from rlft.system.terminal import Say, resuming
from rlft.trainer.optimizer import Optimizer, begin_step, optimizer_step
from rlft.trainer.update import text_passes, total_of
from rlft.types import Batch, Evaluation

AnyPlan = TypeVar("AnyPlan", bound=Plan)


class SupervisedTask(ABC, Generic[AnyPlan]):
    """What a supervised run learns, by one adapter or by a whole model. A subclass adds how it is learned and measured.

    Attributes:
        learner: the adapters on their base, or the whole model.
        role: names the trained network in metrics, checkpoints and messages.
        generator: samples for evaluations; None if nothing is sampled.
    """

    generator: Generator | None = None

    def __init__(self, plan: AnyPlan, learner: Networks, role: str | None = None) -> None:
        self.plan, self.config, self.learner = plan, plan.config, learner
        self.role = role or (MODEL if learner.is_whole else POLICY)

    @abstractmethod
    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the update that follows `step` steps; returns its metrics, loss/total among them."""

    @abstractmethod
    def rehearse(self) -> None:
        """Adds the gradient of the largest micro-batch of the longest examples, to take the most memory."""

    @abstractmethod
    def evaluate(self, step: int) -> Evaluation:
        """Evaluates on the held-out examples after `step` steps."""

    def rehearse_sampling(self, step: int) -> None:
        """Takes the most memory that sampling for an evaluation needs; does nothing if nothing is sampled."""

    def parameters(self) -> list[tuple[str, Parameter]]:
        """The trained parameters with their names, in a fixed order."""
        return self.learner.named_parameters(self.role)

    def saved(
        self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any], *, for_chain: bool = False
    ) -> Checkpoint:
        """The checkpoint: all trained weights, the optimizer's tensors and these plain values.

        `for_chain`: only what takes no forward pass to compute.
        """
        kept = self.learner.kept([self.role])
        return Checkpoint(
            step=step,
            adapters=kept.adapters,
            adapter_config=self.learner.adapter_config(),
            write_folders=kept.folders,
            optimizer=optimizer,
            state=state,
        )

    def restore(self, saved: Checkpoint) -> None:
        """Loads what `saved` returned."""
        self.learner.restore_roles([self.role], saved.adapters, saved.folder)


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


def likelihood_gradient(learner: Networks, batch: Batch, token_budget: int) -> dict[str, float]:
    """Adds the gradient of the mean negative log-prob (nats) over the batch's learned tokens; returns its metrics."""
    losses, real, network = [], 0, 0
    with learner.training():
        for micro, loss in text_passes(learner, batch, token_budget, negative_log_likelihood):
            losses.append(loss)
            real += micro.real_tokens
            network += micro.network_tokens
    return {
        "loss/total": total_of(losses),
        "tokens/completion": int(batch.loss_mask.sum()),
        "tokens/trained": real,
        "waste/padding_fraction": (network - real) / network,
    }


class SupervisedRun(RunDriver):
    """The state of one supervised run, which `train_supervised` opens and closes."""

    def __init__(self, run: OpenRun, task: SupervisedTask[Any]) -> None:
        super().__init__(run, task.generator)
        self.task = task
        self.chains_state = not task.learner.is_whole
        self.optimizer = Optimizer(task.parameters(), self.config.trainer, task.role)

    def train(self) -> int:
        """Runs steps until the last one or an interruption; returns the number of steps done."""
        saved = self.start()
        step = 0 if saved is None else saved.step
        while step < self.plan.num_steps and not self.interrupted:
            with self.clock("update"):
                metrics = self.update(step)
            step += 1
            self.record(step, metrics)
            self.evaluate_if_due(step)
            self.checkpoint_if_due(step, partial(self.checkpoint, step))
        return step

    def restore(self, saved: Checkpoint) -> None:
        self.task.restore(saved)
        self.optimizer.restore(saved.optimizer)

    def facts(self) -> Facts:
        learner, copies = self.task.learner, self.base_copies()
        engine = NO_FACTS if self.task.generator is None else self.task.generator.facts
        return facts_of(learner.model, self.task.parameters(), learner.backbone, learner.forward, copies, engine)

    def rehearse_sampling(self, step: int) -> None:
        self.task.rehearse_sampling(step)

    def rehearse_update(self) -> None:
        self.task.rehearse()
        for _, parameter in self.task.parameters():
            parameter.grad = None

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step, the one that follows `step` steps; returns its metrics."""
        begin_step([self.optimizer], self.config.seed, step)
        metrics = self.task.backward(step)
        return metrics | optimizer_step([self.optimizer], step, self.plan.num_steps)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Hands a finished step to the loggers; stops the run if a number is not finite."""
        metrics |= self.clock.end_step()
        with self.clock("log"):
            record = StepRecord(step=step, metrics=metrics, groups=(), rewards={}, total_rewards=(), advantages=())
            broken = not_finite(record)
            self.log(record, [] if broken is None else [broken])

    def evaluation(self, step: int) -> Evaluation:
        return self.task.evaluate(step)

    def checkpoint(self, step: int, *, for_chain: bool = False) -> Checkpoint:
        state = self.state_values(for_chain=for_chain)
        return self.task.saved(step, self.optimizer.state(), state, for_chain=for_chain)


def train_supervised(
    plan: Plan, folder: Path, open_task: Callable[[ExitStack], SupervisedTask[Any]], say: Say
) -> Outcome:
    """Does the whole run, up to its end or an interruption.

    `open_task` loads the model, and the stack closes whatever it opens; `say` prints a line.
    """
    with open_run(plan, folder, say, resuming(folder)) as opened, ExitStack() as stack:
        run = SupervisedRun(opened, open_task(stack))
        with run.running():
            return run.outcome_of(run.train)
