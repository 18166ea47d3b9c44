"""The session of `rlft train`: the parts that the loop works with, and what happens around a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.config.schema import RunConfig
from rlft.data.curriculum import Curriculum
from rlft.data.examples import teacher_prompts
from rlft.environment.endpoint.played import Traces
from rlft.generation.drafts import Drafts, savings
from rlft.generation.engine import Generator
from rlft.logger.alarms import Alarms, Hints
from rlft.loop.driver import OpenRun, RunDriver, open_run
from rlft.loop.freshness import check_decoding, check_sampled, open_freshness, samples_tell
from rlft.loop.metrics import Clock, evaluate, inspecting, kl_to_base, text_loss, unknown_token_metrics
from rlft.loop.parts import Engines, engine_args, layers_of_rank, open_roles, open_scorer, open_trainer, opened_teacher
from rlft.loop.sampling import NextSamples, StepSampler, replace_uninformative_groups
from rlft.loop.workers import open_workers
from rlft.model.backbone import ids_without_token
from rlft.model.critic import CRITIC
from rlft.model.forward import Forward
from rlft.model.networks import Networks
from rlft.plan.memory_parts import longest_rows
from rlft.plan.run_plan import Facts, facts_of
from rlft.plan.sizes import rehearse_decoding
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.scorer import Scorer
from rlft.runs.checkpoint import DRAFTS, EVALUATION_DRAFTS, SAMPLED, Checkpoint
from rlft.runs.lines import StepRecord, TokenValues
from rlft.trainer.local import TrainerState
from rlft.trainer.ranked_trainer import Trainer
from rlft.trainer.ranks import LaneShare
from rlft.types import Batch, Evaluation, Group, Prompt, Rollouts, Scores, counted

CURRICULUM = "curriculum"  # name of the curriculum's tensors and values in a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state that the loop carries from step to step; everything else derives from it, the config and the roles.

    `algorithm` is the config's algorithm, with the KL coefficient that its controller has set.
    """

    step: int
    algorithm: Objective


