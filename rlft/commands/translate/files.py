"""Reads another library's arguments from words, a shell script, a YAML file, or a Python script, which is never run."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from rlft.types import UserError

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
