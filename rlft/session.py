"""A run put together from its plan: the parts the loop works with, and what happens around a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft import runfolder
from rlft.algorithm.protocol import Algorithm
from rlft.collate import collate
from rlft.engine import Engines
from rlft.evaluate import evaluate, kl_to_base
from rlft.freshness import Freshness
from rlft.generation.config import GenerationConfig, Weights
from rlft.interrupt import Interrupt
from rlft.logger.alarms import Alarms
from rlft.logger.hints import Hints
from rlft.logger.loggers import Loggers
from rlft.memory import collector_passes_over_what_is_there, keep_blocks
from rlft.metrics import Clock
from rlft.model.backbone import Backbone
from rlft.model.critic import CRITIC
from rlft.model.reward_model import LearnedReward, open_learned, reward_role
from rlft.model.roles import POLICY, Roles
from rlft.out_of_memory import explained
from rlft.plan import Plan
from rlft.pretrain import text_loss
from rlft.prompts import PromptSet, left_out, prompts_for_step
from rlft.reward.scorer import Scorer
from rlft.reward.spec import RewardSpec, specs
from rlft.reward_refresh import RewardRefresh
from rlft.roots import FreshnessConfig, RunConfig
from rlft.seeds import sampling_seeds
from rlft.sizes import Facts, facts_of, size_rows
from rlft.token_values import Inspection
from rlft.trainer import checkpoint
from rlft.trainer.checkpoint import Checkpoint
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.schedule import learning_rate
from rlft.training_base import load_for_training
from rlft.types import (
    Batch,
    Evaluation,
    Generator,
    Group,
    Prompt,
    Rollouts,
    RunInfo,
    Scores,
    StepRecord,
    TokenValues,
)


class BrokenRunError(RuntimeError):
    """The numbers are no longer numbers; nothing of this step was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the loop carries from step to step; all else derives from it, the config and the roles.

    algorithm: the config's, with the KL coefficient that its controller has moved.
    """

    step: int
    algorithm: Algorithm


class Session:
    """The parts of one run, alive. Made by `open_session`, which also ends them."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        backbone: Backbone,
        roles: Roles,
        generator: Generator,
        scorer: Scorer,
        logger: Loggers,
        interrupt: Interrupt,
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.config, self.folder = plan, plan.config, folder
        self.backbone, self.roles, self.generator, self.scorer = backbone, roles, generator, scorer
        self.logger, self.interrupt, self.hints = logger, interrupt, Hints()
        self.alarms = None if self.config.alarms is None else Alarms(self.config.alarms)
        # Read once a step, where the step is saved: a signal that comes later is the next step's, which is then saved.
        self.interrupted = False
        self._failures_told = 0
        self.say = say  # before the loggers have started
        trainer = self.config.trainer
        self.optimizers = {POLICY: Optimizer(roles.named_parameters(), trainer)}
        if roles.critic is not None:
            settings = replace(trainer, lr=self.config.critic.lr)
            self.optimizers[CRITIC] = Optimizer(roles.named_parameters(CRITIC), settings, CRITIC)
        self.reward_refresh: RewardRefresh | None = None
        if self.config.reward_model.refresh_every and (learned := learned_rewards(specs(self.config.reward))):
            role = reward_role(learned[0].name)
            settings = self.config.reward_model
            self.reward_refresh = RewardRefresh(settings, roles, role, trainer, self.config.seed)
        self.freshness = open_freshness(self.config.freshness, plan.train_prompts, backbone, self.config.generation)

    # -- what the loop asks --------------------------------------------------------------------------------------------
    def prompts_at(self, step: int) -> list[Prompt]:
        """The prompts of the turn that begins after `step` steps: a function of (seed, step), no cursor to lose."""
        prompts = self.plan.train_prompts.prompts
        chosen = prompts_for_step(len(prompts), self.config.prompts_per_step, self.config.seed, step)
        return [prompts[i] for i in chosen]

    def sample(self, step: int) -> list[Group]:
        """The groups of that turn."""
        return self.sample_prompts(self.prompts_at(step), step, "sample")

    def sample_prompts(self, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
        """Groups of these prompts, by seeds that derive from (seed, step, purpose).

        Afterwards the engine may sleep: most often it is not used again before the next publish.
        """
        run = self.config
        seeds = sampling_seeds(run.seed, step, len(prompts), run.group_size, purpose)
        groups = self.generator.sample(prompts, run.group_size, seeds, run.generation.sampling)
        self.generator.sleep()
        return groups

    def begin(self, rehearse: Callable[[], None]) -> State:
        """Restores the newest checkpoint of a resumed run, publishes the policy, rehearses, and evaluates a new one."""
        saved = None
        if self.config.resume is not None:
            saved = checkpoint.load_newest(runfolder.checkpoints(self.folder), self.say)
        state = State(step=0, algorithm=self.plan.algorithm)
        if saved is not None:
            state = self._restore(saved)
        self.logger.start(self._info(state.step))
        for note in self._notes(saved):
            self.logger.note(note)
        self.publish(state.step)
        rehearse()
        self.interrupt.in_step = state.step < self.config.steps
        self.interrupted = self.interrupt.requested
        if state.step == 0 and not self.interrupted:
            self.evaluate_if_due(0)
        return state

    def _restore(self, saved: Checkpoint) -> State:
        self.roles.restore(saved.adapters, saved.heads)
        for optimizer in self.optimizers.values():
            optimizer.restore(saved.optimizer)
        if self.roles.critic is not None:
            self.roles.critic.restore_statistics(saved.state["critic"])
        if self.reward_refresh is not None:
            self.reward_refresh.restore(saved.optimizer)
        if "hints" in saved.state:  # older checkpoints have none
            self.hints.restore(saved.state["hints"])
        if self.alarms is not None and "alarms" in saved.state:
            self.alarms.restore(saved.state["alarms"])
        return State(step=saved.step, algorithm=self.plan.algorithm.restored(saved.state["algorithm"]))

    def publish(self, version: int) -> None:
        """The engine gets the policy, and proves that it has it."""
        self.generator.load(self.roles.publish(version))
        self.freshness.check(version, self.generator, self.roles)
        self.roles.lend_sums()

    def score(self, groups: Sequence[Group]) -> Scores:
        return self.scorer(groups)

    def train_reward_model(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        """After `step` steps: the learned reward takes this step's pairs and trains when it is due."""
        if self.reward_refresh is None:
            return {}
        self.reward_refresh.collect(step, rollouts.groups, rollouts.scores)
        return self.reward_refresh.train_if_due(step)

    # -- what the update asks ------------------------------------------------------------------------------------------
    def policy_learns(self, step: int) -> bool:
        """False in the first steps, in which only the critic learns."""
        return self.roles.critic is None or step >= self.config.critic.warmup_steps

    def begin_updates(self, step: int, batch: Batch) -> None:
        """Before the updates of the turn that begins after `step` steps: value normalisation, and a reset if due."""
        if self.roles.critic is not None and batch.returns is not None:
            self.roles.critic.observe(batch.returns, batch.loss_mask)
        every = self.config.trainer.reset_every
        if every and step % every == 0:
            for optimizer in self.optimizers.values():
                optimizer.reset()

    def text_at(self, step: int, update: int) -> Batch:
        """The pretraining text of this update."""
        assert self.plan.pretrain_text is not None, "check.py refuses algorithms that need text without any"
        return self.plan.pretrain_text.batch(self.config.seed, step, update)

    def optimize(self, step: int, update: int) -> dict[str, float]:
        """One optimizer step with the gradients that are there, of all that learns; `<role>/lr`, `<role>/grad_norm`."""
        run, metrics = self.config, {}
        place, total = step * run.updates_per_step + update, run.steps * run.updates_per_step
        for role, optimizer in self.optimizers.items():
            if role == POLICY and not self.policy_learns(step):
                optimizer.discard()
                metrics |= {f"{role}/lr": 0.0, f"{role}/grad_norm": 0.0}
                continue
            rate = learning_rate(optimizer.config, place, total)
            metrics |= {f"{role}/lr": rate, f"{role}/grad_norm": optimizer.update(rate)}
        return metrics

    # -- what happens after a step -------------------------------------------------------------------------------------
    def inspect(self, clock: Clock, step: int, batch: Batch, inert_B: Tensor) -> Inspection | None:
        """Before the update that makes it `step` steps; None where its tokens are not looked at, or not written."""
        settings, written = self.config.token_values, self.config.logger.get("jsonl", {}).get("rollouts_every", 0)
        if settings is None or not settings.every or step % settings.every or not written or step % written:
            return None
        with clock("inspect"):
            return Inspection(self.roles, batch, inert_B, settings.groups, self.backbone.decode_all)

    def inspected(self, clock: Clock, inspection: Inspection | None) -> dict[int, TokenValues]:
        """After the update: {row: its tokens' values}, nothing where nothing is looked at."""
        if inspection is None:
            return {}
        with clock("inspect"):
            return inspection.finish()

    def record(
        self,
        step: int,
        metrics: dict[str, float],
        rollouts: Rollouts,
        batch: Batch,
        tokens: Mapping[int, TokenValues],
    ) -> None:
        """Hands a finished step to the loggers and stops the run if its numbers are broken."""
        groups, scores = rollouts.groups, rollouts.scores
        shape = scores.total.shape
        advantages = torch.zeros_like(batch.sampled_logprobs) if batch.advantages is None else batch.advantages
        mean_B = advantages.where(batch.loss_mask, 0.0).sum(1) / batch.loss_mask.sum(1).clamp(min=1)
        record = StepRecord(
            step=step,
            metrics=metrics,
            groups=groups,
            rewards={name: values.tolist() for name, values in scores.by_reward.items()},
            total_rewards=scores.total.tolist(),
            advantages=mean_B.view(shape).tolist(),
            tokens=tokens,
        )
        hints, alarms = self.hints.check(record), self._alarms_of(record)
        found = alarms | {hint.alarm: hint.text.removeprefix(f"step {step}: ") for hint in hints if hint.alarm}
        marks = {f"alarm/{name}": 1.0 for name in found}
        self.logger.step(replace(record, metrics={**metrics, **marks}, alarms=found))
        if self.scorer.num_failures > self._failures_told:
            self._failures_told = self.scorer.num_failures
            so_far = f"{self.scorer.num_failures} completions so far got a fixed score"
            self.logger.note(f"step {step}: {so_far}: {self.scorer.last_failure}")
        for hint in hints:
            if hint.fatal:
                raise BrokenRunError(hint.text)
            self.logger.note(hint.text)
        for text in alarms.values():
            self.logger.note(f"step {step}: {text}")

    def _alarms_of(self, record: StepRecord) -> dict[str, str]:
        if self.alarms is None:
            return {}
        varied = [name for name, scores in record.rewards.items() if len({s for group in scores for s in group}) > 1]
        return self.alarms.step(record.step, record.metrics, varied)

    def evaluate_if_due(self, step: int) -> None:
        every, held_out = self.config.eval.every, self.plan.held_out
        if held_out is None or (step % every and step != self.config.steps):
            return
        self.logger.stage("evaluate")
        evaluation, groups, scores = self.evaluate(held_out.prompts[: self.config.eval.num_prompts], step)
        more: dict[str, float] = {}
        if self.config.eval.kl_base:
            more["eval/kl_base"] = kl_to_base(self.roles, collate(groups, scores, self.backbone.decode))
        if self.plan.pretrain_text is not None:
            text = self.plan.pretrain_text.held_out()
            more["eval/pretrain_loss"] = text_loss(self.roles, text, self.config.token_budget)
        alarms: dict[str, str] = {}
        if self.alarms is not None:
            alarms = self.alarms.evaluation(step, evaluation.accuracy, evaluation.accuracy_se)
        more |= {f"alarm/{name}": 1.0 for name in alarms}
        self.logger.evaluation(replace(evaluation, metrics={**evaluation.metrics, **more}, alarms=alarms))
        for text in alarms.values():
            self.logger.note(f"step {step}: {text}")

    def evaluate(self, prompts: Sequence[Prompt], step: int) -> tuple[Evaluation, list[Group], Scores]:
        settings, sampling = self.config.eval, self.config.generation.sampling
        if settings.temperature is not None:
            sampling = replace(sampling, temperature=settings.temperature)
        return evaluate(
            self.generator,
            self.scorer,
            prompts,
            step=step,
            seed=self.config.seed,
            num_samples=settings.num_samples,
            sampling=sampling,
            correct_at=settings.correct_at,
            num_examples=settings.num_examples,
        )

    def checkpoint_if_due(self, state: State) -> None:
        every, last = self.config.checkpoint.every, state.step == self.config.steps
        self.interrupted = self.interrupt.requested
        self.interrupt.in_step = not last
        if not (last or self.interrupted or (every and state.step % every == 0)):
            return
        self.logger.stage("checkpoint")
        moves: dict[str, Any] = {"algorithm": state.algorithm.state()}
        moves |= {"hints": self.hints.state()} | ({} if self.alarms is None else {"alarms": self.alarms.state()})
        tensors = {name: t for optimizer in self.optimizers.values() for name, t in optimizer.state().items()}
        if self.reward_refresh is not None:
            tensors |= self.reward_refresh.state()
        if self.roles.critic is not None:
            moves["critic"] = self.roles.critic.state()
        saved = Checkpoint(
            step=state.step,
            adapters={role: self.roles.weights(role) for role in self.roles.moving},
            adapter_config=self.roles.adapter_config(),
            optimizer=tensors,
            state={"seed": self.config.seed, **self.plan.fingerprints, **moves},
            heads={role: head.weights() for role, head in self.roles.heads.items()},
            records={CRITIC: {"returns": moves["critic"]}} if "critic" in moves else {},
        )
        checkpoint.save(runfolder.checkpoints(self.folder), saved, self.config.checkpoint.keep)

    # -- details -------------------------------------------------------------------------------------------------------
    def _notes(self, saved: Checkpoint | None) -> Iterator[str]:
        yield from self.plan.warnings
        if self.config.resume is not None:
            yield f"resumed after step {saved.step}" if saved else "resumed from the start: there was no checkpoint yet"
        for split, prompts in (("train", self.plan.train_prompts), ("held-out", self.plan.held_out)):
            if prompts is not None:
                yield from left_out(prompts, split, self.config.prompts.max_tokens)
        for note in (self.plan.train_prompts.note, self.plan.pretrain_text and self.plan.pretrain_text.note):
            if note:
                yield note
        if not self.roles.forward.packed:
            yield self.roles.forward.reason

    def _facts(self) -> Facts:
        learning = [named for role in self.roles.learning_roles for named in self.roles.named_parameters(role)]
        return facts_of(self.roles.model, learning, self.backbone, self.roles.forward)

    def _info(self, step: int) -> RunInfo:
        return RunInfo(
            folder=self.folder,
            name=self.config.name,
            config=self.plan.plain,
            step=step,
            steps=self.config.steps,
            sizes=size_rows(self.plan, self._facts()),
        )


def learned_rewards(rewards: Mapping[str, RewardSpec]) -> list[RewardSpec]:
    """Those that the trainer computes with a model."""
    return [spec for spec in rewards.values() if spec.runs_in_trainer]


def open_resident(rewards: Mapping[str, RewardSpec], roles: Roles, *, learns: bool) -> dict[str, LearnedReward]:
    """{name: callable} of the learned rewards; learns: their adapter is trained in this run."""
    return {
        spec.name: open_learned(spec.name, roles=roles, learns=learns, **spec.kwargs)
        for spec in learned_rewards(rewards)
    }


def critic_source(config: RunConfig) -> str:
    """`critic.init` with `reward` as the folder of the learned reward's adapter."""
    if config.critic.init != "reward":
        return config.critic.init
    [learned] = learned_rewards(specs(config.reward))  # check.py refuses any other number
    return learned.kwargs["path"]


def open_freshness(
    settings: FreshnessConfig, prompts: PromptSet, backbone: Backbone, generation: GenerationConfig
) -> Freshness:
    """Two float32 computations agree to 1e-5 nats, bfloat16 ones to a few hundredths; the threshold is above."""
    threshold = settings.threshold
    if threshold == "auto":
        rounded = generation.transformers.weights == Weights.merged_bfloat16
        threshold = 1e-3 if backbone.model.dtype == torch.float32 and not rounded else 0.5
    return Freshness(fixed_sequences(prompts, backbone), threshold, settings.every)


def fixed_sequences(prompts: PromptSet, backbone: Backbone) -> list[list[int]]:
    """Two prompts with their answers as token ids: what freshness checks are scored on, the same all through a run."""
    tokenizer = backbone.tokenizer
    return [
        [*p.token_ids, *tokenizer(p.answer, add_special_tokens=False)["input_ids"]][-64:] for p in prompts.prompts[:2]
    ]


@contextlib.contextmanager
def same_every_time(device: torch.device) -> Iterator[None]:
    """Inside, on a CPU, torch adds in a fixed order, so that a run repeated or resumed is the same to the last bit.

    Otherwise threads that meet at one number (the gradient of a prompt that siblings share) add as they come. It costs
    a few per cent. CUDA is left as it is: there it would cost more, and sampling is not repeatable anyway.
    """
    if device.type != "cpu":
        yield
        return
    settings: Any = torch.utils.deterministic  # a module whose attributes are properties
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # nobody reads it; filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


@contextlib.contextmanager
def open_session(
    plan: Plan, folder: Path, engines: Engines, say: Callable[[str], None], again: str | None = None
) -> Iterator[Session]:
    """The session of this plan in this folder; on leaving, what it opened is closed (engines: by their owner).

    again: the command that goes on with the run where it has failed, None where it is none. An interrupted or failed
    run is told to the loggers by its reason before the exception goes on.
    """
    config = plan.config
    with contextlib.ExitStack() as stack:
        interrupt = Interrupt(say)
        if again is not None:  # an evaluation has no step to finish
            stack.enter_context(interrupt)
        logger = Loggers(plan.loggers)
        stack.enter_context(explained(logger, config, again))
        rewards = specs(config.reward)
        keep_blocks(config.token_budget)
        backbone = load_for_training(config.model, config.token_budget)
        stack.enter_context(same_every_time(backbone.device))
        roles = Roles(
            backbone,
            config.lora,
            config.snapshot,
            replace(config.critic, init=critic_source(config)),
            temperature=config.generation.temperature,
            token_budget=config.token_budget,
            seed=config.seed,
        )
        stack.callback(roles.close)
        resident = open_resident(rewards, roles, learns=config.reward_model.refresh_every > 0)
        scoring = config.scoring
        scorer = Scorer(rewards, scoring.workers, scoring.timeout, scoring.on_error, resident)
        stack.callback(scorer.close)
        generator = engines.open(plan.engine, config, config.lora.rank, roles, backbone)
        session = Session(plan, folder, backbone, roles, generator, scorer, logger, interrupt, say)
        stack.enter_context(collector_passes_over_what_is_there())
        with told_how_it_ends(logger, lambda: session.interrupted), explained(logger, config, again):
            yield session


@contextlib.contextmanager
def told_how_it_ends(logger: Loggers, interrupted: Callable[[], bool]) -> Iterator[None]:
    """On leaving, the loggers hear whether the run is finished, interrupted, or stopped by which error."""
    status = "interrupted"
    try:
        yield
        status = "interrupted" if interrupted() else "finished"
    except Exception as error:
        status = f"stopped: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise
    finally:
        logger.finish(status)
