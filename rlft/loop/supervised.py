"""The loop of `rlft sft`, `rm` and `dpo`: a step is one optimizer update on examples that derive from (seed, step).

A SupervisedTask says what is learned, from which data and how it is measured: demonstrated completions with an adapter
or the model's own weights, or rankings of completions with a scalar head or by log-probs. The run around it (folder,
loggers, checkpoints, saved interruptions, exact resume) is the same for all tasks, and that of `rlft train`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from rlft.algorithm.ops.aggregate import negative_log_likelihood, row_sum
from rlft.algorithm.preference import RankedValues
from rlft.batch import batch_of_rows, to_device
from rlft.config.model import LoraSettings
from rlft.data.examples import RankedTokens
from rlft.generation.engine import NO_FACTS, Generator
from rlft.logger.alarms import not_finite
from rlft.loop.driver import OpenRun, Outcome, RunDriver, open_run
from rlft.loop.freshness import check_decoding, open_freshness
from rlft.loop.metrics import evaluate, kl_to_base, mean_and_error, text_loss
from rlft.loop.parts import Engines, load_for_training, open_scorer
from rlft.model.adapter_folder import has_head
from rlft.model.backbone import Adopt
from rlft.model.full_weights import MODEL, WholeModel
from rlft.model.networks import Networks
from rlft.model.packing import Layout
from rlft.model.reward_model import ENDING, last_scores, numbers_of_rows, parts_within, rows_of
from rlft.model.roles import POLICY, Roles, policy_alone
from rlft.plan.run_plan import Facts, Plan, facts_of
from rlft.plan.sizes import rehearse_decoding
from rlft.plan.supervised_plan import PreferencePlan, SftPlan
from rlft.reward.workers.scorer import Scorer
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.lines import StepRecord
from rlft.system.terminal import Say, resuming
from rlft.trainer.optimizer import Optimizer, begin_step, optimizer_step
from rlft.trainer.update import added_up, numbers_of, text_passes, total_of
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
        adapters, folders = self.learner.kept([self.role])
        return Checkpoint(
            step=step,
            adapters=adapters,
            adapter_config=self.learner.adapter_config(),
            write_folders=folders,
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


# -- demonstrations ----------------------------------------------------------------------------------------------------
class DemonstrationTask(SupervisedTask[SftPlan]):
    """Supervised fine-tuning: the demonstrated completions become more likely.

    The learner is the adapter in the role of the policy, or the whole model. The generator samples and the scorer
    scores for the task accuracy; None if that is not measured.
    """

    def __init__(
        self, plan: SftPlan, learner: Networks, generator: Generator | None, scorer: Scorer | None, say: Say
    ) -> None:
        super().__init__(plan, learner)
        self.generator, self.scorer = generator, scorer
        self.freshness = None
        if plan.held_out is not None and plan.engine is not None:
            engine = self.config.generation.named(plan.engine)
            self.freshness = open_freshness(self.config.freshness, plan.held_out, learner.backbone, engine, say)

    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the mean negative log-prob over the tokens of the step's completions."""
        batch = self.plan.train.at(self.config.seed, step, self.config.examples_per_step)
        return likelihood_gradient(self.learner, batch, self.config.token_budget)

    def rehearse(self) -> None:
        lengths = [len(text.ids) for text in self.plan.train.texts]
        longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[: self.config.examples_per_step]
        num_examples = next(
            (n for n in range(1, len(longest)) if sum(lengths[i] for i in longest[:n]) > self.config.token_budget),
            len(longest),
        )
        likelihood_gradient(self.learner, self.plan.train.batch(longest[:num_examples]), self.config.token_budget)

    def rehearse_sampling(self, step: int) -> None:
        if self.generator is not None:
            assert self.freshness is not None, "an engine is opened for held-out prompts"
            assert self.plan.held_out is not None, "an engine is opened for held-out prompts"
            self.generator.load(self.learner.publish(step))  # the engine's merged weights count as well
            rehearse_decoding(self.generator, self.plan.decodings, self.config.generation.max_tokens)
            check_decoding(self.generator, self.learner, self.plan.held_out, self.config, self.freshness.limits)

    def evaluate(self, step: int) -> Evaluation:
        """Loss on the held-out demonstrations, and accuracy on the held-out prompts of the task."""
        settings, held_out, examples = self.config.eval, self.plan.held_out, self.plan.held_out_examples
        batch = examples.batch(range(min(settings.num_prompts, len(examples.texts))))  # as many as prompts are sampled
        metrics = {"eval/loss": text_loss(self.learner, batch, self.config.token_budget)}
        if held_out is None:
            return Evaluation(step=step, accuracy=None, accuracy_se=None, metrics=metrics, examples=())
        assert self.generator is not None
        assert self.scorer is not None
        assert self.freshness is not None
        adapter = self.learner.publish(step)
        self.generator.load(adapter)
        self.freshness.check(step, self.generator, self.learner, adapter)
        prompts = tuple(held_out.prompts[: settings.num_prompts])
        evaluation, groups, scores = evaluate(self.generator, self.scorer, prompts, self.config, step)
        self.generator.sleep()
        metrics |= evaluation.metrics
        if settings.kl_base:
            metrics["eval/kl_base"] = kl_to_base(self.learner, self.learner.backbone.collated(groups, scores))
        return replace(evaluation, metrics=metrics)


