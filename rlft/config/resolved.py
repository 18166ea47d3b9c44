"""A config is read here, once: typed, and checked by itself within a second, without torch.

`build` turns a composed config into its command's root (schema.py): every key exists, has its type and is within its
bounds; plan/rules.py has the rules between parts. `token_budget: auto` becomes the number of tokens in one
forward-backward on this machine. It changes memory and time, never a gradient, so a run may be resumed on a machine
where it differs.
"""

from __future__ import annotations

import difflib
import gc
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar, overload

from rlft.config import catalog, command as commands
from rlft.config.command import Command
from rlft.config.instantiate import from_mapping
from rlft.config.schema import AUTO, Root, RunConfig
from rlft.types import UserError, lone_surrogate

logger = logging.getLogger(__name__)

LATEX = ("nabla", "ne", "neq", "neg", "ni", "nu", "not", "notin", "newline", "nmid", "nexists", "nleq", "ngeq",
         "text", "textbf", "textit", "textrm", "theta", "times", "to", "tan", "tanh", "tau", "top", "tfrac",
         "therefore", "triangle", "tilde")  # fmt: skip
"""Commands that begin as the escapes of a line break and a tab do."""
_ESCAPE = re.compile(rf"\\[nt](?!(?:{'|'.join(name[1:] for name in LATEX)})\b)")
_NO_TEXT = ("pattern", "path", "_target_")  # ends of the keys whose values have escapes of their own

GPU_TOKENS = 32768
"""A GPU needs large matrix products: of a 0.5B model an H100 computes 20,000 tokens while a host starts the kernels.
Memory limits them, not caches: plan/fit.py lowers the number."""

CPU_TOKENS, MOST_CPU_TOKENS = 1536, 4096
"""On a CPU small micro-batches stay in its caches. A group of up to MOST_CPU_TOKENS stays together, so that its prompt
is computed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A config that has been read."""

    command: Command
    plain: Mapping[str, Any]
    config: Any  # the command's typed root; `token_budget: auto` is the number of a CPU, which no GPU's is below
    parts: Any  # what the command's check has made of the config, such as its algorithm; None without a check

    def plan(self, **how: Any) -> Any:
        """The plan of this config's run (a `rlft.plan.run_plan.Plan`); plans are made nowhere else.

        `how` are keywords of `make_plan`. Raises UserError: the data, the tokenizer or the model are wrong.
        """
        config = with_budget_of_device(self.config, self.plain)
        thresholds = gc.get_threshold()
        gc.set_threshold(100_000)  # else a sixth of the time of reading 100,000 rows is spent on garbage, and rows stay
        try:
            return self.command.make_plan(replace(self, config=config), **how)
        finally:
            gc.set_threshold(*thresholds)


def resolve(plain: Mapping[str, Any], name: str | None = None, check: Callable[[Any], Any] | None = None) -> Resolved:
    """Types a composed config, and refuses one that is wrong by itself or names local files that do not exist.

    `name` is the command's, None for the one that the config names; `check` replaces the command's own.
    """
    command = commands.named(plain["command"] if name is None else name)
    config = build(plain, command.root, command.name)
    for key, text in _texts(plain, names=False):
        if not key.endswith(_NO_TEXT) and _ESCAPE.search(text):
            _warn_of_escape(key)
    check = check or command.check
    return Resolved(command=command, plain=plain, config=config, parts=None if check is None else check(config))


AnyRoot = TypeVar("AnyRoot", bound=Root)


@overload
def build(config: Mapping[str, Any]) -> RunConfig: ...
@overload
def build(config: Mapping[str, Any], root: type[AnyRoot], command: str) -> AnyRoot: ...
def build(config: Mapping[str, Any], root: type[Any] = RunConfig, command: str = "train") -> Any:
    """The typed root of a command from a plain config; refuses unknown keys, wrong types and values out of bounds."""
    names = [field.name for field in fields(root)]
    # `+recpie=x` is a new key to Hydra; `recipe` itself is a group, not a key.
    for key in config:
        if isinstance(config[key], Mapping) and key == "recipe":
            problem = "its keys stay below `recipe` and would set nothing"
            raise UserError("+recipe", problem, remedy="make `# @package _global_` the first line of the recipe's file")
        if key not in names and difflib.get_close_matches(key, [*names, "recipe"], 1) == ["recipe"]:
            raise UserError(key, "there is no such key", got=config[key], remedy=f"did you mean +recipe={config[key]}?")
    if config.get("command", command) != command:
        raise UserError("command", f"this is rlft {command}", got=config["command"], remedy="leave it as it is")
    for group in ("algorithm", "data", "demonstrations", "preferences", "loss"):
        if group in names and group not in config and not catalog.may_be_absent(group, command):
            raise UserError(group, "is missing", remedy=f"choose {group}={' or '.join(catalog.choices(group))}")
    for key, text in _texts(config):
        if surrogate := lone_surrogate(text):  # which YAML may hold as "\ud800"
            problem = f"holds the lone surrogate {surrogate}, which is not text"
            raise UserError(key or "config", problem, remedy="remove it, or write the whole character")
    # An empty list of rewards composes to no section at all, and so does a group without a choice.
    empty = {name: {} for name in ("reward", "data") if name in names}
    return from_mapping(root, {**empty, **_with_trainable_dtype(with_token_budget(config))}, "", command)


