"""`rlft translate`: another library's arguments as rlft's, with what has no counterpart and what differs in meaning.

They are read from words, a shell script, a YAML file, or a Python script, which is never run. The table
assets/peer_names.yaml has what they mean here. `suggest.py` reads it for a single mistyped key; here all arguments of a
run are known, so that batch sizes, clips and KL terms, which depend on several of them, are computed. Nothing is mapped
silently."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from rlft.commands.tables import wrapped
from rlft.config.choices import as_typed, choice_remedy
from rlft.config.suggest import known_keys, peer_table, refused_setting, target_of, translated_peers
from rlft.system.terminal import command_line, for_a_shell, override, show
from rlft.types import UserError, require

SCRIPTS = (".py", ".sh", ".bash", ".yaml", ".yml")
HOISTED = ("trl", "vllm")  # sections of axolotl's YAML with TRL's own names
POSITIONAL = {"load_dataset": ("dataset_name", "dataset_config"), "from_pretrained": ("model_name",)}
OTHER_NAMES = {"load_dataset": {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}}
"""{function: the names of its arguments here}, of positional ones in order."""
OF_FILES = ("'json'", "'csv'", "'parquet'")  # sets that are the files in data_files
LAUNCHING = ("--config", "--module")  # what stands before a file or a program
OF_TRAINERS = ("model", "reward_funcs")  # what a trainer is given that is an argument here; the rest are objects
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of one run, as they were read."""

    is_whole: bool  # whether a file was read, so that these are all arguments of a run
    arguments: dict[str, object] = field(default_factory=dict)
    programs: list[str] = field(default_factory=list)  # the classes, programs and subcommands that take them
    unread: dict[str, str] = field(default_factory=dict)  # {name: an expression whose value only a run would give}

    def add(self, name: str, value: object, expression: str = "") -> None:
        """Adds an argument; with an expression, one whose value is unknown."""
        (self.arguments if expression else self.unread).pop(name, None)
        if expression:
            self.unread[name] = expression
        else:
            self.arguments[name] = value


def read(words: Sequence[str]) -> Given:
    """Reads files and words; words replace what files say. Raises UserError: a file cannot be read."""
    from yaml import YAMLError

    files = [word for word in words if word.endswith(SCRIPTS) and "=" not in word]
    result = Given(is_whole=bool(files))
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
            if file.endswith(".py"):
                _read_python(ast.parse(text), result)
            elif file.endswith((".yaml", ".yml")):
                _read_yaml(text, result)
            else:
                _read_shell(text, result)
        except (OSError, ValueError, SyntaxError, RecursionError, YAMLError) as error:
            problem = f"the file cannot be read: {' '.join(str(error).split())}"
            remedy = "name a Python script, a shell script or a YAML file"
            raise UserError("translate", problem, got=file, remedy=remedy) from None
    _read_words([word for word in words if word not in files], result)
    return result


def scalar(text: str) -> object:
    """The value that a word stands for.

    >>> scalar("1e-6"), scalar("true"), scalar("['a', 1]"), scalar("[a,b]"), scalar("Qwen/Qwen3-4B"), scalar("None")
    (1e-06, True, ['a', 1], ['a', 'b'], 'Qwen/Qwen3-4B', None)
    """
    named = {"true": True, "false": False, "null": None}
    if text.lower() in named:
        return named[text.lower()]
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        return ast.literal_eval(text)
    return [scalar(part.strip()) for part in text[1:-1].split(",")] if re.fullmatch(r"\[.*\]", text) else text


def _read_words(words: Sequence[str], result: Given) -> None:
    """Reads `name=value`, `--name value ..`, `--name=value` and `--flag`; other words are programs and subcommands."""
    flag, values = "", list[str]()
    for word in (*(word for word in words if word not in LAUNCHING), "--"):
        is_name = re.match(r"--|\+*[A-Za-z_][\w.]*=", word)
        if flag and not is_name:
            values.append(word)
            continue
        if flag:
            read_values = [scalar(value) for value in values] or [True]
            unread = next((value for value in values if "$" in value), "")
            result.add(flag, read_values if len(read_values) > 1 else read_values[0], unread)
        name, equals, value = word.lstrip("+-").partition("=")
        flag, values = "" if equals or not word.startswith("--") else name.replace("-", "_"), []
        if equals and is_name:
            result.add(name.replace("-", "_"), scalar(value), value if "$" in value else "")
        elif not is_name:
            result.programs.append(word)


def _read_shell(text: str, result: Given) -> None:
    """Reads the arguments in a shell script, with the variables that it sets to plain values."""
    variables = {"HOME": "~"}
    text = re.sub(r"(?m)^\s*#.*$|\s#[^'\"\n]*$", "", text)
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        try:
            words = shlex.split(line)
        except ValueError:  # a quote that spans lines
            words = re.sub(r"['\"]", "", line).split()
        words = [Template(word).safe_substitute(variables) for word in words if "[@]" not in word and word not in "()"]
        assignments = [word.split("=", 1) for word in words if re.match(r"[A-Za-z_]\w*=", word)]
        variables.update({name: value for name, value in assignments if "$" not in value})
        _read_words([word for word in words if word.split("=", 1) not in assignments], result)


