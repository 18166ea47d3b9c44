"""The plan of `rlft sft`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlft.config.instantiate import instantiate
from rlft.config.resolved import Resolved
from rlft.config.schema import SftConfig
from rlft.data.examples import Examples, scan_demonstrations
from rlft.data.prompts import PromptSet, left_out, scan, untokenised
from rlft.generation.memory import ModelSizes
from rlft.generation.stops import check_stops
from rlft.model.adapter_folder import content_fingerprint
from rlft.model.backbone import (
    ends_of,
    fingerprint,
    load_tokenizer,
    read_config,
    resolve_device,
    resolve_dtype,
)
from rlft.plan import rules
from rlft.plan.adapters import check_adapters, check_classifiers, uses_of_rewards
from rlft.plan.disk_space import checkpoint_bytes, completion_bytes, metrics_bytes
from rlft.plan.memory_demand import sampling_of, sizes_of
from rlft.plan.memory_parts import Demand
from rlft.plan.reference_answers import check_references
from rlft.plan.run_plan import DataLengths, Plan
from rlft.plan.sampling_shapes import of_evaluation
from rlft.plan.servers import check_servers
from rlft.plan.sft_checks import check_trainable, uses_of
from rlft.plan.startup_table import Facts, TableRow
from rlft.reward.workers.reward_spec import check_with_rewards, notes, specs
from rlft.types import Split


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

    def startup_rows(self, facts: Facts) -> list[TableRow]:
        run, examples = self.config, len(self.train.texts)
        task = f"{self.engine}, {run.eval.num_samples} samples of each held-out prompt"
        return [
            facts.model_row(run.model.path, "parameters"),
            (
                "trainable",
                f"{facts.trainable:,}",
                "all weights" if run.lora is None else f"{run.lora.kind} rank {run.lora.rank}",
            ),
            *facts.adapter_rows(),
            *facts.base_rows(),
            facts.forward_row(),
            facts.kernels_row(),
            ("demonstrations", f"{examples:,}", f"{len(self.held_out_examples.texts):,} more held out"),
            *self.end_rows(),
            ("a step", f"{run.examples_per_step}", "demonstrations in one optimizer update"),
            (
                "total",
                f"{self.num_steps} steps",
                f"{self.num_steps * run.examples_per_step / examples:.1f} epochs of the demonstrations",
            ),
            ("task accuracy", "no" if self.held_out is None else "yes", "data=null" if not self.held_out else task),
        ]

    def demand(self, model: ModelSizes, recompute: bool) -> Demand:
        """The demand of one adapter, or of training all weights."""
        run, whole = self.config, self.config.lora is None
        longest = max(self.train.texts, key=lambda text: len(text.ids))
        return Demand(
            adapters=0 if whole else 1,
            trainable=model.parameters if whole else model.lora,
            whole_model=whole,
            prompt_tokens=longest.num_given,
            completion_tokens=len(longest.ids) - longest.num_given,
            group=1,
            rows=run.examples_per_step,
            update_rows=run.examples_per_step,
            token_budget=run.token_budget,
            recompute=recompute,
            device=resolve_device(run.model.device).type,
            **sampling_of(run, self.engine, of_evaluation(self.held_out, run.eval)),
        )

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        if self.config.lora is None:
            return {"base (learns)": model.parameters}
        return {"base (frozen)": model.parameters, "policy (learns)": model.lora}

    def lengths(self) -> list[DataLengths]:
        splits = (("demonstrations", self.train), ("held-out demonstrations", self.held_out_examples))
        return [DataLengths(name, [len(text.ids) for text in split.texts], split.note) for name, split in splits]

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config = self.config
        trainable = self.demand(model or sizes_of(config.model, config.lora), False).trainable
        result = {"checkpoints": checkpoint_bytes(config.checkpoint, self.num_steps, trainable)}
        if not self.writes_metrics:
            return result
        examples = config.eval.num_examples * completion_bytes(config)
        return result | {"metrics": metrics_bytes(self.num_steps, config.eval.every, examples)}


def check_machine(config: SftConfig, *, runs_here: bool = True) -> None:
    """Refuses a missing device, and a dtype in which the model's own weights cannot be trained."""
    rules.check_machine(config.model, runs_here=runs_here)
    if config.lora is None:
        dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
        check_trainable(str(dtype).removeprefix("torch."))


def make_plan(resolved: Resolved, *, runs_here: bool = True) -> SftPlan:
    """Reads the model's config.json and tokenizer, and scans the data.

    Args:
        resolved: the config.
        runs_here: False if the run is only planned, so that its engine and libraries for 4-bit weights may be missing.

    Raises:
        UserError: the model or the data are wrong.
    """
    config: SftConfig = resolved.config
    check_machine(config, runs_here=runs_here)
    whole = config.lora is None
    engine, _ = rules.choose_engine(config.generation, config.model, config.lora, runs_here=runs_here, whole=whole)
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limits = config.prompts
    rules.check_row(limits.max_tokens, config.max_completion_tokens, "max_completion_tokens", model_config)
    used = uses_of(config)
    tokenizer = load_tokenizer(config.model)
    ends = ends_of(config.model, limits.style, tokenizer)
    check_stops(config.generation, tokenizer, model_config.get_text_config().vocab_size, ends.ids)
    held_out, data_notes = None, ()
    if config.data and config.eval.every:
        rules.check_row(limits.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config)
        rewards = specs(config.reward)
        used += uses_of_rewards(rewards)
        check_classifiers(rewards)
        prompts = instantiate(config.data, "data").load(Split.held_out)
        held_out = scan(prompts, tokenizer, limits.max_tokens, limits.over_limit, Split.held_out, limits.style)
        rules.check_metadata(rewards, held_out.prompts[0])
        texts = untokenised(held_out)
        reference_notes = check_references(config, rewards, texts, tokenizer, ends)
        data_notes = (*notes(rewards), *check_with_rewards(rewards, texts), *reference_notes)
        check_servers(rewards, held_out.prompts[0])
    if config.lora is not None:
        rules.check_targets(config.lora, config.model, model_config)
        if held_out is not None:
            rules.check_adapted(config.generation.named(engine), config.lora, config.model, model_config)
        check_adapters(used, config.lora, config.model, base_fingerprint, model_config)
    demonstrations = instantiate(config.demonstrations, "demonstrations")
    train, held_out_examples = (
        scan_demonstrations(demonstrations.load(split), tokenizer, limits, config.max_completion_tokens, split)
        for split in (Split.train, Split.held_out)
    )
    size = config.examples_per_step
    rules.check_enough("examples_per_step", size, size, len(train.texts), "demonstrations")
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
            "base_fingerprint": base_fingerprint,
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used},
        },
        notes=(
            *(note for note in (train.note, held_out_examples.note) if note),
            *_notes(config, held_out),
            *ends.notes,
            *data_notes,
        ),
    )


def _notes(config: SftConfig, held_out: PromptSet | None) -> Iterator[str]:
    """Notes about the task whose accuracy is measured."""
    if held_out is not None:
        yield from left_out(held_out, "held-out", config.prompts.max_tokens)
        yield from filter(None, [held_out.note])
