"""The loss of an algorithm as formulas: the lines of its family's docstring that apply with its keys.

The docstring of a family's module has definitions, indented by four spaces, among them the loss `L`:

    L = agg(S)
      + kl_coef * agg(KL)            if kl_coef > 0 and kl_in=loss
    S = -r * A                       if surrogate=importance
    S = -A * lp                      if surrogate=policy_gradient
    A: what a symbol means, where it is not one of SYMBOLS

The right-hand side is Python code of keys, symbols and other definitions. A line that begins with + or - continues the
definition above. A condition joins `key=value`, `key=value|value`, `key!=value` and `key > number` with `and`.
Definitions that L does not use, directly or indirectly, are left out, so that they need no condition.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

SYMBOLS = {
    "lp": "log-prob of a completion's token by the policy that is trained",
    "lp_old": "the same by the policy that the batch was sampled with, without gradient",
    "lp_ref": "the same by the reference (snapshot.reference), without gradient",
    "lp_smp": "the same by the engine when it sampled the token",
    "H": "entropy of the policy's distribution at a token, in nats",
    "A": "advantage of a token: what `credit` gives, without gradient",
    "r": "ratio of the policy's probability to the old policy's",
    "reward": "sum of the rewards of a completion, each times its weight",
    "reward_k": "one of the rewards of a completion by itself, without its weight; of steps or turns their sum",
    "weight_k": "its weight",
    "step": "score of a reasoning step or of a turn, on the token that ends it; 0 elsewhere, and without such scores",
    "N": "number of completion tokens in the update",
    "B": "number of completions in the update",
    "T_max": "longest completion that is allowed, in tokens",
    "sum_t": "sum over a completion's tokens",
    "mean_t": "mean over a completion's tokens",
    "sum_i": "sum over the completions of the update",
    "mean_group": "mean over the completions of one prompt, or over all their reasoning steps",
    "std_group": "std_group(x, c): standard deviation over the same (divided by n - c)",
    "mean_siblings": "mean over the other completions of the prompt; x itself where there is none",
    "mean_all": "mean over all completions that a step of the run samples",
    "std_all": "standard deviation over the same, or over all their reasoning steps (divided by n - 1)",
    "mean_tokens": "mean over the tokens of all completions that a step of the run samples",
    "std_tokens": "standard deviation over the same (divided by n - 1)",
    "at_last_token": "x on the completion's last token, 0 on the others",
    "first_token": "x of the completion's first token; of an empty completion its reward",
    "to_go": "to_go(x, c): sum of c ** k * x over the completion's tokens k = 0, 1, .. from this one on; "
    "to_go(x, c, n): over n of them at most",
    "to_go_in_turn": "to_go over the turn's tokens alone",
    "clip": "clip(x, low, high): x kept between low and high",
    "within": "within(x, low, high): 1 where low <= x <= high, else 0",
    "sigmoid": "1 / (1 + e to the power of -x)",
    "sum_k": "sum over the rewards",
    "stop": "the same value, without gradient",
    "exp": "e to the power of x; a difference of log-probs is first kept within -20 .. 20 (d and d_old: above -20)",
}
"""{symbol: its meaning} of the tensors and functions that all families use."""

LOSS = "L"
_DEFINITION = re.compile(r" {4}(?P<head>(?P<name>\w+)(?:\(\w+\))?) = (?P<value>.+?)(?: +if (?P<condition>.+))?")
_TERM = re.compile(r" {6}(?P<value>[+-] .+?)(?: +if (?P<condition>.+))?")
_SYMBOL = re.compile(r" {4}(?P<name>\w+)(?:\(.*?\))?: (?P<meaning>.+)")
_CONDITION = re.compile(r"(?P<key>\w+) ?(?P<relation>!=|=|>) ?(?P<value>\S+)")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The part of a docstring that applies to an algorithm.

    Attributes:
        lines: definitions `name = ...`, each on one line, in the order of the docstring.
        symbols: `{name: its meaning}` of the symbols in the lines.
    """

    lines: tuple[str, ...]
    symbols: Mapping[str, str]


def formula_of(algorithm: Any, keys: Mapping[str, Any]) -> Formula | None:
    """The loss of an algorithm as formulas; None where its module states none.

    Args:
        algorithm: class of the algorithm.
        keys: {key: value} of the algorithm.

    Raises:
        ValueError: the docstring of the module breaks the rules above.
    """
    return formula(sys.modules[algorithm.__module__].__doc__ or "", keys)


def formula(docstring: str, keys: Mapping[str, Any]) -> Formula | None:
    """Like `formula_of`, from the docstring of the module."""
    lines: dict[str, str] = {}
    for name, line in _applying_definitions(docstring.splitlines(), keys):
        if name in lines:
            raise ValueError(f"{name} has two definitions with these keys: {lines[name]!r} and {line!r}")
        lines[name] = line
    if LOSS not in lines:
        return None
    used = _names_used(lines)
    own_symbols = {match["name"]: match["meaning"] for match in map(_SYMBOL.fullmatch, docstring.splitlines()) if match}
    symbols = {name: meaning for name, meaning in {**SYMBOLS, **own_symbols}.items() if name in used}
    return Formula(lines=tuple(line for name, line in lines.items() if name in used), symbols=symbols)


def _applying_definitions(docstring: list[str], keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, whole definition) of those whose condition holds, each with the further terms whose condition holds."""
    name = line = ""
    for docstring_line in docstring:
        definition, term = _DEFINITION.fullmatch(docstring_line), _TERM.fullmatch(docstring_line)
        if term is not None:
            line += f" {term['value']}" if name and _holds(term["condition"], keys) else ""
            continue
        if name:
            yield name, line
        name = line = ""
        if definition is not None and _holds(definition["condition"], keys):
            name, line = definition["name"], f"{definition['head']} = {definition['value']}"
    if name:
        yield name, line


def _holds(condition: str | None, keys: Mapping[str, Any]) -> bool:
    return all(_part_holds(part, keys) for part in (condition or "").split(" and ") if part)


def _part_holds(part: str, keys: Mapping[str, Any]) -> bool:
    match = _CONDITION.fullmatch(part)
    if match is None or match["key"] not in keys:
        raise ValueError(f"{part!r} is no condition on one of the keys {', '.join(keys)}")
    value = keys[match["key"]]
    if match["relation"] == ">":
        return float(value) > float(match["value"])
    return (_word(value) in match["value"].split("|")) == (match["relation"] == "=")


def _word(value: Any) -> str:
    """A key's value as it is written in YAML."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return str(value.value if isinstance(value, Enum) else value)


def _names_used(lines: Mapping[str, str]) -> set[str]:
    """Every name that the loss uses, directly or through other definitions."""
    names: set[str] = set()
    waiting = [LOSS]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += _NAME.findall(lines.get(name, ""))
    return names