def _texts(value: Any, key: str = "", *, names: bool = True) -> Iterator[tuple[str, str]]:
    """(key, text) of all texts in a config; with `names` also of the names of keys, with the key of their section."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from [(key, str(name))] if names else []
            yield from _texts(inner, f"{key}.{name}".lstrip("."), names=names)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key, names=names)
    elif isinstance(value, str):
        yield key, value


@cache
def _warn_of_escape(key: str) -> None:
    """Says once that a backslash and an n or t stand where a line break or a tab was probably meant."""
    logger.warning(
        "%s: holds a backslash and a letter, not a line break or tab; write $'%s=\"..\\n..\"' in bash, with the $ and "
        "both kinds of quotes, and double quotes in YAML",
        *(key, key),
    )


def _with_trainable_dtype(config: dict[str, Any]) -> dict[str, Any]:
    """The plain config with float32 in place of `model.dtype: auto` where all weights are trained."""
    model = config.get("model")
    if config.get("lora", {}) is not None or not isinstance(model, Mapping) or model.get("dtype") != AUTO:
        return config
    return {**config, "model": {**model, "dtype": "float32"}}


def with_token_budget(config: Mapping[str, Any], *, gpu: bool = False) -> dict[str, Any]:
    """The plain config with a number instead of `auto`, also in the rewards' own; `gpu`: the base will be on one."""
    result = dict(config)
    if result.get("token_budget") == AUTO:
        budget = result["token_budget"] = token_budget(config, gpu=gpu)
        if isinstance(rewards := config.get("reward"), Mapping):
            result["reward"] = with_budget(rewards, rewards, budget)
    return result


def with_budget_of_device(config: Any, plain: Mapping[str, Any]) -> Any:
    """The typed config of this plain one, with a GPU's budget for `auto` if the base will be on a GPU."""
    if plain.get("token_budget") != AUTO or not on_gpu(plain["model"]):
        return config
    return with_number(config, plain, token_budget(plain, gpu=True))


def with_number(config: Any, plain: Mapping[str, Any], budget: int) -> Any:
    """The typed config with this token budget, also in the rewards whose section says `auto` in the plain one."""
    rewards = {"reward": with_budget(config.reward, plain["reward"], budget)} if plain.get("reward") else {}
    return replace(config, token_budget=budget, **rewards)


def with_budget(rewards: Mapping[str, Any], written: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """The rewards, with this token budget in each whose section says `token_budget: auto`."""
    automatic = {n for n, keys in written.items() if isinstance(keys, Mapping) and keys.get("token_budget") == AUTO}
    return {n: {**keys, "token_budget": budget} if n in automatic else keys for n, keys in rewards.items()}


def token_budget(config: Mapping[str, Any], *, gpu: bool) -> int:
    """The number of tokens in one forward-backward, on a GPU or for the longest group of this config on a CPU."""
    prompt, sampled = _number(config, "prompts", "max_tokens"), _number(config, "generation", "max_tokens")
    learned = _positive_int(config.get("max_completion_tokens"))
    completion = sampled or learned
    ending = config.get("command") == "rm"  # the token of which a reward model gives the score
    minimum = max(prompt + max(sampled, learned, 1) + ending, _number(config, "pretrain", "max_tokens"))
    if gpu:
        return max(GPU_TOKENS, minimum)
    group = prompt + completion * max(1, _positive_int(config.get("group_size")))
    return max(min(max(CPU_TOKENS, group), MOST_CPU_TOKENS), minimum)


def on_gpu(model: Mapping[str, Any]) -> bool:
    """Whether the base will be on a GPU; imports torch if the config leaves it to this machine."""
    if model["device"] != AUTO:
        return model["device"].startswith(("cuda", "xpu"))
    import torch

    return torch.cuda.is_available()


def _number(config: Mapping[str, Any], section: str, key: str) -> int:
    keys = config.get(section)
    return _positive_int(keys.get(key)) if isinstance(keys, Mapping) else 0


def _positive_int(value: Any) -> int:
    """The value if it is a positive integer, else 0: a wrong value is refused later, when the config is typed."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
