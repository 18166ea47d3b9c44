"""The plan of `rlft sample`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlft.config.instantiate import instantiate
from rlft.config.model import HEAD, LoraSettings
from rlft.config.resolved import Resolved
from rlft.config.schema import AUTO, GenerationConfig, SampleConfig
from rlft.data.prompts import PromptSet, scan, tokenizer_fingerprint, untokenised
from rlft.environment.protocol import Environment
from rlft.generation.memory import ModelSizes
from rlft.generation.stops import check_stops
from rlft.model.adapter_folder import content_fingerprint
from rlft.model.backbone import ends_of, fingerprint, load_tokenizer, read_config
from rlft.plan import rules
from rlft.plan.adapters import check_adapters, check_classifiers
from rlft.plan.disk_space import TOKEN_ID, completion_bytes
from rlft.plan.environments import environment_of, prompt_additions
from rlft.plan.reference_answers import check_references
from rlft.plan.run_plan import Plan
from rlft.plan.sample_checks import lora_of, uses_of
from rlft.plan.servers import check_servers
from rlft.reward.workers.reward_spec import check_with_rewards, specs
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
    """Refuses an adapter that the engine cannot serve; this verb has no `lora` section to change instead."""
    if generation.engine == AUTO:
        return
    engine = generation.named(generation.engine)
    if lora.use_dora and not engine.serves_dora:
        problem = f"is a DoRA adapter, which {engine.title} cannot serve"
        raise UserError("adapter", problem, got=adapter, remedy="use generation=transformers")
    if lora.adapts_head and not engine.serves_head:
        problem = f"adapts {HEAD}, which {engine.title} cannot serve"
        raise UserError("adapter", problem, got=adapter, remedy="use generation=transformers")
    rules.check_served(generation, lora)


def make_plan(resolved: Resolved, *, runs_here: bool = True) -> SamplePlan:
    """Reads the model's config.json and tokenizer, and scans the data.

    Args:
        resolved: the config.
        runs_here: False if the run is only planned, so that its engine and libraries for 4-bit weights may be missing.

    Raises:
        UserError: the model or the data are wrong.
    """
    config: SampleConfig = resolved.config
    rules.check_machine(config.model, runs_here=runs_here)
    rewards, lora, used = specs(config.reward), lora_of(config), uses_of(config)
    engine, _ = rules.choose_engine(
        config.generation, config.model, None if config.adapter is None else lora, runs_here=runs_here
    )
    if config.adapter is not None:
        _check_served(config.generation, lora, config.adapter)
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limits = config.prompts
    rules.check_row(limits.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config)
    check_adapters(used, lora, config.model, base_fingerprint, model_config)
    if config.adapter is not None:
        rules.check_adapted(config.generation.named(engine), lora, config.model, model_config, config.adapter)
    check_classifiers(rewards)
    tokenizer, split = load_tokenizer(config.model), Split(config.split)
    ends = ends_of(config.model, limits.style, tokenizer)
    check_stops(config.generation, tokenizer, model_config.get_text_config().vocab_size, ends.ids)
    data = instantiate(config.data, "data").load(split)
    environment = environment_of(config)
    shown = prompt_additions(environment, tokenizer, data)
    prompts = scan(data, tokenizer, limits.max_tokens, limits.over_limit, split, limits.style, shown)
    rules.check_metadata(rewards, prompts.prompts[0])
    texts = untokenised(prompts)
    data_notes = (*check_with_rewards(rewards, texts), *check_references(config, rewards, texts, tokenizer, ends))
    check_servers(rewards, prompts.prompts[0])
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
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used},
        },
    )
