"""The plan of `rlft sample`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlft.config.instantiate import instantiate
from rlft.config.model import HEAD, LoraSettings, Recompute
from rlft.config.resolved import Resolved
from rlft.config.schema import AUTO, GenerationConfig, SampleConfig
from rlft.data.prompts import PromptSet, tokenizer_fingerprint
from rlft.environment.protocol import Environment, read_environment
from rlft.generation.memory import Decoding, ModelSizes
from rlft.plan import model_rules, roles, rules, sizes
from rlft.plan.demand import Demand, Networks, Rows, TowerDemand, tower_demand
from rlft.plan.rewards.references import check_scoring
from rlft.plan.roofline import StepWork
from rlft.plan.run_plan import Plan
from rlft.reward.workers.reward_spec import specs
from rlft.system.device import kind_name, resolve_device, resolve_dtype
from rlft.types import Prompt, Split, require


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan(Plan):
    """The plan of `rlft sample`."""

    config: SampleConfig
    engine: str
    prompts: PromptSet
    lora: LoraSettings  # the shape of the adapter that samples, or of a reward's adapter
    tokenizer: str  # its fingerprint
    environment: Environment | None = None  # None for completions of a single turn
    tower: TowerDemand | None = None  # of the images in prompts

    @property
    def num_steps(self) -> int:
        return -(-len(self.chosen) // self.config.prompts_per_step)

    @property
    def scored_prompts(self) -> PromptSet:
        return self.prompts

    @property
    def lora_settings(self) -> LoraSettings:
        return self.lora

    @property
    def images(self) -> int:
        return self.prompts.images

    @property
    def chosen(self) -> Sequence[Prompt]:
        """The prompts that are sampled, in the order of the data."""
        return self.prompts.prompts[: self.config.num_prompts]

    def at(self, step: int) -> Sequence[Prompt]:
        """The prompts of the step that follows `step` steps."""
        size = self.config.prompts_per_step
        return tuple(self.chosen[step * size : (step + 1) * size])

    @property
    def decodings(self) -> list[Decoding]:
        run, longest = self.config, self.prompts.longest(self.config.num_prompts).token_ids
        number, sampling = min(run.prompts_per_step, len(self.chosen)), run.generation.sampling
        first = Decoding(num_prompts=number, samples=run.n, longest=longest, sampling=sampling)
        return [first, sizes.of_a_later_round(first, run.generation.max_tokens)] if run.environment else [first]

    def demand(self, model: ModelSizes, recompute: Recompute) -> Demand:
        """The demand of the engine besides the base, the adapter that samples, and learned rewards."""
        run, [first, *_] = self.config, self.decodings
        longest, per_step = first.longest, first.num_prompts
        on_the_base, beside = sizes.learned_rewards(run)
        return Demand(
            networks=Networks(adapters=1 + on_the_base, trainable=0, matrices=0, rewards=beside),
            rows=Rows(
                prompt_tokens=len(longest),
                completion_tokens=run.generation.max_tokens,
                group=run.n,
                number=run.n * per_step,
                in_update=run.n * per_step,
            ),
            token_budget=run.token_budget,
            recompute=recompute,
            device=kind_name(resolve_device(run.model.device)),
            tower=self.tower,
            **sizes.sampling_of(run, self.engine, self.decodings),
        )

    def step_work(self) -> StepWork:
        run = self.config
        lengths = self.prompts.num_tokens[: run.num_prompts]
        scorers = sum(spec.runs_in_trainer for spec in specs(run.reward).values())
        rows = sizes.rows_of(lengths, run.n, run, number=len(self.chosen) / self.num_steps)
        return StepWork(trained=rows, epochs=0, scorers=scorers, is_sampled=True)

    def lengths(self) -> dict[str, Sequence[int]]:
        return {"prompts": self.prompts.num_tokens}

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config = self.config
        limit = min(config.n, config.max_per_prompt or config.n)
        line = sizes.completion_bytes(config) + sizes.TOKEN_ID * config.generation.max_tokens
        return {"samples": len(self.chosen) * limit * line}


def _check_served(generation: GenerationConfig, lora: LoraSettings, adapter: str) -> None:
    """Refuses an adapter that the engine cannot serve; this command has no `lora` section to change instead."""
    if generation.engine == AUTO:
        return
    engine = generation.named(generation.engine)
    problems = model_rules.unserved(engine, lora)
    for key, what in (("lora.use_dora", "is a DoRA adapter"), ("lora.target_modules", f"adapts {HEAD}")):
        problem = f"{what}, which {engine.title} cannot serve"
        require(key not in problems, "adapter", problem, got=adapter, remedy="use generation=transformers")
    model_rules.check_served(generation, lora)


def make_plan(resolved: Resolved, *, runs_here: bool = True) -> SamplePlan:
    """Reads the model's config.json and tokenizer, and scans the data: `rlft.config.command.Command.make_plan`."""
    config: SampleConfig = resolved.config
    model_rules.check_machine(config.model, runs_here=runs_here)
    rewards, lora, used = specs(config.reward), rules.lora_of(config), rules.uses_of_sample(config)
    engine, _ = model_rules.choose_engine(
        config.generation, config.model, None if config.adapter is None else lora, runs_here=runs_here
    )
    if config.adapter is not None:
        _check_served(config.generation, lora, config.adapter)
    model_config, base = sizes.read_base(config.model)
    model_rules.check_row(
        config.prompts.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config
    )
    roles.check_adapters(used, lora, config.model, base, model_config)
    if config.adapter is not None:
        model_rules.check_adapted(config.generation.named(engine), lora, config.model, model_config, config.adapter)
    classifiers = rules.check_classifiers(rewards)
    tokenizer, ends = sizes.read_tokenizer(config, model_config)
    split = Split(config.split)
    data = instantiate(config.data, "data").load(split)
    environment = read_environment(config.environment)
    shown = rules.prompt_additions(environment, tokenizer, data)
    prompts = sizes.scan_prompts(config, data, tokenizer, split, shown)
    rules.check_images(config, model_config.model_type, config.generation.named(engine), prompts)
    num_chosen = len(prompts.prompts[: config.num_prompts])
    dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
    data_notes = check_scoring(config, rewards, prompts, tokenizer, ends)
    return SamplePlan(
        config=config,
        plain=resolved.plain,
        engine=engine,
        prompts=prompts,
        lora=lora,
        tokenizer=tokenizer_fingerprint(tokenizer),
        environment=environment,
        tower=tower_demand(model_config, dtype, [prompts], num_chosen, tokenizer),
        ends=ends,
        notes=(
            *prompts.notes,
            *data_notes,
            *roles.notes_of_adapters(used, config.model, base),
            *ends.notes,
            *model_rules.notes_of_drafts(config.generation),
        ),
        fingerprints={"data_fingerprint": prompts.fingerprint, **base, **classifiers, **roles.fingerprints_of(used)},
    )
