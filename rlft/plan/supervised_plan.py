"""The plans of `rlft sft`, `rm` and `dpo`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlft.algorithm.preference import RankingLoss, pairs_of_ranking
from rlft.config.instantiate import instantiate
from rlft.config.model import Recompute
from rlft.config.resolved import Resolved
from rlft.config.schema import DpoConfig, RmConfig, SftConfig
from rlft.data.examples import Examples, RankedTokens, Rankings, scan_demonstrations, scan_rankings
from rlft.data.prompts import PromptSet
from rlft.generation.memory import Decoding, ModelSizes
from rlft.model.adapter_folder import num_parameters
from rlft.plan import model_rules, roles, rules, sizes
from rlft.plan.demand import Demand, Loss, Networks, Rows
from rlft.plan.rewards.references import check_scoring
from rlft.plan.roofline import StepWork, Work
from rlft.plan.run_plan import Plan, TableRow
from rlft.reward.workers.reward_spec import specs
from rlft.system.device import kind_name, resolve_device
from rlft.tokens.text import RunTokenizer
from rlft.types import Split, UserError, counted


# -- demonstrations ----------------------------------------------------------------------------------------------------
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

    @property
    def decodings(self) -> list[Decoding]:
        return sizes.of_evaluation(self.held_out, self.config)

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
            **sizes.sampling_of(run, self.engine, self.decodings),
        )

    def step_work(self) -> StepWork:
        run, held_out = self.config, self.held_out
        evaluated = [] if held_out is None else held_out.num_tokens[: run.eval.num_prompts]
        return StepWork(
            trained=_work_of_examples(self.train, run.token_budget, run.examples_per_step),
            sampled=sizes.rows_of(evaluated, run.eval.num_samples, run) if evaluated else None,
            read=_work_of_examples(self.held_out_examples, run.token_budget) if self.held_out_examples.texts else None,
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


def _work_of_examples(examples: Examples, budget: int, number: int | None = None) -> Work:
    """So many rows of these demonstrations (None: all), each of their mean lengths."""
    given = fmean(text.num_given for text in examples.texts)
    learned = fmean(len(text.ids) for text in examples.texts) - given
    number = len(examples.texts) if number is None else number
    return Work(prompts=number, group=1, prompt=given, completion=learned, budget=budget)


def plan_demonstrations(resolved: Resolved, *, runs_here: bool = True) -> SftPlan:
    """Reads the model's config.json and tokenizer, and scans the data: `rlft.config.command.Command.make_plan`."""
    config: SftConfig = resolved.config
    _, loggers = resolved.parts
    model_rules.check_machine(config.model, runs_here=runs_here)
    model_rules.check_optimizer(config.trainer.optimizer, config.model, runs_here=runs_here)
    engine, _ = model_rules.choose_engine(
        config.generation, config.model, config.lora, runs_here=runs_here, whole=config.lora is None
    )
    model_config, base = sizes.read_base(config.model)
    limits = config.prompts
    model_rules.check_row(limits.max_tokens, config.max_completion_tokens, "max_completion_tokens", model_config)
    used = roles.use_of_policy("lora.path", roles.start_of(config.lora))
    tokenizer, ends = sizes.read_tokenizer(config, model_config)
    held_out, data_notes, classifiers = None, (), dict[str, str]()
    if config.data and config.eval.every:
        model_rules.check_row(limits.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config)
        rewards = specs(config.reward)
        used += roles.uses_of_rewards(rewards)
        classifiers = rules.check_classifiers(rewards)
        prompts = instantiate(config.data, "data").load(Split.held_out)
        held_out = sizes.scan_prompts(config, prompts, tokenizer, Split.held_out)
        data_notes = check_scoring(config, rewards, held_out, tokenizer, ends)
    sampling = None if held_out is None else config.generation.named(engine)
    roles.check_learner_on(config, sampling, used, base, model_config)
    demonstrations = instantiate(config.demonstrations, "demonstrations")
    train, held_out_examples = (
        scan_demonstrations(demonstrations.load(split), tokenizer, limits, config.max_completion_tokens, split)
        for split in (Split.train, Split.held_out)
    )
    size = config.examples_per_step
    rules.check_enough("examples_per_step", size, size, len(train.texts), "demonstration")
    return SftPlan(
        config=config,
        plain=resolved.plain,
        engine=None if held_out is None else engine,
        train=train,
        held_out_examples=held_out_examples,
        held_out=held_out,
        loggers=loggers,
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
            *model_rules.notes_of_tiles(config.model, config.lora, model_config),
            *roles.notes_of_adapters(used, config.model, base),
            *(() if held_out is None else held_out.notes),
            *ends.notes,
            *data_notes,
            *model_rules.notes_of_drafts(config.generation),
        ),
    )


