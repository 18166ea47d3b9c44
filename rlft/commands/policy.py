"""The run or model that a command names, and the policy in it that `rlft eval`, `chat` and `serve` sample from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from rlft.config import command as commands
from rlft.config.compose import USUAL, changed, compose
from rlft.config.overrides import Arguments, key_of, only_overrides, with_recipe
from rlft.config.resolved import Resolved, with_budget_of_device
from rlft.config.schema import RunConfig
from rlft.config.suggest import OWN_KEYS
from rlft.plan.identity import fingerprints
from rlft.runs.checkpoint import STATE
from rlft.runs.find import (
    LATEST,
    RUNS,
    CheckpointKind,
    NamedRun,
    find,
    find_checkpoint,
    kind_of_checkpoint,
    one_run,
    run_folders,
)
from rlft.runs.fingerprints import differing, recorded
from rlft.system.terminal import Say, say
from rlft.types import Mistakes, UserError, require

if TYPE_CHECKING:
    from rlft.config.model import LoraSettings, ModelConfig
    from rlft.config.schema import SamplingRoot
    from rlft.model.roles import Roles
    from rlft.runs.checkpoint import Checkpoint


def of_a_run(
    arguments: list[str], words: Sequence[str], mistakes: Mistakes, *, else_latest: bool = False
) -> tuple[Arguments, NamedRun | None]:
    """The parsed words of a command that uses a run, and that run; None if they name none.

    `words` are keys of the command itself, run and checkpoint among them, which do not change the config. `mistakes`
    are as in `only_overrides`. `else_latest`: where they name no model either, the run is the latest one, which is
    printed.
    """
    arguments = with_recipe(arguments)
    if arguments and not arguments[0].startswith(("-", "+")) and "=" not in arguments[0]:
        arguments = [f"run={arguments[0]}", *arguments[1:]]
    parsed = only_overrides(arguments, own=words, mistakes=mistakes)
    with mistakes.joined():
        run_name = parsed.value("run") or parsed.value("checkpoint")
        is_empty = not run_name and any(key_of(o) in ("run", "checkpoint") for o in parsed.own)
        require(not is_empty, "run", "is empty", remedy="write run=runs/<name>/<time>")
        if else_latest and run_name is None and not names_a_model(parsed) and not mistakes:
            run_name, model = LATEST, "model.path=<model>"
            remedy = f"train one first (rlft train +recipe=grpo_arithmetic), or give run=<folder> or {model}"
            require(any(run_folders(RUNS)), "run", f"there is no run below {RUNS.resolve()} yet", remedy=remedy)
        return parsed, find(one_run(run_name, "run", say)) if run_name else None


def names_a_model(parsed: Arguments) -> bool:
    """Whether words name a model, or a recipe that does: the defaults alone are hardly ever intended."""
    return any(parsed.value(key) for key in ("model.path", "recipe"))


def sampled_by(
    arguments: list[str],
    words: Sequence[str] = OWN_KEYS["eval"],
    *,
    else_latest: bool = True,
    trained: bool = False,
) -> tuple[Arguments, NamedRun | None, dict[str, Any]]:
    """The parsed words of a command that samples from a run or a model, that run if it is one, and the config.

    It is one of `rlft train` if the run's command does not sample, or if `trained`. `words` and `else_latest` are as in
    `of_a_run`.
    """
    mistakes = Mistakes()
    parsed, source = of_a_run(arguments, words, mistakes, else_latest=else_latest)
    with mistakes.joined():
        if source is None:
            plain = compose(parsed.overrides, parsed.config_dir, requires=False)
        elif "generation" in source.config and not trained:
            plain = changed(source.config, parsed.overrides, parsed.config_dir, source.config["command"])
        else:
            plain = changed(as_training(source), parsed.overrides, parsed.config_dir)
    mistakes.refuse()
    return parsed, source, plain


def as_training(source: NamedRun) -> dict[str, Any]:
    """The run's config, which may be modified, as one of `rlft train`. Raises UserError: the run has no policy."""
    config = source.config
    command = commands.named(config["command"])
    weights: dict[str, Any] = {}
    if config.get("lora", {}) is None:  # the trained model is named by its run, as an adapter could be
        path = str(source.checkpoint or source.run)
        weights = {"lora": compose([])["lora"], "model": {**config["model"], "path": path}}
    if command.name == USUAL:
        return {**config, **weights}
    if not command.has_policy:
        others = " or ".join(f"rlft {other.name}" for other in commands.working() if other.has_policy)
        problem = f"is a run of rlft {command.name}, which has no policy"
        raise UserError("run", problem, got=source.run, remedy=f"name one of {others}")
    common = compose([])
    shared = {key: config[key] for key in shared_keys(command.root) if key in config}
    return {**common, "data": {}, **shared, **weights}


