"""`rlft sft`: cross-entropy on the completions of demonstrations, by an adapter or by the model's own weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from rlft import check
from rlft.check_adapters import check_adapters, check_classifiers, uses_of_rewards
from rlft.checks.servers import check_servers
from rlft.checks.sft import check_config, check_trainable, uses_of
from rlft.collate import collate, select
from rlft.decodings import of_evaluation, rehearse_decoding
from rlft.engine import Engines
from rlft.evaluate import evaluate, kl_to_base
from rlft.examples import Examples, scan_demonstrations
from rlft.generation.stops import check_stops
from rlft.model.adapter_folder import content_fingerprint
from rlft.model.backbone import (
    fingerprint,
    load_tokenizer,
    read_config,
    resolve_device,
    resolve_dtype,
)
from rlft.model.roles import POLICY, Roles, policy_alone
from rlft.model.whole import MODEL, WholeModel
from rlft.ops.likelihood import negative_log_likelihood
from rlft.pretrain import text_loss
from rlft.prompts import PromptSet, left_out, scan
from rlft.reward.scorer import Scorer
from rlft.reward.spec import examined, notes, specs
from rlft.roots import SftConfig
from rlft.run.extent import steps_done
from rlft.session import open_freshness, open_resident
from rlft.sizes import Facts, Row, facts_of
from rlft.supervised import learn
from rlft.targets import instantiate
from rlft.trainer.checkpoint import Checkpoint
from rlft.training_base import load_for_training
from rlft.types import Batch, Evaluation, Generator, Logger, Split
from rlft.work import Outcome, Say, Work, command_line, override, overrides, program


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan:
    """Everything known before a weight is loaded. held_out: the prompts of task accuracy, None where none is asked."""

    config: SftConfig
    plain: Mapping[str, Any]
    engine: str
    train: Examples
    held_out_examples: Examples
    held_out: PromptSet | None
    loggers: tuple[Logger, ...]
    fingerprints: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """The steps that are asked for, or those that the epochs take."""
        each_epoch = max(1, len(self.train.texts) // self.config.examples_per_step)
        return self.config.steps or self.config.epochs * each_epoch


def check_machine(config: SftConfig, *, runs_here: bool = True) -> None:
    """What the config asks for is here: the device, and weights that can be trained where they are the model's own."""
    check.check_machine(config.model, runs_here=runs_here)
    if config.lora is None:
        dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
        check_trainable(str(dtype).removeprefix("torch."))


def make_plan(plain: Mapping[str, Any], *, runs_here: bool = True) -> SftPlan:
    """Checks the whole config, reads the model's config.json and tokenizer, and scans the data.

    runs_here: False if the run is only planned: its engine, and what 4-bit weights need, may be missing.

    Raises:
        UserError: for whatever a user can mend.
    """
    config, loggers = check_config(plain)
    check_machine(config, runs_here=runs_here)
    engine, _ = check.choose_engine(config.generation.engine, config.lora, runs_here=runs_here)
    if config.lora is None and config.generation.engine == "auto":
        engine = "transformers"  # the others are given adapters, and there is none
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limits = config.prompts
    check.check_row(limits.max_tokens, config.max_completion_tokens, "max_completion_tokens", model_config)
    used = uses_of(config)
    tokenizer = load_tokenizer(config.model)
    check_stops(config.generation, tokenizer, model_config.get_text_config().vocab_size)
    held_out = None
    if config.data and config.eval.every:
        check.check_row(limits.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config)
        rewards = specs(config.reward)
        used += uses_of_rewards(rewards)
        check_classifiers(rewards)
        prompts = instantiate(config.data, "data").load(Split.held_out)
        held_out = scan(prompts, tokenizer, limits.max_tokens, limits.over_limit, Split.held_out, limits.style)
        check.check_metadata(rewards, held_out.prompts[0])
        check_servers(rewards, held_out.prompts[0])
    if config.lora is not None:
        if config.generation.engine == "vllm":
            check.check_vllm(config.lora)
        check.check_targets(config.lora, config.model, model_config)
        check_adapters(used, config.lora, config.model, base_fingerprint, model_config)
    demonstrations = instantiate(config.demonstrations, "demonstrations")
    train, held_out_examples = (
        scan_demonstrations(demonstrations.load(split), tokenizer, limits, config.max_completion_tokens, split)
        for split in (Split.train, Split.held_out)
    )
    size = config.examples_per_step
    check.check_enough("examples_per_step", size, size, len(train.texts), "demonstrations")
    return SftPlan(
        config=config,
        plain=plain,
        engine=engine,
        train=train,
        held_out_examples=held_out_examples,
        held_out=held_out,
        loggers=loggers,
        fingerprints={
            "demonstrations_fingerprint": train.fingerprint,
            "held_out_demonstrations_fingerprint": held_out_examples.fingerprint,
            **({} if held_out is None else {"held_out_fingerprint": held_out.fingerprint}),
            "base_fingerprint": base_fingerprint,
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used},
        },
        notes=(
            *(note for note in (train.note, held_out_examples.note) if note),
            *_notes(config, held_out),
        ),
    )