# -- rankings ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePlan(Plan):
    """The plan of a run that learns from rankings: a reward model (`rlft rm`) or a policy (`rlft dpo`)."""

    config: RmConfig | DpoConfig
    train: Rankings
    held_out: Rankings
    loss: RankingLoss
    reference: str = "none"  # what the loss compares the policy with: `none`, `base`, or the folder of an adapter
    replay: Rankings | None = None  # rankings of earlier rounds

    @property
    def num_new(self) -> int:
        """The number of this round's rankings in an update, at least one."""
        size = self.config.rankings_per_step
        if self.replay is None or not isinstance(self.config, RmConfig):
            return size
        return max(1, size - round(size * self.config.replay.fraction))

    @property
    def num_steps(self) -> int:
        """The configured steps, or those that the epochs take."""
        each_epoch = max(1, len(self.train.rankings) // self.num_new)
        return self.config.steps or self.config.epochs * each_epoch

    def positions(self, step: int) -> list[int]:
        """The positions of this round's rankings in the update after `step` steps."""
        return self.train.positions(self.config.seed, step, self.num_new, "rankings")

    def replayed(self, step: int) -> list[RankedTokens]:
        """The rankings of earlier rounds in the update after `step` steps."""
        count = self.config.rankings_per_step - self.num_new
        if self.replay is None or not count:
            return []
        positions = self.replay.positions(self.config.seed, step, count, "replay")
        return [self.replay.rankings[i] for i in positions]

    @property
    def trains_reward(self) -> bool:
        """Whether a reward model learns, not a policy."""
        return isinstance(self.config, RmConfig)

    @property
    def has_reference_adapter(self) -> bool:
        return self.reference not in ("none", "base")

    @property
    def _reference_parameters(self) -> int:
        """Number of parameters of the reference's adapter, as its folder has it."""
        return num_parameters(self.reference, rules.REFERENCE) if self.has_reference_adapter else 0

    @property
    def reference_fingerprint(self) -> str:
        """Fingerprint of what the reference's log-probs depend on: the preferences, the base, and its adapter."""
        key = next((k for k in (rules.REFERENCE, "lora.path") if f"{k}_fingerprint" in self.fingerprints), "")
        adapter = self.fingerprints[f"{key}_fingerprint"] if self.has_reference_adapter else "base"
        return f"{self.fingerprints['preferences_fingerprint']} {self.fingerprints['base_fingerprint']} {adapter}"

    def planned_rows(self) -> list[TableRow]:
        run, rankings, replays = self.config, self.train.rankings, self.config.rankings_per_step - self.num_new
        pairs = sum(len(pairs_of_ranking(r.scores)[0]) for r in rankings)
        held_out = counted(len(self.held_out.rankings), "ranking", ",")
        epochs = self.num_steps * self.num_new / len(rankings)
        repeated = "" if self.replay is None else f"; {replays} in a step are replayed"
        return [
            *([self._reference_row()] if isinstance(run, DpoConfig) else ()),
            ("rankings", f"{len(rankings):,}", f"{counted(pairs, 'pair', ',')}; {held_out} held out{repeated}"),
            *self.end_rows(),
            ("total", f"{counted(self.num_steps, 'step')}", f"{epochs:.1f} epochs"),
        ]

    def _reference_row(self) -> TableRow:
        once = "its log-probs are computed once for each completion"
        return {
            "none": ("reference", "none", "the loss needs none"),
            "base": ("reference", "base", f"no adapter; {once}"),
        }.get(self.reference, ("reference", "adapter", f"{once}; {self.reference}"))

    def demand(self, model: ModelSizes, recompute: Recompute) -> Demand:
        """The demand of an update on the longest rankings; nothing is sampled.

        A policy learns by its adapter, besides the reference's where that has one. A reward model learns by an adapter
        and a scalar head next to the policy's adapter; the LM head is not used.
        """
        run = self.config
        group = max(len(ranking.scores) for ranking in self.train.rankings)
        return Demand(
            networks=Networks(
                adapters=2 if self.trains_reward else 1,
                trainable=model.lora + (model.hidden if self.trains_reward else 0),
                matrices=model.matrices,
                frozen=self._reference_parameters,
            ),
            rows=Rows(
                prompt_tokens=run.prompts.max_tokens,
                completion_tokens=run.max_completion_tokens,
                group=group,
                number=run.rankings_per_step * group,
                in_update=run.rankings_per_step * group,
                key="rankings_per_step",
            ),
            optimizer=run.trainer.optimizer,
            loss=Loss(through_head=not self.trains_reward),
            token_budget=run.token_budget,
            recompute=recompute,
            device=kind_name(resolve_device(run.model.device)),
        )

    def step_work(self) -> StepWork:
        """What an update computes; a reference's log-probs are computed once, before the first step."""
        run = self.config
        return StepWork(
            trained=_work_of_rankings(self.train, run.token_budget, run.rankings_per_step),
            read=_work_of_rankings(self.held_out, run.token_budget) if self.held_out.rankings else None,
        )

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        if self.trains_reward:
            return {"base (frozen)": model.parameters, "reward (learns)": model.lora + model.hidden + 1}
        reference = {"reference (frozen)": self._reference_parameters} if self.has_reference_adapter else {}
        return {"base (frozen)": model.parameters, "policy (learns)": model.lora, **reference}

    def lengths(self) -> dict[str, Sequence[int]]:
        splits = {"rankings": self.train.rankings, "held-out rankings": self.held_out.rankings}
        return {name: [len(r.prompt) + max(map(len, r.completions)) for r in of] for name, of in splits.items()}

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config, beside = self.config, 0
        if self.reference != "none":  # all its log-probs in float64, and one position per ranking in int64
            beside = 2 * sum(1 + len(ranking.completions) for ranking in self.train.rankings)
        demand = self.demand(model or sizes.sizes_of(config.model, config.lora), False)
        saved = sizes.checkpoint_bytes(config.checkpoint, self.num_steps, demand, beside)
        return {"checkpoints": saved, **self.metrics_bytes()}


def _work_of_rankings(rankings: Rankings, budget: int, number: int | None = None) -> Work:
    """So many of these rankings (None: all), each of their mean lengths."""
    completions = [completion for ranking in rankings.rankings for completion in ranking.completions]
    return Work(
        prompts=len(rankings.rankings) if number is None else number,
        group=len(completions) / len(rankings.rankings),
        prompt=fmean(len(ranking.prompt) for ranking in rankings.rankings),
        completion=fmean(map(len, completions)),
        budget=budget,
    )


def plan_rankings(resolved: Resolved, *, runs_here: bool = True) -> PreferencePlan:
    """Reads the model's config.json and tokenizer, and scans the data: `rlft.config.command.Command.make_plan`."""
    config: RmConfig | DpoConfig = resolved.config
    loss, loggers = resolved.parts
    used = rules.uses_of_preferences(config, loss)
    model_rules.check_machine(config.model, runs_here=runs_here)
    model_rules.check_optimizer(config.trainer.optimizer, config.model, runs_here=runs_here)
    model_config, base = sizes.read_base(config.model)
    limit = config.max_completion_tokens
    model_rules.check_row(config.prompts.max_tokens, limit, "max_completion_tokens", model_config)
    model_rules.check_targets(config.lora, config.model, model_config)
    roles.check_adapters(used, config.lora, config.model, base, model_config)
    tokenizer, ends = sizes.read_tokenizer(config, model_config)
    train, train_notes = _scanned(config, config.preferences, tokenizer, Split.train)
    held_out, held_out_notes = _scanned(config, config.preferences, tokenizer, Split.held_out)
    replay, replay_notes = None, list[str]()
    if isinstance(config, RmConfig) and config.replay.path is not None:
        with rules.replay_is_meant():
            replay, replay_notes = _scanned(config, rules.replayed(config), tokenizer, Split.train)
    plan = PreferencePlan(
        config=config,
        plain=resolved.plain,
        engine=None,
        train=train,
        held_out=held_out,
        loss=loss,
        reference=rules.reference_of(config, loss),
        replay=replay,
        loggers=loggers,
        ends=ends,
        fingerprints={
            "preferences_fingerprint": train.fingerprint,
            "held_out_preferences_fingerprint": held_out.fingerprint,
            **base,
            **roles.fingerprints_of(used),
            **({} if replay is None else {"replay_fingerprint": replay.fingerprint}),
        },
        notes=(
            *model_rules.notes_of_tiles(config.model, config.lora, model_config),
            *roles.notes_of_adapters(used, config.model, base),
            *train_notes,
            *held_out_notes,
            *ends.notes,
            *replay_notes,
        ),
    )
    size = config.rankings_per_step
    if isinstance(config, RmConfig) and replay is not None and plan.num_new == size:
        problem = f"gives the replay none of the {counted(size, 'ranking')} of an update"
        remedy = "raise it or rankings_per_step, or leave replay.path out"
        raise UserError("replay.fraction", problem, got=config.replay.fraction, remedy=remedy)
    rules.check_enough("rankings_per_step", size, plan.num_new, len(train.rankings), "ranking")
    return plan


def _scanned(
    config: RmConfig | DpoConfig, preferences: Mapping[str, Any], tokenizer: RunTokenizer, split: Split
) -> tuple[Rankings, list[str]]:
    """(the tokenised rankings of this `preferences` section, notes about what was left out). Raises UserError."""
    loaded = instantiate(preferences, "preferences").load(split)
    rankings = scan_rankings(loaded.rankings, tokenizer, config.prompts, config.max_completion_tokens, split)
    return rankings, [*([loaded.note] if loaded.note else ()), *rankings.notes]
