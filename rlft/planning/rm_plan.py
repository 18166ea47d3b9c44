"""The plan of `rlft rm`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlft.checks import rules
from rlft.checks.adapters import check_adapters
from rlft.checks.rm import check_config, replayed, uses_of
from rlft.config.schema import RmConfig
from rlft.generation.memory import ModelSizes
from rlft.keys.instantiate import instantiate
from rlft.model.adapter_folder import content_fingerprint
from rlft.model.backbone import fingerprint, load_tokenizer, read_config, resolve_device
from rlft.ops.preference import pairs_of_ranking
from rlft.planning.disk_space import checkpoint_bytes, metrics_bytes
from rlft.planning.memory_demand import sizes_of
from rlft.planning.memory_parts import Demand
from rlft.planning.run_plan import DataLengths, Plan
from rlft.planning.startup_table import Facts, TableRow
from rlft.prepare.examples import RankedTokens, Rankings, scan_rankings
from rlft.types import Split, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RmPlan(Plan):
    """The plan; `replay` holds rankings of earlier rounds, or None."""

    config: RmConfig
    train: Rankings
    held_out: Rankings
    replay: Rankings | None

    @property
    def num_new(self) -> int:
        """The number of this round's rankings in an update, at least one."""
        size = self.config.rankings_per_step
        return size if self.replay is None else max(1, size - round(size * self.config.replay.fraction))

    @property
    def num_steps(self) -> int:
        """The configured steps, or those that the epochs take."""
        each_epoch = max(1, len(self.train.rankings) // self.num_new)
        return self.config.steps or self.config.epochs * each_epoch

    def at(self, step: int) -> list[RankedTokens]:
        """The rankings of the update after `step` steps: this round's, then the replayed ones."""
        rankings = self.train.at(self.config.seed, step, self.num_new, "rankings")
        num_replayed = self.config.rankings_per_step - self.num_new
        if self.replay is None or not num_replayed:
            return rankings
        return [*rankings, *self.replay.at(self.config.seed, step, num_replayed, "replay")]

    def startup_rows(self, facts: Facts) -> list[TableRow]:
        run, rankings = self.config, self.train.rankings
        pairs = sum(len(pairs_of_ranking(r.scores)[0]) for r in rankings)
        replayed = "" if self.replay is None else f", {run.rankings_per_step - self.num_new} of them replayed"
        return [
            facts.model_row(run.model.path),
            ("trainable", f"{facts.trainable:,}", f"{run.lora.kind} rank {run.lora.rank} and a scalar head"),
            facts.forward_row(),
            facts.kernels_row(),
            ("rankings", f"{len(rankings):,}", f"{pairs:,} pairs; {len(self.held_out.rankings):,} rankings held out"),
            ("a step", f"{run.rankings_per_step}", f"rankings in one optimizer update{replayed}"),
            ("total", f"{self.num_steps} steps", f"{self.num_steps * self.num_new / len(rankings):.1f} epochs"),
        ]

    def demand(self, model: ModelSizes, recompute: bool) -> Demand:
        """The demand of an adapter and a scalar head, without LM head or sampling."""
        run = self.config
        group = max(len(ranking.scores) for ranking in self.train.rankings)
        return Demand(
            adapters=2,  # the policy's, which every run has, and the reward's
            trainable=model.lora + model.hidden,
            prompt_tokens=run.prompts.max_tokens,
            completion_tokens=run.max_completion_tokens,
            group=group,
            rows=run.rankings_per_step * group,
            update_rows=run.rankings_per_step * group,
            token_budget=run.token_budget,
            through_head=False,
            recompute=recompute,
            device=resolve_device(run.model.device).type,
        )

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        return {"base (frozen)": model.parameters, "reward (learns)": model.lora + model.hidden + 1}

    def lengths(self) -> list[DataLengths]:
        splits = (("rankings", self.train), ("held-out rankings", self.held_out))
        return [
            DataLengths(name, [len(r.prompt) + max(map(len, r.completions)) for r in split.rankings], split.note)
            for name, split in splits
        ]

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config = self.config
        trainable = self.demand(model or sizes_of(config.model, config.lora), False).trainable
        result = {"checkpoints": checkpoint_bytes(config.checkpoint, self.num_steps, trainable)}
        if not self.writes_metrics:
            return result
        return result | {"metrics": metrics_bytes(self.num_steps, config.eval.every)}


def make_plan(plain: Mapping[str, Any], *, runs_here: bool = True) -> RmPlan:
    """Checks the whole config, reads the model's config.json and tokenizer, and scans the data.

    Args:
        plain: the resolved config.
        runs_here: False if the run is only planned: what 4-bit weights need may be missing here.

    Raises:
        UserError: the config, the model or the data are wrong.
    """
    config, loggers = check_config(plain)
    rules.check_machine(config.model, runs_here=runs_here)
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limit = config.max_completion_tokens
    rules.check_row(config.prompts.max_tokens, limit, "max_completion_tokens", model_config)
    rules.check_targets(config.lora, config.model, model_config)
    check_adapters(uses_of(config), config.lora, config.model, base_fingerprint, model_config)
    tokenizer = load_tokenizer(config.model)
    notes: list[str | None] = []

    def scanned(preferences: Mapping[str, Any], split: Split) -> Rankings:
        loaded = instantiate(preferences, "preferences").scan(split)
        rankings = scan_rankings(loaded.rankings, tokenizer, config.prompts, limit, split)
        notes.extend([loaded.note, rankings.note])
        return rankings

    train, held_out = scanned(config.preferences, Split.train), scanned(config.preferences, Split.held_out)
    replay = None
    if config.replay.path is not None:
        try:
            replay = scanned(replayed(config), Split.train)
        except UserError as error:
            raise UserError("replay.path", error.problem, got=error.got, remedy=error.remedy) from None
    plan = RmPlan(
        config=config,
        plain=plain,
        engine=None,
        train=train,
        held_out=held_out,
        replay=replay,
        loggers=loggers,
        fingerprints={
            "preferences_fingerprint": train.fingerprint,
            "held_out_preferences_fingerprint": held_out.fingerprint,
            **({} if replay is None else {"replay_fingerprint": replay.fingerprint}),
            "base_fingerprint": base_fingerprint,
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in uses_of(config)},
        },
        notes=tuple(note for note in notes if note),
    )
    if replay is not None and plan.num_new == config.rankings_per_step:
        problem = f"gives the replay none of the {plan.num_new} rankings of an update"
        remedy = "raise it or rankings_per_step, or leave replay.path out"
        raise UserError("replay.fraction", problem, got=config.replay.fraction, remedy=remedy)
    rules.check_enough("rankings_per_step", config.rankings_per_step, plan.num_new, len(train.rankings), "rankings")
    return plan
