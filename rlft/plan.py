"""Everything that is known of a run before a weight is loaded; whatever a user can mend is refused here.

In the order in which mistakes are cheapest to find: config, rules between its parts, model config and tokenizer, data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlft import check
from rlft.algorithm.protocol import Algorithm
from rlft.check_adapters import check_adapters, check_classifiers, uses
from rlft.checks.servers import check_servers
from rlft.checks.train import check_config
from rlft.data.text import load_texts
from rlft.generation.stops import check_stops
from rlft.model.adapter_folder import content_fingerprint
from rlft.model.backbone import fingerprint, load_tokenizer, read_config
from rlft.model.config import Old
from rlft.pretrain import PretrainText, scan_texts
from rlft.prompts import PromptSet, scan
from rlft.reward.spec import examined, notes, specs
from rlft.roots import RunConfig
from rlft.targets import instantiate
from rlft.types import Logger, Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything known before a weight is loaded. `plain` is the resolved config as dicts and lists."""

    config: RunConfig
    plain: Mapping[str, Any]
    algorithm: Algorithm
    engine: str
    engine_reason: str
    train_prompts: PromptSet
    held_out: PromptSet | None
    loggers: tuple[Logger, ...]
    fingerprints: Mapping[str, str]
    pretrain_text: PretrainText | None
    warnings: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        return self.config.steps

    @property
    def needs_old(self) -> bool:
        """`snapshot.old: auto` recomputes only where old is not simply the current policy of the one update."""
        several = self.config.updates_per_step > 1
        return self.config.snapshot.old is Old.auto and (several or self.algorithm.needs_old_in_credit)


def make_plan(plain: Mapping[str, Any], *, runs_here: bool = True, trains: bool = True) -> Plan:
    """Checks the whole config, reads the model's config.json and tokenizer, and scans the data.

    runs_here: False if the run is only planned: its engine, and what 4-bit weights need, may be missing.
    trains: as for `check.check`.

    Raises:
        UserError: for whatever a user can mend.
    """
    config, algorithm, loggers = check_config(plain, trains=trains)
    check.check_machine(config.model, runs_here=runs_here)
    rewards = specs(config.reward)
    used = uses(config, rewards)
    engine, reason = check.choose_engine(config.generation.engine, config.lora, runs_here=runs_here)
    model_config = read_config(config.model)
    base_fingerprint = fingerprint(config.model)
    check.check_context(config, model_config)
    check.check_targets(config.lora, config.model, model_config)
    check_adapters(used, config.lora, config.model, base_fingerprint, model_config)
    check_classifiers(rewards)
    tokenizer = load_tokenizer(config.model)
    check_stops(config.generation, tokenizer, model_config.get_text_config().vocab_size)
    data = instantiate(config.data, "data")
    limit, over_limit = config.prompts.max_tokens, config.prompts.over_limit
    train_prompts = scan(data.load(Split.train), tokenizer, limit, over_limit, Split.train, config.prompts.style)
    held_out = None
    if config.eval.every:
        held_out = scan(data.load(Split.held_out), tokenizer, limit, over_limit, Split.held_out, config.prompts.style)
    check.check_metadata(rewards, train_prompts.prompts[0])
    said_of_data = examined(rewards, [*train_prompts.prompts, *(held_out.prompts if held_out else ())])
    check_servers(rewards, train_prompts.prompts[0])
    check.check_fresh_prompts(config, len(train_prompts.prompts))
    pretrain_text = scan_pretrain_text(config, tokenizer)
    return Plan(
        config=config,
        plain=plain,
        algorithm=algorithm,
        engine=engine,
        engine_reason=reason,
        train_prompts=train_prompts,
        held_out=held_out,
        loggers=loggers,
        fingerprints={
            "data_fingerprint": train_prompts.fingerprint,
            **({} if held_out is None else {"held_out_fingerprint": held_out.fingerprint}),
            **({} if pretrain_text is None else {"pretrain_fingerprint": pretrain_text.fingerprint}),
            "base_fingerprint": base_fingerprint,
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used},
        },
        pretrain_text=pretrain_text,
        warnings=(
            *(check.warnings(config, algorithm) if trains else ()),
            *check.warnings_of_sizes(
                config,
                len(train_prompts.prompts) if trains else None,
                None if held_out is None else len(held_out.prompts),
            ),
            *notes(rewards),
            *said_of_data,
        ),
    )


def scan_pretrain_text(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainText | None:
    """The pretraining text, tokenised; None where the config names none."""
    settings = config.pretrain
    if settings.path is None:
        return None
    return scan_texts(
        load_texts(settings.path, settings.field, settings.given_field),
        tokenizer,
        max_tokens=settings.max_tokens,
        sequences_per_update=settings.sequences_per_update,
        held_out=settings.held_out,
        updates_per_step=config.updates_per_step,
    )
