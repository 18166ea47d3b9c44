"""The plan of `rlft sample`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlft.config.instantiate import instantiate
from rlft.config.model import HEAD, LoraSettings
from rlft.config.resolved import Resolved
from rlft.config.schema import AUTO, GenerationConfig, SampleConfig
from rlft.data.prompts import PromptSet, scan, tokenizer_fingerprint
from rlft.environment.protocol import Environment
from rlft.generation.memory import ModelSizes
from rlft.generation.stops import check_stops
from rlft.model.backbone import ends_of, fingerprint, load_tokenizer, read_config
from rlft.plan.adapters import check_adapters, fingerprints_of
from rlft.plan.config_checks import lora_of, uses_of_sample
from rlft.plan.images import check_images
from rlft.plan.model_rules import check_adapted, check_machine, check_row, check_served, choose_engine
from rlft.plan.run_plan import Plan
from rlft.plan.scoring_rules import check_classifiers, prompt_additions, read_environment
from rlft.plan.sizes import TOKEN_ID, completion_bytes
from rlft.plan.trials import check_scoring
from rlft.reward.workers.reward_spec import specs
from rlft.types import Prompt, Split, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan(Plan):
    """The plan of `rlft sample`.

    Attributes:
        engine: the engine that samples.
        prompts: the tokenised prompts.
        data_notes: the rewards' notes about the prompts.
        lora: the shape of the adapter that samples, or of a reward's adapter.
        tokenizer: the tokenizer's fingerprint.
        environment: the environment; None for completions of a single turn.
    """

    config: SampleConfig
    engine: str
    prompts: PromptSet
    data_notes: tuple[str, ...]
    lora: LoraSettings
    tokenizer: str
    environment: Environment | None = None

    @property
    def num_steps(self) -> int:
        return -(-len(self.chosen) // self.config.prompts_per_step)

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

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config = self.config
        limit = min(config.n, config.max_per_prompt or config.n)
        line = completion_bytes(config) + TOKEN_ID * config.generation.max_tokens
        return {"samples": len(self.chosen) * limit * line}


def _check_served(generation: GenerationConfig, lora: LoraSettings, adapter: str) -> None:
    """Refuses an adapter that the engine cannot serve; this command has no `lora` section to change instead."""
    if generation.engine == AUTO:
        return
    engine = generation.named(generation.engine)
    if lora.use_dora and not engine.serves_dora:
        problem = f"is a DoRA adapter, which {engine.title} cannot serve"
        raise UserError("adapter", problem, got=adapter, remedy="use generation=transformers")
    if lora.adapts_head and not engine.serves_head:
        problem = f"adapts {HEAD}, which {engine.title} cannot serve"
        raise UserError("adapter", problem, got=adapter, remedy="use generation=transformers")
    check_served(generation, lora)


def make_plan(resolved: Resolved, *, runs_here: bool = True) -> SamplePlan:
    """Reads the model's config.json and tokenizer, and scans the data: `rlft.config.command.Command.make_plan`."""
    config: SampleConfig = resolved.config
    check_machine(config.model, runs_here=runs_here)
    rewards, lora, used = specs(config.reward), lora_of(config), uses_of_sample(config)
    engine, _ = choose_engine(
        config.generation, config.model, None if config.adapter is None else lora, runs_here=runs_here
    )
    if config.adapter is not None:
        _check_served(config.generation, lora, config.adapter)
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limits = config.prompts
    check_row(limits.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config)
    check_adapters(used, lora, config.model, base_fingerprint, model_config)
    if config.adapter is not None:
        check_adapted(config.generation.named(engine), lora, config.model, model_config, config.adapter)
    check_classifiers(rewards)
    tokenizer, split = load_tokenizer(config.model, limits.template_variables), Split(config.split)
    ends = ends_of(config.model, limits.style, tokenizer)
    check_stops(config.generation, tokenizer, model_config.get_text_config().vocab_size, ends.ids)
    data = instantiate(config.data, "data").load(split)
    environment = read_environment(config.environment)
    shown = prompt_additions(environment, tokenizer, data)
    prompts = scan(data, tokenizer, limits.max_tokens, limits.over_limit, split, limits.style, shown)
    check_images(config, model_config.model_type, config.generation.named(engine), prompts)
    data_notes = check_scoring(config, rewards, prompts, tokenizer, ends)
    return SamplePlan(
        config=config,
        plain=resolved.plain,
        engine=engine,
        prompts=prompts,
        data_notes=data_notes,
        lora=lora,
        tokenizer=tokenizer_fingerprint(tokenizer),
        environment=environment,
        ends=ends,
        notes=ends.notes,
        fingerprints={
            "data_fingerprint": prompts.fingerprint,
            "base_fingerprint": base_fingerprint,
            **fingerprints_of(used),
        },
    )
