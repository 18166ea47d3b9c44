"""Translates another library's arguments of a run into rlft's, by the table assets/peer_names.yaml.

`suggest.py` reads the same table for a single mistyped key; here all arguments of a run are known, so that batch sizes,
clips and KL terms, which depend on several of them, are computed. Where an argument has no counterpart, or means
something else here, the table says so, and nothing is mapped silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rlft.config.suggest import known_keys, peer_table, refused_setting, target_of
from rlft.system.terminal import override

OWN = ("train", "sft", "dpo", "rm")  # commands of rlft, by which the table has defaults
FILE = re.compile(r"^[./~]|\.(jsonl?|csv|tsv|parquet)$")
"""How the name of a file begins or ends, and that of a set of the hub does not."""


@dataclass(frozen=True, slots=True)
class Row:
    """Arguments of another library, and the words that say the same here."""

    theirs: dict[str, object]  # {their name: its value}
    words: dict[str, str] = field(default_factory=dict)  # {our key: the whole word}; none if there is no counterpart
    note: str = ""  # how the meaning differs, or why there is no counterpart
    is_default: bool = False  # none of the arguments was given: these are the library's defaults


@dataclass(frozen=True, slots=True)
class Translation:
    """All arguments of one run."""

    title: str  # the library with the version at which its meanings were read
    command: str
    rows: list[Row]

    @property
    def words(self) -> dict[str, str]:
        """{our key: its word}, of all rows in order; choices of groups come first, since their keys depend on them."""
        words = {key: word for row in self.rows for key, word in row.words.items()}
        return dict(sorted(words.items(), key=lambda item: "." in item[0]))


@cache
def _peer(name: str) -> dict[str, Any]:
    """The table of a library, with what it shares with the one that it extends."""
    own = peer_table()[name]
    if "extends" not in own:
        return own
    base = _peer(own["extends"])
    both = {part: {**base[part], **own.get(part, {})} for part in ("names", "aliases")}
    defaults = {
        of: {**base["defaults"].get(of, {}), **own["defaults"].get(of, {})}
        for of in (*base["defaults"], *own["defaults"])
    }
    lists = {part: [*own[part], *base[part]] for part in ("rules", "without")}
    return {**base, **own, **both, **lists, "defaults": defaults}


def command_of(peer: str, names: Iterable[str]) -> str | None:
    """The command of rlft that a program, class or subcommand of the library stands for; None if none of them does.

    >>> command_of("trl", ["DPOTrainer"]), command_of("openrlhf", ["openrlhf.cli.train_rm"]), command_of("verl", ["n"])
    ('dpo', 'rm', None)
    """
    found = [ours for name in names for part, ours in _peer(peer)["commands"].items() if part in name.lower()]
    return "train" if "train" in found else found[0] if found else None


def translate(
    peer: str,
    given: Mapping[str, object],  # {name as it was written: value}
    command: str,
    *,
    whole: bool = False,  # whether these are all arguments of a run, so that the library's defaults hold for the others
    programs: Iterable[str] = (),  # the classes, functions and programs that the arguments belong to
    unread: Iterable[str] = (),  # names of arguments whose values are unknown, so that their defaults do not hold
) -> Translation:
    """Translates the arguments of one run."""
    table = _peer(peer)
    text = " ".join(programs).lower()
    written = {table["aliases"].get(name, name): name for name in given}
    unknown = {table["aliases"].get(name, name) for name in unread}
    parts = [of for of in table["defaults"] if of == command or (of not in OWN and of in text)]
    defaults = {name: value for of in parts for name, value in table["defaults"][of].items() if name not in unknown}
    values = {**defaults, **{name: given[written[name]] for name in written}}
    context = _nested({"num_processes": 1, **values}) | {"given": set(written), "programs": text}
    for name, template in table["lets"].items():
        context[name] = _rendered(template, context)
    rows: list[Row] = []
    covered = {"num_processes"}
    for rule in table["rules"]:
        of = rule["of"]
        here = [name for name in of if name in written and name not in covered]
        is_default = whole and not here and covered.isdisjoint(of) and (not of or not defaults.keys().isdisjoint(of))
        words = {key: template for key, template in rule.get("words", {}).items() if key in known_keys(command)}
        applies = (here or is_default) and command in rule.get("command", [command]) and (words or "words" not in rule)
        if not applies or not _rendered(str(rule.get("if", True)), context):
            continue
        covered.update(of)
        theirs = {written[name]: values[name] for name in here} or {n: defaults[n] for n in of if n in defaults}
        note = str(_rendered(rule.get("note", ""), context) or "")
        rows.append(Row(theirs, _words(words, context), note, is_default))
    rows += [_copied(table, n, written[n], values[n], command) for n in written if n not in covered]
    copied = [_copied(table, n, n, defaults[n], command) for n in defaults if whole and n not in {*covered, *written}]
    rows += [replace(row, is_default=True) for row in copied if row.words]
    return Translation(f"{table['title']} {table['version']}", command, [row for row in rows if row.words or row.note])


def _copied(table: Mapping[str, Any], name: str, written: str, value: object, command: str) -> Row:
    """The row of an argument that no rule covers: its value is the key's, or it has no counterpart."""
    theirs = {written: value}
    reason = [row["why"] for row in table["without"] if name in row["names"] or name.partition(".")[0] in row["names"]]
    if reason:
        return Row(theirs, note=reason[0])
    if (refused := refused_setting(name.rpartition(".")[2])) is not None:
        return Row(theirs, note=f"{refused[0]}; {refused[1]}")
    meant = target_of(table["names"].get(name, name), command, known_keys(command))
    if meant is None:
        is_known = name in table["names"]
        return Row(theirs, note=f"rlft {command} has no such key" if is_known else "is not in the table of names")
    if value is None or (meant.value is not None and not value):
        return Row(theirs)
    if not meant.is_copied:
        return Row(theirs, note=f"see {meant.written()}")
    return Row(theirs, {meant.key: override(meant.key, meant.value or value)}, meant.note)


def _words(templates: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, str]:
    values = {key: _rendered(str(template), context) for key, template in templates.items()}
    return {key: override(key, value) for key, value in values.items() if value is not None and value != ""}


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """{first part: {second part: ..}} of dotted names."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        inside = result
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                break
        else:
            inside[last] = value
    return result


def _rendered(template: str, context: Mapping[str, Any]) -> Any:
    """The value of a template of the table; None where an argument that it needs is missing, or is no number."""
    from jinja2 import Undefined, UndefinedError

    try:
        value = _environment().from_string(template).render(context)
    except (UndefinedError, TypeError, ValueError, ArithmeticError, LookupError):
        return None
    return None if isinstance(value, Undefined) else value


@cache
def _environment() -> Any:
    from jinja2 import ChainableUndefined
    from jinja2.nativetypes import NativeEnvironment

    environment = NativeEnvironment(undefined=ChainableUndefined)
    environment.tests["file"] = lambda text: bool(FILE.search(str(text)))
    return environment