def _notes(config: SftConfig, held_out: PromptSet | None) -> Iterator[str]:
    """What the person watching should know of the task that accuracy is measured on."""
    if held_out is not None:
        yield from left_out(held_out, "held-out", config.prompts.max_tokens)
        yield from filter(None, [held_out.note])
        rewards = specs(config.reward)
        yield from (*notes(rewards), *examined(rewards, held_out.prompts))


class Demonstrated:
    """The lesson: be likely to say what was demonstrated.

    learner: the adapter in the role of the policy, or the whole model. generator and scorer: None where no task
    accuracy is measured.
    """

    def __init__(
        self, plan: SftPlan, learner: Roles | WholeModel, generator: Generator | None, scorer: Scorer | None
    ) -> None:
        self.plan, self.config, self.learner = plan, plan.config, learner
        self.generator, self.scorer = generator, scorer
        self.role = POLICY if isinstance(learner, Roles) else MODEL
        self.freshness = None
        if plan.held_out is not None:
            self.freshness = open_freshness(
                self.config.freshness, plan.held_out, learner.backbone, self.config.generation
            )

    def parameters(self) -> list[tuple[str, Parameter]]:
        return self.learner.named_parameters()

    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the mean negative log-prob over the tokens of the step's completions."""
        return self._learn(self.plan.train.at(self.config.seed, step, self.config.examples_per_step))

    def rehearse(self) -> None:
        lengths = [len(text.ids) for text in self.plan.train.texts]
        longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[: self.config.examples_per_step]
        at_once = next(
            (n for n in range(1, len(longest)) if sum(lengths[i] for i in longest[:n]) > self.config.token_budget),
            len(longest),
        )
        self._learn(self.plan.train.batch(longest[:at_once]))

    def rehearse_evaluation(self, step: int) -> None:
        if self.generator is not None:
            self.generator.load(self.learner.publish(step))  # the engine's sum of base and adapter is part of it
            found = of_evaluation(self.plan.held_out, self.config.eval)
            rehearse_decoding(self.generator, found, self.config.generation.max_tokens)

    def _learn(self, batch: Batch) -> dict[str, float]:
        learner, forward = self.learner, self.learner.forward
        num_tokens, total, real, network = int(batch.loss_mask.sum()), 0.0, 0, 0
        with learner.training():
            for part in forward.micro_batches(batch, torch.arange(len(batch.rewards)), self.config.token_budget):
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

    def evaluate(self, step: int) -> Evaluation:
        """Loss on the held-out demonstrations, and accuracy on the held-out prompts of the task."""
        loss = text_loss(self.learner, self._held_out(), self.config.token_budget)
        if self.plan.held_out is None:
            return Evaluation(step=step, accuracy=None, accuracy_se=None, metrics={"eval/loss": loss}, examples=())
        evaluation, more = self._task(step)
        return replace(evaluation, metrics={"eval/loss": loss, **evaluation.metrics, **more})

    def _held_out(self) -> Batch:
        """At most as many held-out demonstrations as held-out prompts are sampled."""
        examples = self.plan.held_out_examples
        return examples.batch(range(min(self.config.eval.num_prompts, len(examples.texts))))

    def _task(self, step: int) -> tuple[Evaluation, dict[str, float]]:
        settings, held_out = self.config.eval, self.plan.held_out
        assert held_out is not None
        assert self.generator is not None
        assert self.scorer is not None
        assert self.freshness is not None
        self.generator.load(self.learner.publish(step))
        self.freshness.check(step, self.generator, self.learner)
        sampling = self.config.generation.sampling
        if settings.temperature is not None:
            sampling = replace(sampling, temperature=settings.temperature)
        evaluation, groups, scores = evaluate(
            self.generator,
            self.scorer,
            held_out.prompts[: settings.num_prompts],
            step=step,
            seed=self.config.seed,
            num_samples=settings.num_samples,
            sampling=sampling,
            correct_at=settings.correct_at,
            num_examples=settings.num_examples,
        )
        self.generator.sleep()
        if not settings.kl_base:
            return evaluation, {}
        assert isinstance(self.learner, Roles), "check_config refuses the KL to a base that changes"
        batch = collate(groups, scores, self.learner.backbone.decode)
        return evaluation, {"eval/kl_base": kl_to_base(self.learner, batch)}

    def saved(self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        learner = self.learner
        if isinstance(learner, WholeModel):
            return Checkpoint(
                step=step,
                adapters={},
                adapter_config={},
                optimizer=optimizer,
                state=state,
                write_folders={MODEL: learner.write},
            )
        return Checkpoint(
            step=step,
            adapters={POLICY: learner.weights(POLICY)},
            adapter_config=learner.adapter_config(),
            optimizer=optimizer,
            state=state,
        )

    def restore(self, saved: Checkpoint) -> None:
        if isinstance(self.learner, WholeModel):
            assert saved.folder is not None, "it was loaded from a folder"
            self.learner.restore(saved.folder / MODEL)
        else:
            self.learner.restore(saved.adapters)

    def sizes(self) -> Sequence[Row]:
        backbone, forward = self.learner.backbone, self.learner.forward
        return size_rows(self.plan, facts_of(self.learner.model, self.parameters(), backbone, forward))


def size_rows(plan: SftPlan, facts: Facts) -> list[Row]:
    """Every size of `rlft sft` that people ask about."""
    run, examples = plan.config, len(plan.train.texts)
    task = f"{plan.engine}, {run.eval.num_samples} samples of each held-out prompt"
    return [
        facts.model_row(run.model.path, "parameters"),
        (
            "trainable",
            f"{facts.trainable:,}",
            "all weights" if run.lora is None else f"{run.lora.kind} rank {run.lora.rank}",
        ),
        facts.forward_row(),
        ("demonstrations", f"{examples:,}", f"{len(plan.held_out_examples.texts):,} more held out"),
        ("a step", f"{run.examples_per_step}", "demonstrations in one optimizer update"),
        (
            "total",
            f"{plan.num_steps} steps",
            f"{plan.num_steps * run.examples_per_step / examples:.1f} epochs of the demonstrations",
        ),
        ("task accuracy", "no" if plan.held_out is None else "yes", "data=null" if not plan.held_out else task),
    ]


def open_lesson(plan: SftPlan, engines: Engines, stack: ExitStack) -> Demonstrated:
    """Loads the model and, where the task is evaluated, opens the engine and the rewards' workers."""
    config = plan.config
    if config.lora is None:
        learner: Roles | WholeModel = WholeModel(load_for_training(config.model, config.token_budget, own=True))
    else:
        backbone = load_for_training(config.model, config.token_budget)
        learner = policy_alone(backbone, config.lora, token_budget=config.token_budget, seed=config.seed)
        stack.callback(learner.close)
    if plan.held_out is None:
        return Demonstrated(plan, learner, None, None)
    rewards, scoring = specs(config.reward), config.scoring
    resident = open_resident(rewards, learner, learns=False) if isinstance(learner, Roles) else {}
    scorer = Scorer(rewards, scoring.workers, scoring.timeout, scoring.on_error, resident)
    stack.callback(scorer.close)
    rank = 1 if config.lora is None else config.lora.rank
    generator = engines.open(plan.engine, config, rank, learner, learner.backbone)
    return Demonstrated(plan, learner, generator, scorer)


def do(plan: SftPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    """Trains to the last step or an interruption."""
    return learn(plan, folder, lambda stack: open_lesson(plan, engines, stack), say)


def closing(plan: SftPlan, folder: Path) -> None:
    """The page at the end of a run."""
    from rlft.logger.summary import print_summary

    command, lora, run = program(), plan.config.lora, f"run={folder}"
    go_on = [override("model.path", folder)]
    if lora is not None:
        go_on = [override("model.path", plan.config.model.path), override("lora.path", folder)]
        go_on += overrides(lora.keys_of_shape)
    # A run without a task has no held-out questions: it is evaluated on the embedded task.
    task = [] if plan.held_out is not None else ["data=arithmetic"]
    commands = [
        ("evaluate with more samples", [command, "eval", run, *task, "eval.num_samples=8"]),
        ("talk to it", [command, "chat", run]),
        ("go on with reinforcement learning", [command, "train", "+recipe=grpo_arithmetic", *go_on]),
    ]
    print_summary(folder, [(what, command_line(*words)) for what, words in commands])


WORK = Work(
    make_plan=make_plan,
    check=lambda plain: check_machine(check_config(plain)[0]),
    do=do,
    steps_done=steps_done,
    closing=closing,
)