def open_demonstrations(plan: SftPlan, engines: Engines, stack: ExitStack, say: Say) -> DemonstrationTask:
    """Loads the model and, if the task is evaluated, opens the engine and the rewards' workers."""
    config = plan.config
    if config.lora is None:
        learner: Networks = WholeModel(load_for_training(config.model, None, config.token_budget))
    else:
        adopt = engines.adopting(plan, config.lora)
        learner = open_policy(config, config.lora, stack, adopt)
    if plan.engine is None:
        return DemonstrationTask(plan, learner, None, None, say)
    scorer = stack.enter_context(open_scorer(config, learner))
    generator = stack.enter_context(engines.opened_for(plan, learner, config.lora))
    return DemonstrationTask(plan, learner, generator, scorer, say)


def run_demonstrations(plan: SftPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    def open_task(stack: ExitStack) -> DemonstrationTask:
        return open_demonstrations(plan, engines, stack, lambda text: say(f"note: {text}"))

    return train_supervised(plan, folder, open_task, say)


# -- rankings ----------------------------------------------------------------------------------------------------------
REWARD = "reward"
BIAS = f"{REWARD}.head.bias"
REFERENCE_LOGPROBS = "reference_logprobs"
"""The file of a checkpoint that holds them, and the value of state.json that says what they are of."""


class PreferenceTask(SupervisedTask[PreferencePlan]):
    """A head gives each completion of a prompt a value; the loss, a mean over rankings, wants the better one higher.

    The bias of a reward model's head is not trained, because no difference of scores depends on it. It is 0 during the
    run; only the saved head has the value that `center` requires, so that centring does not change what is learned.

    Log-probs by a reference are computed once for each ranking, when an update first has it, and saved: a resumed run
    has them to the last bit, whatever micro-batch they were computed in.
    """

    def __init__(self, plan: PreferencePlan, roles: Roles) -> None:
        super().__init__(plan, roles, REWARD if plan.trains_reward else POLICY)
        self.roles = roles
        self.ending = (ENDING,) * plan.trains_reward  # tokens that are added to each row
        self.known: dict[int, tuple[float, ...]] = {}
        self._held_out: list[RankedTokens] | None = None
        self._reset_bias()

    def parameters(self) -> list[tuple[str, Parameter]]:
        return [(name, p) for name, p in super().parameters() if name != BIAS]

    # -- an update -----------------------------------------------------------------------------------------------------
    def backward(self, step: int) -> dict[str, float]:
        positions, rankings = self.plan.positions(step), self.plan.train.rankings
        new = [i for i in dict.fromkeys(positions) if i not in self.known]
        compared = self._with_reference([rankings[i] for i in new])
        self.known |= {i: ranking.reference for i, ranking in zip(new, compared, strict=True)}
        of_step = [replace(rankings[i], reference=self.known[i]) for i in positions]
        return self.learn([*of_step, *self.plan.replayed(step)])

    def rehearse(self) -> None:
        self.learn(self._with_reference(self.largest_part()))

    def learn(self, rankings: Sequence[RankedTokens]) -> dict[str, float]:
        """Adds the gradient of the mean loss over the rankings; returns the means of the metrics."""
        roles, losses, measured = self.roles, [], []
        parts = self.micro_batches(rankings)
        micros = roles.forward.placed([self._batch_of(part) for part in parts])
        dtype = torch.promote_types(roles.backbone.model.dtype, torch.float32)
        facts = to_device([lengths_and_references(part, dtype) for part in parts], roles.backbone.device)
        with roles.training():
            for part, micro, of_part in zip(parts, micros, facts, strict=True):
                with roles.learning(self.role):
                    values = ranked_values(self.values(micro.batch, micro.layout), part, of_part)
                    terms = [self.plan.loss(v, r.scores) for v, r in zip(values, part, strict=True)]
                    loss = torch.stack([loss for loss, _ in terms]).sum() / len(rankings)
                    loss.backward()
                roles.check_gradients(self.role)
                losses.append(loss.detach())
                measured += [metrics for _, metrics in terms]
        of_losses, *numbers = numbers_of([{str(i): loss for i, loss in enumerate(losses)}, *measured])
        sums: dict[str, float] = defaultdict(float)
        for part in parts:
            of_part, numbers = numbers[: len(part)], numbers[len(part) :]
            for name in of_part[0]:
                sums[name] += sum(metrics[name] for metrics in of_part)
        means = {name: value / len(rankings) for name, value in sums.items()}
        num_tokens = sum(micro.real_tokens for micro in micros)
        return {"loss/total": added_up(of_losses.values()), **means, "tokens/trained": num_tokens}

    def micro_batches(self, rankings: Sequence[RankedTokens]) -> list[list[RankedTokens]]:
        """Splits the rankings in order to fit the token budget; a ranking that exceeds it is not split."""
        packed, ending = self.roles.forward.packed, len(self.ending)
        return parts_within(rankings, self.config.token_budget, packed=packed, ending=ending)

    def largest_part(self) -> list[RankedTokens]:
        """The micro-batch with the most tokens of an update on the rankings that have most, padding included."""
        forward = self.roles.forward

        def tokens_of(ranking: RankedTokens) -> int:
            lengths = [len(completion) + len(self.ending) for completion in ranking.completions]
            if forward.packed:
                return len(ranking.prompt) + sum(lengths)
            return len(lengths) * (len(ranking.prompt) + max(lengths))

        rankings = sorted(self.plan.train.rankings, key=tokens_of, reverse=True)[: self.config.rankings_per_step]
        return max(self.micro_batches(rankings), key=lambda part: forward.network_tokens(self._batch_of(part)))

    def values(self, batch: Batch, layout: Layout) -> Tensor:
        """`[B]` by the active role: the rows' scores, or log-probs of their completions in nats, summed over tokens."""
        if self.plan.trains_reward:
            return last_scores(self.roles, REWARD, batch, layout)
        return row_sum(self.roles.forward(batch, 1.0, layout=layout).logprobs, batch.loss_mask)

    def _batch_of(self, rankings: Sequence[RankedTokens]) -> Batch:
        return batch_of_rows(rows_of(rankings, self.ending))

    def _values_by(self, role: str | None, rankings: Sequence[RankedTokens]) -> Tensor:
        """float64 `[rows]` on the CPU, without gradient or dropout: the values by this role (None: the bare base)."""
        return numbers_of_rows(self.roles, role, self._batch_of(rankings), self.config.token_budget, self.values)

    def _with_reference(self, rankings: Sequence[RankedTokens]) -> list[RankedTokens]:
        """The rankings with the log-probs by the reference, in one pass over all of them."""
        if self.plan.reference == "none" or not rankings:
            return list(rankings)
        values = split_by_ranking(self._values_by(self.roles.reference_role, rankings), rankings)
        return [replace(r, reference=tuple(v.tolist())) for r, v in zip(rankings, values, strict=True)]

    # -- an evaluation -------------------------------------------------------------------------------------------------
    def evaluate(self, step: int) -> Evaluation:
        """Accuracy on the held-out pairs (mean over each ranking, then over rankings), and means of other metrics."""
        if self._held_out is None:
            self._held_out = self._with_reference(self.plan.held_out.rankings[: self.config.eval.num_rankings])
        values_B = self._values_by(self.role, self._held_out)
        values = ranked_values(values_B, self._held_out, lengths_and_references(self._held_out, values_B.dtype))
        measured = [self.plan.loss.evaluated(v, r.scores) for v, r in zip(values, self._held_out, strict=True)]
        means = {name: mean_and_error([metrics[name].item() for metrics in measured]) for name in measured[0]}
        value, error = means.pop("accuracy/pairs")
        metrics = {"eval/pairs": value, "eval/pairs_se": error}
        metrics |= {f"eval/{name}": mean for name, (mean, _) in means.items()}
        return Evaluation(step=step, accuracy=value, accuracy_se=error, metrics=metrics, examples=())

    # -- a checkpoint --------------------------------------------------------------------------------------------------
    def saved(
        self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any], *, for_chain: bool = False
    ) -> Checkpoint:
        made = super().saved(step, optimizer, state)
        if self.plan.trains_reward:
            learned = {"weight": self.roles.heads[REWARD].weights()["weight"]}
            return replace(made, heads={REWARD: learned if for_chain else self._head_weights()})
        if self.plan.reference == "none":
            return made
        logprobs = [logprob for values in self.known.values() for logprob in values]
        known = {
            "positions": torch.tensor(list(self.known), dtype=torch.int64),
            "logprobs": torch.tensor(logprobs, dtype=torch.float64),
        }
        state = {**made.state, REFERENCE_LOGPROBS: self.plan.reference_fingerprint}
        return replace(made, state=state, tensors={REFERENCE_LOGPROBS: known})

    def restore(self, saved: Checkpoint) -> None:
        """Of a fork with other preferences or another reference the log-probs are computed anew."""
        super().restore(saved)
        if self.plan.trains_reward:
            self.roles.heads[REWARD].load_state_dict(saved.heads[REWARD])
            self._reset_bias()
        elif saved.state.get(REFERENCE_LOGPROBS) == self.plan.reference_fingerprint:
            tensors, rankings = saved.tensors[REFERENCE_LOGPROBS], self.plan.train.rankings
            values = iter(tensors["logprobs"].tolist())
            self.known = {i: tuple(islice(values, len(rankings[i].completions))) for i in tensors["positions"].tolist()}

    def _head_weights(self) -> dict[str, Tensor]:
        """The scalar head; if `center` is set, its bias gives the best held-out completions a mean score of 0."""
        weights = self.roles.heads[REWARD].weights()
        if self.config.center:
            held_out = self.plan.held_out.rankings[: self.config.eval.num_rankings]
            best = [replace(r, completions=r.completions[:1], scores=r.scores[:1]) for r in held_out]
            weights["bias"] = weights["bias"] - self._values_by(REWARD, best).mean().to(weights["bias"])
        return weights

    def _reset_bias(self) -> None:
        if self.plan.trains_reward:
            with torch.no_grad():
                self.roles.heads[REWARD].bias.zero_()


