"""The plan of `rlft sft`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rlft.config.instantiate import instantiate
from rlft.config.model import Recompute
from rlft.config.resolved import Resolved
from rlft.config.schema import SftConfig
from rlft.data.examples import Examples, scan_demonstrations
from rlft.data.prompts import PromptSet
from rlft.generation.memory import ModelSizes
from rlft.plan import roles, sizes
from rlft.plan.demand import Demand, Networks, Rows
from rlft.plan.inputs import read_base, read_tokenizer, scan_prompts
from rlft.plan.model_rules import (
    check_machine,
    check_optimizer,
    check_row,
    choose_engine,
    notes_of_drafts,
    notes_of_tiles,
)
from rlft.plan.rewards.references import check_scoring
from rlft.plan.roofline import StepWork, Work
from rlft.plan.rules import check_classifiers, check_enough
from rlft.plan.run_plan import Plan
from rlft.plan.startup_table import TableRow
from rlft.reward.workers.reward_spec import reported, specs
from rlft.system.device import kind_name, resolve_device
from rlft.types import Split, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan(Plan):
    """The plan of `rlft sft`; `held_out` holds the prompts for the task accuracy, or None if that is not measured."""

    config: SftConfig
    train: Examples
    held_out_examples: Examples
    held_out: PromptSet | None

    @property
    def num_steps(self) -> int:
        """The configured steps, or those that the epochs take."""
        each_epoch = max(1, len(self.train.texts) // self.config.examples_per_step)
        return self.config.steps or self.config.epochs * each_epoch

    @property
    def scored_prompts(self) -> PromptSet | None:
        return self.held_out

    def planned_rows(self) -> list[TableRow]:
        run, examples = self.config, len(self.train.texts)
        epochs = self.num_steps * run.examples_per_step / examples
        task = f"{self.engine}, {counted(run.eval.num_samples, 'sample')} of each held-out prompt"
        return [
            ("demonstrations", f"{examples:,}", f"{len(self.held_out_examples.texts):,} more held out"),
            *self.end_rows(),
            ("total", f"{counted(self.num_steps, 'step')}", f"{epochs:.1f} epochs of the demonstrations"),
            ("task accuracy", "no" if self.held_out is None else "yes", "data=null" if not self.held_out else task),
        ]

    def demand(self, model: ModelSizes, recompute: Recompute) -> Demand:
        """The demand of one adapter, or of training all weights."""
        run = self.config
        longest = max(self.train.texts, key=lambda text: len(text.ids))
        on_the_base, beside = (0, 0) if self.held_out is None else sizes.learned_rewards(run)
        whole = run.lora is None
        return Demand(
            networks=Networks(
                adapters=0 if whole else 1 + on_the_base,
                trainable=model.parameters if whole else model.lora,
                matrices=model.matrices,
                whole_model=whole,
                rewards=beside,
            ),
            rows=Rows(
                prompt_tokens=longest.num_given,
                completion_tokens=len(longest.ids) - longest.num_given,
                group=1,
                number=run.examples_per_step,
                in_update=run.examples_per_step,
                key="examples_per_step",
            ),
            optimizer=run.trainer.optimizer,
            token_budget=run.token_budget,
            recompute=recompute,
            device=kind_name(resolve_device(run.model.device)),
            **sizes.sampling_of(run, self.engine, sizes.of_evaluation(self.held_out, run.eval)),
        )

    def step_work(self) -> StepWork:
        run, held_out = self.config, self.held_out
        evaluated = [] if held_out is None else held_out.num_tokens[: run.eval.num_prompts]
        return StepWork(
            trained=_rows(self.train, run.token_budget, run.examples_per_step),
            sampled=sizes.rows_of(evaluated, run.eval.num_samples, run) if evaluated else None,
            read=_rows(self.held_out_examples, run.token_budget) if self.held_out_examples.texts else None,
        )

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        if self.config.lora is None:
            return {"base (learns)": model.parameters}
        return {"base (frozen)": model.parameters, "policy (learns)": model.lora}

    def lengths(self) -> dict[str, Sequence[int]]:
        splits = {"demonstrations": self.train, "held-out demonstrations": self.held_out_examples}
        return {name: [len(text.ids) for text in split.texts] for name, split in splits.items()}

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config = self.config
        demand = self.demand(model or sizes.sizes_of(config.model, config.lora), False)
        saved = sizes.checkpoint_bytes(config.checkpoint, self.num_steps, demand)
        examples = config.eval.num_examples * sizes.completion_bytes(config)
        return {"checkpoints": saved, **self.metrics_bytes(examples)}


def _rows(examples: Examples, budget: int, number: int | None = None) -> Work:
    """So many rows of these demonstrations (None: all), each of their mean lengths."""
    given = fmean(text.num_given for text in examples.texts)
    learned = fmean(len(text.ids) for text in examples.texts) - given
    number = len(examples.texts) if number is None else number
    return Work(prompts=number, group=1, prompt=given, completion=learned, budget=budget)


def make_plan(resolved: Resolved, *, runs_here: bool = True) -> SftPlan:
    """Reads the model's config.json and tokenizer, and scans the data: `rlft.config.command.Command.make_plan`."""
    config: SftConfig = resolved.config
    check_machine(config.model, runs_here=runs_here)
    check_optimizer(config.trainer.optimizer, config.model, runs_here=runs_here)
    engine, _ = choose_engine(
        config.generation, config.model, config.lora, runs_here=runs_here, whole=config.lora is None
    )
    model_config, base = read_base(config.model)
    limits = config.prompts
    check_row(limits.max_tokens, config.max_completion_tokens, "max_completion_tokens", model_config)
    used = roles.use_of_policy("lora.path", roles.start_of(config.lora))
    tokenizer, ends = read_tokenizer(config, model_config)
    held_out, data_notes, classifiers = None, (), dict[str, str]()
    if config.data and config.eval.every:
        check_row(limits.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config)
        rewards = specs(config.reward)
        used += roles.uses_of_rewards(rewards)
        classifiers = check_classifiers(rewards)
        prompts = instantiate(config.data, "data").load(Split.held_out)
        held_out = scan_prompts(config, prompts, tokenizer, Split.held_out)
        data_notes = (*reported(rewards, "note"), *check_scoring(config, rewards, held_out, tokenizer, ends))
    sampling = None if held_out is None else config.generation.named(engine)
    roles.check_learner_on(config, sampling, used, base, model_config)
    demonstrations = instantiate(config.demonstrations, "demonstrations")
    train, held_out_examples = (
        scan_demonstrations(demonstrations.load(split), tokenizer, limits, config.max_completion_tokens, split)
        for split in (Split.train, Split.held_out)
    )
    size = config.examples_per_step
    check_enough("examples_per_step", size, size, len(train.texts), "demonstration")
    return SftPlan(
        config=config,
        plain=resolved.plain,
        engine=None if held_out is None else engine,
        train=train,
        held_out_examples=held_out_examples,
        held_out=held_out,
        loggers=resolved.parts,
        ends=ends,
        fingerprints={
            "demonstrations_fingerprint": train.fingerprint,
            "held_out_demonstrations_fingerprint": held_out_examples.fingerprint,
            **({} if held_out is None else {"held_out_fingerprint": held_out.fingerprint}),
            **base,
            **classifiers,
            **roles.fingerprints_of(used),
        },
        notes=(
            *train.notes,
            *held_out_examples.notes,
            *notes_of_tiles(config.model, config.lora, model_config),
            *roles.notes_of_adapters(used, config.model, base),
            *(() if held_out is None else held_out.notes),
            *ends.notes,
            *data_notes,
            *notes_of_drafts(config.generation),
        ),
    )