def shared_keys(root: type) -> list[str]:
    """The keys of a command's config that `rlft train` has with the same type, so that an evaluation can read them."""
    types, train_types = get_type_hints(root), get_type_hints(RunConfig)
    common = (key for key in types if key in train_types and _reads(train_types[key], types[key]))
    return [key for key in common if key not in ("command", "epochs", "steps")]


def _reads(first: Any, second: Any) -> bool:
    """Whether one of two types is the other one, or has it as a choice."""
    return first in (second, *get_args(second)) or second in get_args(first)


def base_of(plain: Mapping[str, Any], source: NamedRun | None) -> list[tuple[str, str]]:
    """(key, path) of the base in this config; none where the run trained all weights, so that it is not loaded."""
    is_loaded = source is None or source.config.get("lora", {}) is not None
    return [("model.path", str(plain["model"]["path"]))] * is_loaded


# -- the policy that answers -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What answers, before it is loaded."""

    config: Any  # of a run of any command that samples; its model is the checkpoint if that holds a whole one
    lora: LoraSettings | None  # the adapter's settings; None if all weights were trained
    saved: Checkpoint | None  # the adapter's checkpoint; None for whole models and without a run
    title: str
    base: str

    @property
    def step(self) -> int:
        """The number of steps after which it was saved; 0 for whole models and without a run."""
        return 0 if self.saved is None else self.saved.step


def policy_of(resolved: Resolved, source: NamedRun | None, say: Say) -> Policy:
    """The policy of the run, from an adapter on the run's base or a whole model; the config's model without a run."""
    from rlft.runs import checkpoint

    config = with_budget_of_device(resolved.config, resolved.plain)
    lora = getattr(config, "lora", None)  # a run of `rlft sample` trains none
    made = Policy(config=config, lora=lora, saved=None, title=config.model.path, base=config.model.path)
    if source is None:
        return made
    folder = find_checkpoint(source, say)
    made, kind = replace(made, title=f"{source.run}, {folder.name}"), kind_of_checkpoint(folder)
    problem = "holds a reward model, which writes no text"
    remedy = "chat with a run of rlft train, and give it this one as reward.learned.path"
    require(kind is not CheckpointKind.reward, "run", problem, got=folder, remedy=remedy)
    if kind is CheckpointKind.weights:
        model = replace(config.model, path=str(folder / kind), revision=None)
        return replace(made, config=replace(config, model=model), lora=None)
    check_base(folder, config.model)
    assert lora is not None, "a checkpoint with an adapter is of a run that trains one"
    # The adapter from which the run started is no longer needed.
    return replace(made, lora=replace(lora, path=None), saved=checkpoint.load(folder))


def check_base(folder: Path, model: ModelConfig) -> None:
    """Refuses a base other than the one that this checkpoint was trained on, and names what differs."""
    trained_on, now = json.loads((folder / STATE).read_text()), fingerprints(model)
    changed = differing(trained_on, now)
    if changed or not recorded(trained_on):
        problem = f"is not the base this run was trained on: it has other {changed.both or 'files'}"
        remedy = "leave it as it was, or, if the base has moved, write model.path=<its new folder>"
        raise UserError("model.path", problem, got=model.path, remedy=remedy)


def check_ends(config: SamplingRoot, say: Say) -> int:
    """Prints the notes about what ends a turn, and refuses wrong stops; returns the size of the vocabulary."""
    from rlft.generation.stops import check_stops
    from rlft.model.backbone import ends_of, load_tokenizer, read_config

    vocabulary = read_config(config.model).get_text_config().vocab_size
    tokenizer = load_tokenizer(config.model, config.prompts.template_variables)
    ends = ends_of(config.model, config.prompts.style, tokenizer)
    check_stops(config.generation, tokenizer, vocabulary, ends.ids)
    for note in ends.notes:
        say(f"note: {note}")
    return vocabulary


def open_roles(policy: Policy) -> Roles:
    """Loads the base with the policy as its only role: the saved adapter, or a new one, which has no effect."""
    from rlft.config.model import LoraSettings
    from rlft.model.backbone import load_backbone
    from rlft.model.roles import policy_alone

    smallest = LoraSettings(rank=1, alpha=1.0, dropout=0.0, target_modules="all-linear", path=None)
    config, backbone = policy.config, load_backbone(policy.config.model)
    roles = policy_alone(backbone, policy.lora or smallest, token_budget=config.token_budget, seed=config.seed)
    if policy.saved is not None:
        roles.restore(policy.saved.adapters)
    return roles