def lengths_and_references(rankings: Sequence[RankedTokens], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the lengths of all completions, their log-probs by the reference or nothing), both `[rows]`."""
    lengths = [len(completion) for ranking in rankings for completion in ranking.completions]
    reference = [value for ranking in rankings for value in ranking.reference]
    return torch.tensor(lengths, dtype=dtype), torch.tensor(reference, dtype=dtype)


def ranked_values(
    values_B: Tensor, rankings: Sequence[RankedTokens], facts: tuple[Tensor, Tensor]
) -> list[RankedValues]:
    """The values of the rows of these rankings, as the losses take them; facts: from `lengths_and_references`."""
    lengths_B, reference_B = facts
    references = split_by_ranking(reference_B, rankings) if len(reference_B) else [None] * len(rankings)
    apart = zip(*(split_by_ranking(x, rankings) for x in (values_B, lengths_B)), references, strict=True)
    return [RankedValues(values=v, lengths=lengths, reference=reference) for v, lengths, reference in apart]


def split_by_ranking(values: Tensor, rankings: Sequence[RankedTokens]) -> Sequence[Tensor]:
    """The values `[rows]` of the rows of these rankings, apart for each ranking."""
    return values.split([len(ranking.completions) for ranking in rankings])


def open_preferences(plan: PreferencePlan, stack: ExitStack) -> PreferenceTask:
    """Loads the model with a reward's adapter and head, or with a policy's adapter and the reference's."""
    lora = plan.config.lora
    if not plan.trains_reward:
        return PreferenceTask(plan, open_policy(plan.config, lora, stack, reference=plan.reference))
    roles = open_policy(plan.config, replace(lora, path=None), stack)
    if lora.path is None or has_head(lora.path):
        roles.add_scalar_role(REWARD, lora.path, "lora.path", learns=True)
    else:  # a policy's adapter, for instance from supervised fine-tuning: the head starts at zero
        roles.add_scalar_role(REWARD, None, "lora.path", learns=True)
        roles.load_role(REWARD, lora.path, "lora.path")
    return PreferenceTask(plan, roles)


def run_preferences(plan: PreferencePlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    return train_supervised(plan, folder, lambda stack: open_preferences(plan, stack), say)