def _read_yaml(text: str, result: Given) -> None:
    from yaml import safe_load

    content = safe_load(text)
    if not isinstance(content, dict):
        raise ValueError("it has no keys with values")
    for name, value in _flat(content):
        result.add(name, scalar(value) if isinstance(value, str) else value)
    if "base_model" in content:  # axolotl's
        result.programs.append(f"rl: {'reward' if content.get('reward_model') is True else content.get('rl')}")


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested sections."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, "" if not prefix and key in HOISTED else f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_python(tree: ast.Module, result: Given) -> None:
    """Reads the arguments of configs, trainers, models and data sets that the script makes."""
    constants: dict[str, Any] = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assign)):
        try:
            constants[ast.unparse(node.targets[0])] = _literal(node.value, constants)
        except ValueError:
            constants.pop(ast.unparse(node.targets[0]), None)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        *owner, function = ast.unparse(call.func).split(".")
        is_tokenizer = function == "from_pretrained" and "Model" not in "".join(owner)
        if is_tokenizer or not function.endswith(("Config", "Trainer", "Arguments", "get_peft_model", *POSITIONAL)):
            continue
        result.programs.extend([*owner, function])
        named = [(OTHER_NAMES.get(function, {}).get(word.arg or "", word.arg), word.value) for word in call.keywords]
        named = [*zip(POSITIONAL.get(function, ()), call.args, strict=False), *named]
        if any(name == "dataset_name" and ast.unparse(value) in OF_FILES for name, value in named):
            named = [("dataset_name", value) if name == "data_files" else (name, value) for name, value in named]
        for name, value in named:
            expression = ast.unparse(value)
            if name == "reward_funcs":  # functions, whose names are their values here
                result.add(name, [ast.unparse(one) for one in getattr(value, "elts", [value])])
            elif not function.endswith("Trainer") or (name in OF_TRAINERS and not isinstance(value, ast.Name)):
                try:
                    result.add(name or "**", _literal(value, constants))
                except ValueError:
                    result.add(name or "**", None, expression)


def _literal(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of an expression of literals, constants and arithmetic. Raises ValueError: it is another one."""
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr  # a dtype
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one, constants) for one in node.elts]
    try:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = _literal(node.left, constants), _literal(node.right, constants)
            if isinstance(node.op, ast.Add) or all(isinstance(side, float | int) for side in (left, right)):
                return OPERATORS[type(node.op)](left, right)  # a text times 10**12 would fill the memory
        return ast.literal_eval(node)
    except (TypeError, SyntaxError, ArithmeticError) as error:
        raise ValueError(str(error)) from None


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


LIBRARIES = "trl|verl|axolotl|openrlhf|unsloth"

WIDTH = 34  # columns of a table's first column; a longer cell has a line of its own


def command(arguments: list[str]) -> None:
    peer, words = (arguments[0] if arguments else ""), arguments[1:]
    remedy = f"write rlft translate {peer} <file or arguments>"
    require(words or peer not in translated_peers(), "translate", "there is nothing to translate", remedy=remedy)
    translation, given = translated(peer, words)
    show("\n".join(lines(translation, given)))


def translated(peer: str, words: Iterable[str]) -> tuple[Translation, Given]:
    """The translation of files and arguments, with what was read. Raises UserError: there is none in them."""
    remedy, got = choice_remedy(peer, translated_peers()), peer or "nothing"
    require(peer in translated_peers(), "translate", "needs the library's name first", got=got, remedy=remedy)
    given = read(list(words))
    if not given.arguments and not given.unread:
        problem, remedy = "there are no arguments in it", "name the file that has them, or write them as name=value"
        raise UserError("translate", problem, got=" ".join(words), remedy=remedy)
    command = command_of(peer, given.programs) or "train"
    how: dict[str, Any] = {"whole": given.is_whole, "programs": given.programs, "unread": given.unread}
    return translate(peer, given.arguments, command, **how), given


def lines(translation: Translation, given: Given) -> list[str]:
    """The text that is printed: the command, the table, and the lists of what is not the same."""
    mapped = [row for row in translation.rows if row.words]
    told = [command_line("rlft", translation.command, *translation.words.values()), ""]
    told += [f"{translation.title:<{WIDTH}} rlft {translation.command}"] if mapped else []
    for row in mapped:
        told += _two_columns(arguments_of(row), [for_a_shell(word) for word in row.words.values()])
    told += _listed("Differs in meaning", mapped)
    told += _listed("No counterpart here", [row for row in translation.rows if not row.words])
    if given.unread:
        told += ["", "Could not be read: add name=<value> for each that matters"]
        told += [line for name, text in given.unread.items() for line in wrapped(f"{name}: {text}", "  ", "    ")]
    return told


def arguments_of(row: Row) -> list[str]:
    """The arguments of the other library in a row, as they were given or are its defaults."""
    theirs = [f"{name}={_shown(value)}" for name, value in row.theirs.items()] or ["(not given)"]
    theirs[-1] += " (default)" * (row.is_default and bool(row.theirs))
    return theirs


def _two_columns(left: list[str], right: list[str]) -> list[str]:
    rows = []
    for index in range(max(len(left), len(right))):
        first, second = (cells[index] if index < len(cells) else "" for cells in (left, right))
        if len(first) > WIDTH:
            rows.append(first)
            first = ""
        if first or second:
            rows.append(f"{first:<{WIDTH}} {second}".rstrip())
    return rows


def _listed(title: str, rows: list[Row]) -> list[str]:
    """The notes of rows below a title; rows with one note share a line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            names.setdefault(row.note, []).extend([*row.theirs] or [*row.words])
    notes = [line for note, of in names.items()
             for line in wrapped(for_a_shell(f"{', '.join(of)}: {note}" if of else note), "  ", "    ")]  # fmt: skip
    return ["", title, *notes] if notes else []


def _shown(value: object) -> str:
    return value if isinstance(value, str) else as_typed(value)