class Session(RunDriver):
    """The open parts of one run of `rlft train`, which `open_session` opens and closes."""

    plan: TrainPlan
    config: RunConfig

    def __init__(self, run: OpenRun, roles: Networks, generator: Generator, scorer: Scorer, trainer: Trainer) -> None:
        super().__init__(run, generator)
        self.chains_state = not roles.is_whole
        self.backbone, self.roles, self.generator = roles.backbone, roles, generator
        self.scorer, self.trainer = scorer, trainer
        self.hints = Hints()
        self.alarms, settings = None, self.config.alarms
        if settings is not None:
            # None for logprob_gap with a lag, where engine and trainer compute different policies.
            self.alarms = Alarms(replace(settings, logprob_gap=None) if self.config.overlap.lag else settings)
        self._failures_noted = 0
        rows = roles.model.config.get_text_config().vocab_size
        self._unknown = ids_without_token(roles.backbone.tokenizer, rows)
        prompts, seed = self.plan.train_prompts.prompts, self.config.seed
        curriculum = Curriculum.of(self.config.curriculum, self.plan.pass_rates, len(prompts), seed)
        # Evaluations have their own, so that training does not depend on how often there are any.
        evaluated, here = self.config.eval.num_prompts * self.config.eval.num_samples, self.config.cluster.engines == 0
        rows = {DRAFTS: self.config.completions_per_step, EVALUATION_DRAFTS: evaluated}
        asked = (self.config.generation, self.plan.engine, self.backbone.device.type)
        self.drafts = {name: Drafts.of(*asked, number, in_process=here) for name, number in rows.items()}
        self.sampler = StepSampler(generator, prompts, self.config, curriculum)
        self.sampler.drafts = self.drafts[DRAFTS]
        engine = self.config.generation.named(self.plan.engine)
        self.freshness = open_freshness(
            self.config.freshness, self.plan.train_prompts, roles.backbone, engine, self.logger.note
        )
        lag, concurrently = self.config.overlap.lag, self.config.cluster.engines > 0
        self.next = NextSamples(self.sampler, self.freshness, lag, self.config.steps, concurrently=concurrently)

    # -- before the first step -----------------------------------------------------------------------------------------
    def begin(self) -> State:
        """Restores the newest checkpoint of a resumed run, publishes the policy, rehearses, and evaluates a new one."""
        saved, algorithm = self.start(), self.plan.algorithm
        if saved is None:
            return State(step=0, algorithm=algorithm)
        return State(step=saved.step, algorithm=algorithm.restored(saved.state["algorithm"]))

    def restore(self, saved: Checkpoint) -> None:
        state, critic = saved.state, saved.state.get("critic")
        how = {"adapters": saved.adapters, "optimizer": saved.optimizer, "heads": saved.heads}
        self.trainer.restore(TrainerState(**how, critic=critic, folder=saved.folder))
        self.hints.restore(state["hints"])
        if self.alarms is not None and "alarms" in state:
            self.alarms.restore(state["alarms"])
        self._restore_curriculum(saved)
        for name, drafts in self.drafts.items():
            if drafts is not None and name in saved.tensors:
                drafts.restore(saved.tensors[name])
        self.next.restore(saved, self.roles.adapter_config())

    def _restore_curriculum(self, saved: Checkpoint) -> None:
        """Continues with what had been counted of the same prompts; a fork may have others, or no curriculum."""
        curriculum, data = self.sampler.curriculum, "data_fingerprint"
        if curriculum is None or CURRICULUM not in saved.tensors or saved.state[data] != self.plan.fingerprints[data]:
            return
        arrays = {name: tensor.numpy() for name, tensor in saved.tensors[CURRICULUM].items()}
        curriculum.restore(arrays, saved.state[CURRICULUM], self.config.prompts_per_step)

    def rehearse(self, step: int) -> None:
        """Publishes the policy to the engine, rehearses the longest rows, and compares decoding with the forward."""
        self.publish(step)
        super().rehearse(step)
        self.check_decoding()

    def check_decoding(self) -> None:
        """Checks that the engine's decoding gives the log-probs of the trainer's forward."""
        check_decoding(self.generator, self.roles, self.plan.train_prompts, self.config, self.freshness.limits)

    def rehearse_sampling(self, step: int) -> None:
        draft_rows = max(0 if each is None else each.rows for each in self.drafts.values())
        rehearse_decoding(self.generator, self.plan.decodings, self.config.generation.max_tokens, draft_rows)

    def rehearse_update(self) -> None:
        longest, config = self.plan.decodings[0].longest, self.config
        hinted = self.plan.teacher_row_tokens - config.generation.max_tokens if config.snapshot.teacher_hint else 0
        micro = largest_micro_batch(config, self.roles.forward, longest, hinted)
        self.trainer.rehearse(self.plan.algorithm, micro)

    # -- the stages of a step ------------------------------------------------------------------------------------------
    def sample(self, step: int) -> list[Group]:
        groups = self.next.sample(step, self.publish)
        if not self.config.dynamic_sampling.max_rounds:
            self.next.sample_ahead(step + 1)
        return groups

    def wait_for_samples(self, clock: Clock) -> None:
        """Waits until the next step's groups are sampled, where that is done during the update."""
        if self.next.is_running:
            with clock("sample"):
                self.next.wait()

    def publish(self, version: int) -> None:
        """Publishes the policy to the engine, and checks that the engine samples from it."""
        adapter = self.roles.publish(version)
        self.next.note_published(adapter)
        self.generator.load(adapter)
        self.freshness.check(version, self.generator, self.roles, adapter)
        if self.config.cluster.num_parts == 1:  # other ranks have no sampler's weights, and must get the same bits
            self.roles.share_merged_weights()

    def score(self, groups: Sequence[Group]) -> Scores:
        scores = self.scorer(groups)
        self.sampler.count(groups, scores)
        return scores

    def replace_uninformative(self, clock: Clock, step: int, groups: list[Group], scores: Scores) -> Rollouts:
        """Applies dynamic sampling if it is switched on."""
        rollouts = replace_uninformative_groups(self.sampler, self.score, step, clock, groups, scores)
        if self.config.dynamic_sampling.max_rounds:
            with clock("sample"):
                self.next.sample_ahead(step + 1)  # only now: the engine was busy with this step's groups
        return rollouts

    def batch(self, rollouts: Rollouts) -> Batch:
        """The step as `[B, T]` tensors; for a teacher with a hint, also the prompts that it reads instead."""
        batch, hint = self.backbone.collated(rollouts.groups, rollouts.scores), self.config.snapshot.teacher_hint
        if hint is None:
            return batch
        style = self.config.prompts.style
        return replace(batch, teacher_prompts=teacher_prompts(rollouts.groups, hint, self.backbone.tokenizer, style))

    # -- what happens after a step -------------------------------------------------------------------------------------
    def inspecting(
        self, step: int, rollouts: Rollouts, batch: Batch, zero_gradient_B: Tensor
    ) -> AbstractContextManager[dict[int, TokenValues]]:
        """Inspects tokens around the update of step `step`; yields nothing if they are not inspected or not written."""
        settings = self.config.token_values
        if settings is None or not settings.every or step % settings.every or not self.config.rollouts.writes(step):
            return nullcontext({})
        starts = [len(rollout.prompt.token_ids) for group in rollouts.groups for rollout in group.rollouts]
        decode = self.backbone.decode_all
        return inspecting(self.roles, batch, starts, zero_gradient_B, settings.groups, decode, self.clock)

    def record(
        self, step: int, metrics: dict[str, float], rollouts: Rollouts, batch: Batch, tokens: Mapping[int, TokenValues]
    ) -> None:
        """Hands a finished step to the loggers; stops the run if a number is not finite."""
        metrics |= self.clock.end_step()
        with self.clock("log"):
            groups, scores = rollouts.groups, rollouts.scores
            self.chain.add_batch(batch)
            metrics |= {**unknown_token_metrics(groups, self._unknown), **self.generator.metrics}
            metrics |= savings(self.sampler.draft_counts.pop(step - 1, {}))
            metrics |= {} if self.sampler.curriculum is None else self.sampler.curriculum.metrics()
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
            hints, alarms = self.hints.check(record), {}
            if self.alarms is not None:
                varied = [name for name, rows in record.rewards.items() if len({s for row in rows for s in row}) > 1]
                alarms = self.alarms.step(step, metrics, varied)
            alarm_texts = alarms | {
                hint.alarm: hint.text.removeprefix(f"step {step}: ") for hint in hints if hint.alarm
            }
            alarm_metrics = {f"alarm/{name}": 1.0 for name in alarm_texts}
            if self.scorer.num_failures > self._failures_noted:
                self._failures_noted = self.scorer.num_failures
                so_far = f"{counted(self.scorer.num_failures, 'completion')} so far got a fixed score"
                self.logger.note(f"step {step}: {so_far}: {self.scorer.last_failure}")
            self.log(replace(record, metrics={**metrics, **alarm_metrics}, alarms=alarm_texts), hints)
            for text in alarms.values():
                self.logger.note(f"step {step}: {text}")

    def evaluation(self, step: int) -> Evaluation:
        held_out = self.plan.held_out
        assert held_out is not None, "there are held-out prompts where eval.every is not 0"
        evaluation, groups, scores = self.evaluate(tuple(held_out.prompts[: self.config.eval.num_prompts]), step)
        extra: dict[str, float] = {}
        if self.config.eval.kl_base:
            extra["eval/kl_base"] = kl_to_base(self.roles, self.backbone.collated(groups, scores))
        if self.plan.pretrain_text is not None:
            text = self.plan.pretrain_text.held_out()
            extra["eval/pretrain_loss"] = text_loss(self.roles, text, self.config.token_budget)
        alarms: dict[str, str] = {}
        if self.alarms is not None:
            alarms = self.alarms.evaluation(step, evaluation.accuracy, evaluation.accuracy_se)
        extra |= {f"alarm/{name}": 1.0 for name in alarms}
        return replace(evaluation, metrics={**evaluation.metrics, **extra}, alarms=alarms)

    def evaluate(self, prompts: Sequence[Prompt], step: int) -> tuple[Evaluation, list[Group], Scores]:
        return evaluate(self.generator, self.scorer, prompts, self.config, step, self.drafts[EVALUATION_DRAFTS])

    def checkpoint(self, state: State, *, for_chain: bool = False) -> Checkpoint:
        """The state after a step. Raises BrokenRunError: log-probs are not finite, which the chain's part may be."""
        if not for_chain:
            self.freshness.check_finite(state.step, self.roles)
        trainer = self.trainer.state(alone=for_chain)
        values: dict[str, Any] = {"algorithm": state.algorithm.state(), "hints": self.hints.state()}
        if self.alarms is not None:
            values["alarms"] = self.alarms.state()
        if trainer.critic is not None:
            values["critic"] = trainer.critic
        tensors, sampled = self.next.state(state.step)
        if sampled:
            values[SAMPLED] = sampled
        if self.sampler.curriculum is not None:
            counts, values[CURRICULUM] = self.sampler.curriculum.state(state.step)
            tensors[CURRICULUM] = {name: torch.from_numpy(array) for name, array in counts.items()}
        if not for_chain:
            tensors |= {name: drafts.state() for name, drafts in self.drafts.items() if drafts is not None}
        return Checkpoint(
            step=state.step,
            adapters=trainer.adapters,
            adapter_config=self.roles.adapter_config(),
            write_folders=trainer.folders,
            optimizer=trainer.optimizer,
            state=self.state_values(for_chain=for_chain) | values,
            heads=trainer.heads,
            tensors=tensors,
            records={} if trainer.critic is None else {CRITIC: {"returns": trainer.critic}},
        )

    # -- details -------------------------------------------------------------------------------------------------------
    def facts(self) -> Facts:
        learning = [parameter for role in self.roles.learning_roles for parameter in self.roles.named_parameters(role)]
        copies, engine = self.base_copies(), self.generator.facts
        return facts_of(self.roles.model, learning, self.backbone, self.roles.forward, copies, engine)


