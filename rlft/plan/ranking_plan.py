"""What the plans of verbs that learn from preferences share: reading rankings, their order, and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlft.algorithm.ops.preference import pairs_of_ranking
from rlft.config.instantiate import instantiate
from rlft.config.schema import RankingRoot
from rlft.data.examples import Rankings, scan_rankings
from rlft.generation.memory import ModelSizes
from rlft.model.adapter_folder import content_fingerprint
from rlft.model.backbone import ends_of, fingerprint, load_tokenizer, read_config, resolve_device
from rlft.plan import rules
from rlft.plan.adapters import Use, check_adapters
from rlft.plan.disk_space import checkpoint_bytes, metrics_bytes
from rlft.plan.memory_demand import sizes_of
from rlft.plan.memory_parts import Demand
from rlft.plan.run_plan import DataLengths, Plan
from rlft.plan.startup_table import Facts, TableRow
from rlft.types import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.tokens.ends import TurnEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingPlan(Plan):
    """The plan of a run that learns from rankings; a subclass adds what learns and what else an update contains."""

    train: Rankings
    held_out: Rankings

    @property
    def num_new(self) -> int:
        """The number of training rankings in an update."""
        return self.config.rankings_per_step

    @property
    def num_steps(self) -> int:
        """The configured steps, or those that the epochs take."""
        each_epoch = max(1, len(self.train.rankings) // self.num_new)
        return self.config.steps or self.config.epochs * each_epoch

    @property
    def learner(self) -> str:
        """What learns, in words."""
        return f"{self.config.lora.kind} rank {self.config.lora.rank}"

    @property
    def note_of_update(self) -> str:
        """What the start-up table adds about the rankings of an update, beginning with a comma; empty by default."""
        return ""

    @property
    def saved_beside(self) -> int:
        """How many numbers of 4 bytes a checkpoint holds besides what learns."""
        return 0

    def own_rows(self) -> list[TableRow]:
        """Rows of the start-up table that only this verb has."""
        return []

    def startup_rows(self, facts: Facts) -> list[TableRow]:
        run, rankings = self.config, self.train.rankings
        pairs = sum(len(pairs_of_ranking(r.scores)[0]) for r in rankings)
        return [
            facts.model_row(run.model.path),
            ("trainable", f"{facts.trainable:,}", self.learner),
            *facts.adapter_rows(),
            facts.forward_row(),
            facts.kernels_row(),
            *self.own_rows(),
            ("rankings", f"{len(rankings):,}", f"{pairs:,} pairs; {len(self.held_out.rankings):,} rankings held out"),
            *self.end_rows(),
            ("a step", f"{run.rankings_per_step}", f"rankings in one optimizer update{self.note_of_update}"),
            ("total", f"{self.num_steps} steps", f"{self.num_steps * self.num_new / len(rankings):.1f} epochs"),
        ]

    def demand_of(
        self, model: ModelSizes, recompute: bool, *, adapters: int, trainable: int, through_head: bool
    ) -> Demand:
        """The demand of an update on the longest rankings; nothing is sampled. Arguments as in Demand."""
        run = self.config
        group = max(len(ranking.scores) for ranking in self.train.rankings)
        return Demand(
            adapters=adapters,
            trainable=trainable,
            prompt_tokens=run.prompts.max_tokens,
            completion_tokens=run.max_completion_tokens,
            group=group,
            rows=run.rankings_per_step * group,
            update_rows=run.rankings_per_step * group,
            token_budget=run.token_budget,
            through_head=through_head,
            recompute=recompute,
            device=resolve_device(run.model.device).type,
        )

    def lengths(self) -> list[DataLengths]:
        splits = (("rankings", self.train), ("held-out rankings", self.held_out))
        return [
            DataLengths(name, [len(r.prompt) + max(map(len, r.completions)) for r in split.rankings], split.note)
            for name, split in splits
        ]

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config = self.config
        demand = self.demand(model or sizes_of(config.model, config.lora), False)
        assert demand is not None, "every plan of rankings has one"
        saved = checkpoint_bytes(config.checkpoint, self.num_steps, demand.trainable, self.saved_beside)
        if not self.writes_metrics:
            return {"checkpoints": saved}
        return {"checkpoints": saved, "metrics": metrics_bytes(self.num_steps, config.eval.every)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a config that learns from rankings names, read and checked without loading a weight.

    Attributes:
        tokenizer: the base's tokenizer.
        ends: what ends a turn.
        train: the training rankings.
        held_out: the held-out rankings.
        fingerprints: the fingerprints of preferences, base and adapters, as in Plan.
        notes: what the person watching should know.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: TurnEnds
    train: Rankings
    held_out: Rankings
    fingerprints: Mapping[str, str]
    notes: tuple[str, ...]


def read_inputs(config: RankingRoot, used: Sequence[Use], *, runs_here: bool) -> Inputs:
    """Checks the model's config and the adapters in use, and scans the preferences.

    Raises:
        UserError: the model, an adapter or the data are wrong.
    """
    rules.check_machine(config.model, runs_here=runs_here)
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limit = config.max_completion_tokens
    rules.check_row(config.prompts.max_tokens, limit, "max_completion_tokens", model_config)
    rules.check_targets(config.lora, config.model, model_config)
    check_adapters(used, config.lora, config.model, base_fingerprint, model_config)
    tokenizer = load_tokenizer(config.model)
    ends = ends_of(config.model, config.prompts.style, tokenizer)
    train, train_notes = scanned(config, config.preferences, tokenizer, Split.train)
    held_out, held_out_notes = scanned(config, config.preferences, tokenizer, Split.held_out)
    return Inputs(
        tokenizer=tokenizer,
        ends=ends,
        train=train,
        held_out=held_out,
        fingerprints={
            "preferences_fingerprint": train.fingerprint,
            "held_out_preferences_fingerprint": held_out.fingerprint,
            "base_fingerprint": base_fingerprint,
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used},
        },
        notes=(*train_notes, *held_out_notes, *ends.notes),
    )


def scanned(
    config: RankingRoot, preferences: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, split: Split
) -> tuple[Rankings, list[str]]:
    """(the tokenised rankings of this `preferences` section, notes about what was left out). Raises UserError."""
    loaded = instantiate(preferences, "preferences").scan(split)
    rankings = scan_rankings(loaded.rankings, tokenizer, config.prompts, config.max_completion_tokens, split)
    return rankings, [note for note in (loaded.note, rankings.note) if note]
