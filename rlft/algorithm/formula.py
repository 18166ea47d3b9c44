"""The loss of an algorithm as formulas: the lines of docstrings that apply with its keys.

The docstring of a family's module has definitions, indented by four spaces, among them the loss `L`:

    L = agg(S)
      + kl_coef * agg(KL)            if kl_coef > 0 and kl_in=loss
    S = -r * A                       if surrogate=importance
    S = -A * lp                      if surrogate=policy_gradient
    A: what a symbol means, where it is not one of SYMBOLS

The right-hand side is Python code of keys, symbols and other definitions. A line that begins with + or - continues the
definition above. A condition joins `key=value`, `key=value|value`, `key!=value`, `key > number` and `key < number` with
`and`, and such conditions with `or`.
What L uses, directly or indirectly, and the module does not define, is defined by the modules of the classes that its
class builds on (objective.py has what all families share). What L does not use is left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SYMBOLS = {
    "lp": "log-prob of a completion's token by the policy that is trained",
    "lp_old": "the same by the policy that the batch was sampled with, without gradient",
    "lp_ref": "the same by the reference (snapshot.reference), without gradient",
    "lp_smp": "the same by the engine when it sampled the token",
    "pi": "probabilities of all tokens of the vocabulary in this place by the policy that is trained",
    "pi_old": "the same by the policy that the batch was sampled with, without gradient",
    "pi_ref": "the same by the reference, without gradient",
    "sum_v": "sum over the tokens of the vocabulary",
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
    "to_go(x, c, n): over n of them at most (null: no limit)",
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
_CONDITION = re.compile(r"(?P<key>\w+) ?(?P<relation>!=|=|>|<) ?(?P<value>\S+)")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The definitions `name = ...` that apply to an algorithm, each on one line, in the order of the docstrings.

    `symbols` are `{name: its meaning}` of the symbols in the lines.
    """

    lines: tuple[str, ...]
    symbols: Mapping[str, str]


def formula_of(algorithm: type, keys: Mapping[str, Any]) -> Formula | None:
    """The loss of an algorithm with these keys, from the docstrings of its class's module and of those it builds on.

    None where its module states none. ValueError: a docstring breaks the rules above.
    """
    modules = dict.fromkeys(base.__module__ for base in algorithm.__mro__)  # nearest first
    return formula([sys.modules[module].__doc__ or "" for module in modules], keys)


def formula(docstrings: Sequence[str], keys: Mapping[str, Any]) -> Formula | None:
    """Like `formula_of`, from docstrings; the first states L, and a name means what the first that defines it says."""
    definitions: dict[str, list[_Definition]] = {}
    symbols = dict(SYMBOLS)
    for docstring in docstrings:
        of_docstring, own_symbols = _read(docstring)
        definitions = definitions | {name: of_docstring[name] for name in of_docstring if name not in definitions}
        symbols = own_symbols | symbols
        if LOSS not in definitions:
            return None
    lines: dict[str, str] = {}
    used: set[str] = set()
    waiting = [LOSS]
    while waiting:
        name = waiting.pop()
        if name not in used:
            used.add(name)
            applying = [each.line(keys) for each in definitions.get(name, []) if holds(each.condition, keys)]
            if len(applying) > 1:
                raise ValueError(f"{name} has two definitions with these keys: {applying[0]!r} and {applying[1]!r}")
            if applying:
                lines[name] = applying[0]
                waiting += _NAME.findall(applying[0])
    return Formula(
        lines=tuple(lines[name] for name in definitions if name in lines),
        symbols={name: meaning for name, meaning in symbols.items() if name in used},
    )


@dataclass(slots=True)
class _Definition:
    """One definition of a name: its first line, its further terms, each with its condition."""

    value: str
    condition: str | None
    terms: list[tuple[str, str | None]] = field(default_factory=list)

    def line(self, keys: Mapping[str, Any]) -> str:
        return " ".join([self.value, *(term for term, condition in self.terms if holds(condition, keys))])


def _read(docstring: str) -> tuple[dict[str, list[_Definition]], dict[str, str]]:
    """({name: its definitions; none of a symbol}, {symbol: its meaning}) of a docstring."""
    definitions: dict[str, list[_Definition]] = {}
    symbols: dict[str, str] = {}
    current: _Definition | None = None
    for line in docstring.splitlines():
        if (term := _TERM.fullmatch(line)) is not None:
            if current is not None:
                current.terms.append((term["value"], term["condition"]))
            continue
        current = None
        if (match := _DEFINITION.fullmatch(line)) is not None:
            current = _Definition(f"{match['head']} = {match['value']}", match["condition"])
            definitions.setdefault(match["name"], []).append(current)
        elif (symbol := _SYMBOL.fullmatch(line)) is not None:
            symbols[symbol["name"]] = symbol["meaning"]
            definitions.setdefault(symbol["name"], [])
    return definitions, symbols


def holds(condition: str | None, keys: Mapping[str, Any]) -> bool:
    """Whether a condition holds with these values of keys; one that says nothing does."""
    return not unmet(condition, keys)


def unmet(condition: str | None, keys: Mapping[str, Any]) -> list[str]:
    """The parts of a condition that do not hold; of several alternatives, those of the one with the fewest.

    >>> unmet("a=1 and b > 2 or a=3", {"a": 1, "b": 0})
    ['b > 2']
    """
    alternatives = [one.split(" and ") for one in (condition or "").split(" or ")]
    return min(([part for part in parts if part and not _part_holds(part, keys)] for parts in alternatives), key=len)


def _part_holds(part: str, keys: Mapping[str, Any]) -> bool:
    match = _CONDITION.fullmatch(part)
    if match is None or match["key"] not in keys:
        raise ValueError(f"{part!r} is no condition on one of the keys {', '.join(keys)}")
    value, relation, wanted = keys[match["key"]], match["relation"], match["value"]
    if relation in "<>":
        return float(value) < float(wanted) if relation == "<" else float(value) > float(wanted)
    return (_word(value) in wanted.split("|")) == (relation == "=")


def _word(value: Any) -> str:
    """A key's value as it is written in YAML."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return str(value.value if isinstance(value, Enum) else value)