def largest_micro_batch(run: RunConfig, forward: Forward, prompt: tuple[int, ...], hinted_tokens: int = 0) -> Batch:
    """A micro-batch of the longest prompt with completions of full length, with as many rows as a micro-batch can have.

    It is rehearsed, so that memory runs out before the first step and not many steps later. A teacher reads the same
    rows, or with a hint rows as long as its longest. Pretraining text (PPO-ptx) and a reward model's own training are
    not rehearsed: their batches fit the same token budget as the update's.

    hinted_tokens: number of tokens of the longest prompt with a hint that a teacher reads; 0 without a hint.
    """
    shape = (len(prompt), run.generation.max_tokens, run.group_size, run.completions_per_step // run.minibatches)
    batch = longest_rows(*shape, run.token_budget)
    batch.token_ids[:, : len(prompt)] = torch.tensor(prompt)
    parts = forward.micro_batches(batch, torch.arange(len(batch.rewards)), run.token_budget)
    micro = batch.select(max(parts, key=len))
    zeros = torch.zeros_like(micro.sampled_logprobs)
    if hinted_tokens:
        hinted_P = torch.tensor(prompt).repeat(-(-hinted_tokens // len(prompt)))[:hinted_tokens]
        micro = replace(micro, teacher_prompts=hinted_P.expand(len(micro.rewards), -1))
    of_zeros = dict.fromkeys(("old_logprobs", "reference_logprobs", "reference_kl", "old_values", "returns"), zeros)
    return replace(micro, advantages=zeros + 1, **of_zeros)


@contextmanager
def open_session(
    plan: TrainPlan, folder: Path, engines: Engines, say: Callable[[str], None], again: str | None = None
) -> Iterator[Session]:
    """Opens the session of a plan, and closes what it opened (engines are closed by their owner).

    again: the command that resumes the run after a failure; None for an evaluation, which cannot be resumed.
    """
    config, trains = plan.config, again is not None
    with ExitStack() as stack:
        run = stack.enter_context(open_run(plan, folder, say, again))
        workers = stack.enter_context(open_workers(plan, folder, run.logger.note, again))
        adopt, base, pool = None, None, workers.pool
        if pool is None:  # an engine in this process needs the whole base
            adopt = engines.adopting(plan, config.lora)
        else:
            base = layers_of_rank(config.cluster, rank=0)
        # Before the base: what it leaves free decides whether activations are recomputed.
        teacher = stack.enter_context(opened_teacher(config, plan.teacher_row_tokens)) if trains else None
        roles = stack.enter_context(open_roles(config, teacher, adopt=adopt, base=base))
        learns_reward = config.reward_model.refresh_every > 0
        rewards = open_scorer(config, roles, learns=learns_reward, pool=pool, open_rewards=workers.open_rewards)
        scorer = stack.enter_context(rewards)
        generator: Generator
        if pool is None:
            # A resume may go back that many versions of the policy, even if one checkpoint is damaged.
            kept = 2 * config.checkpoint.every + 2 if config.checkpoint.every else None
            traces = Traces(folder, kept) if trains else None
            generator = stack.enter_context(engines.opened_for(plan, roles, config.lora, plan.environment, traces))
        else:
            generator, engine = pool, config.generation.named(plan.engine)
            # An engine on the trainer's base makes the sums of base and adapter on which the policy learns
            # (`Roles.share_merged_weights`).
            if engine.on_trainers_base and config.cluster.num_parts == 1 and config.lora is not None:
                pool.here = engine.open(engine_args(config, config.lora, roles))
        local = open_trainer(plan, roles, base)
        local.share = LaneShare(lanes=config.cluster.num_lanes)
        trainer = local if workers.ranked is None else workers.ranked(local)
        session = Session(run, roles, generator, scorer, trainer)
        if samples_tell(config) and not roles.routing.layers:  # an expert chosen otherwise is a large gap, and no fault
            session.freshness.samples_tell = True
            local.check_samples = partial(check_sampled, session.freshness, roles)
        stack.callback(session.next.close)
        stack.enter_context(session.running())
        yield session
