"""Makes the objects that `_target_` names, and dataclasses from mappings, with every field checked."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from rlft.config import catalog
from rlft.config.choices import as_typed, choice_remedy, closest
from rlft.config.keys import ABSENT, fields_of, joined, options
from rlft.config.suggest import unknown_in_section
from rlft.types import Mistakes, UserError, require

PYTHON = ".py"
ALLOW_UNSCORABLE = "allow_unscorable"  # the switch of `data` that the run reads, and not the source of the data

SENTENCES = {  # {start of a message of pydantic: rlft's wording}
    f"Input should be less than or equal to {2**63 - 1}": "must be at most 2**63-1",
    "Input should be a valid integer": "must be a whole number",
    "Input should be a valid number": "must be a number",
    "Input should be a valid string": "must be a string",
    "Input should be a valid boolean": "must be true or false",
    "Input should be a valid dictionary": "must be a section of keys",
    "Input should be an instance of Sequence": "must be a list",
    "'str' instances are not allowed as a Sequence value": "must be a list",
    "Input should be": "must be",
    "Input should": "must",
}


def locate(target: Any, key: str) -> Any:
    """The class or function at a dotted path or in a file, the value of the config key `key`.

    >>> locate("rlft.reward.format.Format", "reward.format._target_").__name__
    'Format'
    """
    path, colon, name = split_target(target)
    if not colon:
        remedy = "name one to import, or one in a file as file.py:name"
        raise UserError(key, "must be module.Name of a class or function", got=target, remedy=remedy)
    try:
        module = _in_file(Path(path)) if path.endswith(PYTHON) else importlib.import_module(path)
    except UserError as error:
        raise UserError(key, error.problem, got=target, remedy=error.remedy) from None
    except (Exception, SystemExit) as error:  # an import runs the module's own code, which may raise anything
        cause = f"{type(error).__name__}: {error}"
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(path)]
        at_line = f"line {lines[-1]}, " if lines and not isinstance(error, SyntaxError) else ""
        remedy = "check the spelling; it is looked for in the current folder, in --config-dir and on PYTHONPATH"
        remedy = "fix that line" if path.endswith(PYTHON) else remedy
        raise UserError(key, f"cannot be imported ({at_line}{cause})", got=target, remedy=remedy) from error
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        known = [n for n in own if n[0] != "_" and callable(getattr(module, n))]
        remedy = choice_remedy(name, known) if known else f"define it in {path}"
        raise UserError(key, f"cannot be imported (there is no {name} in {path})", got=target, remedy=remedy)
    target_object = getattr(module, name)
    require(callable(target_object), key, "is not callable", got=target, remedy="name a class or a function")
    return target_object


def split_target(target: Any) -> tuple[str, str, str]:
    """(module or file, its separator, name) of a `_target_`; the separator is empty if it is none.

    >>> split_target("mine.close"), split_target("qa/reward.py:close")
    (('mine', '.', 'close'), ('qa/reward.py', ':', 'close'))
    """
    text = target.strip(".") if isinstance(target, str) else ""
    path, colon, name = text.rpartition(":")
    return (path, colon, name) if path.endswith(PYTHON) else text.rpartition(".")


def _in_file(file: Path) -> Any:
    """The module in a file, loaded once for its content; it may import what lies next to it."""
    file = file.expanduser()
    remedy = "check its path; a run that used it has a copy in its folder `code`"
    require(file.is_file(), str(file), "there is no such file", remedy=remedy)
    name = f"{file.stem}_{hashlib.sha256(str(file.resolve()).encode() + file.read_bytes()).hexdigest()[:12]}"
    if name not in sys.modules:
        if str(file.resolve().parent) not in sys.path:
            sys.path.append(str(file.resolve().parent))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None, "its name ends in .py"
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def instantiate(config: Any, key: str, command: str = "train") -> Any:
    """The component that a `_target_` config describes; types and bounds of a dataclass's fields are checked."""
    if not isinstance(config, Mapping) or "_target_" not in config:
        group = key.partition(".")[0]
        if config == {} and key == group:
            remedy = f"add {group}=<one of {', '.join(catalog.choices(group))}>"
            raise UserError(key, "is needed here, and none is chosen", remedy=remedy)
        raise UserError(key, "has no _target_", got=config, remedy=f"choose one of {', '.join(catalog.choices(group))}")
    target = locate(config["_target_"], f"{key}._target_")
    kwargs = {k: v for k, v in config.items() if k != "_target_"}
    if key == "data" and ALLOW_UNSCORABLE in kwargs:
        convert(bool, kwargs.pop(ALLOW_UNSCORABLE), f"{key}.{ALLOW_UNSCORABLE}")
    if dataclasses.is_dataclass(target):
        return from_mapping(target, kwargs, key, command)
    check_keys(list(inspect.signature(target).parameters.values()), kwargs, key)
    return target(**kwargs)


def check_keys(
    parameters: list[inspect.Parameter], kwargs: Mapping[str, Any], key: str, also: Sequence[str] = ()
) -> None:
    """Refuses unknown and missing keys of these parameters; a refusal may also suggest the keys in `also`."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    accepted = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for unknown in (k for k in kwargs if k not in [p.name for p in accepted]):
        raise unknown_in_section(unknown, kwargs[unknown], [*(p.name for p in accepted), *also], key)
    for missing in (p.name for p in accepted if p.default is p.empty and p.name not in kwargs):
        raise UserError(joined(key, missing), "is missing", remedy="give it a value")


def from_mapping(cls: Any, values: Any, prefix: str, command: str = "train") -> Any:
    """A dataclass from a mapping. Unknown and missing keys, wrong types and bounds are refused by their full key.

    A YAML file of the user's own may be older than a key: then it has the value of what rlft did before (`Key.before`).
    `command` is the command of these keys, because keys of the same name may mean different things.
    """
    if not isinstance(values, Mapping):
        keys = [joined(prefix, f.name) for f in dataclasses.fields(cls)]
        is_path = isinstance(values, str) and keys[0].endswith(".path")  # model=<path>
        remedy = f"write {keys[0]}={values}" if is_path else f"set one of {', '.join(keys)}"
        raise UserError(prefix, "must be a section of keys", got=as_typed(values), remedy=remedy)
    if hasattr(cls, "with_sections_read"):  # a class with sections whose names decide their classes
        values = cls.with_sections_read(values, prefix, command)
    fields = {field.name: field for field in fields_of(cls)}
    values = {**{name: field.key.before for name, field in fields.items() if field.key.before is not ABSENT}, **values}
    mistakes, converted = Mistakes(), {}
    for name, value in values.items():
        with mistakes:
            if name not in fields:
                raise unknown_in_section(name, value, list(fields), prefix, command)
            converted[name] = convert(fields[name].hint, value, joined(prefix, name), command)
    for name in (name for name, field in fields.items() if not (field.has_default or name in values)):
        with mistakes:
            raise UserError(joined(prefix, name), "is missing", remedy="give it a value")
    mistakes.refuse()
    return cls(**converted)


def convert(hint: Any, value: Any, key: str, command: str = "train") -> Any:
    """The value in its field's type, checked by pydantic in strict mode (no "5" for 5, no True for 1)."""
    kinds = options(hint)
    may_be_null, sections = type(None) in kinds, [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if sections and may_be_null and value in (False, "none", "off"):
        raise UserError(key, "must be a section of keys", got=as_typed(value), remedy=f"write {key}=null for none")
    if sections and not (value is None and may_be_null):
        return from_mapping(sections[0], value, key, command)
    from pydantic import ValidationError
    from pydantic.errors import PydanticSchemaGenerationError

    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    texts = [*_literals(kinds), *(member.value for kind in enums for member in kind)]
    value = "off" if value is False and "off" in texts and bool not in kinds else value  # a bare off is YAML's false
    for kind in enums:
        if value in [member.value for member in kind]:
            return kind(value)
    try:
        validated = _adapter(hint).validate_python(value, strict=True)
    except PydanticSchemaGenerationError:
        return value  # a type that pydantic does not know: its own class must check it
    except ValidationError as error:
        problem = _either(list(dict.fromkeys(_in_our_words(e["msg"]) for e in error.errors())))
        choices = [str(m.value) for kind in enums for m in kind]
        choices += ["null"] if choices and may_be_null else []
        remedy = choice_remedy(value, choices) if choices else _remedy(hint, value, key, command)
        problem = "is not one of its choices" if choices else problem
        raise UserError(key, problem, got=as_typed(value), remedy=remedy) from None
    if isinstance(validated, float) and not abs(validated) < float("inf"):
        raise UserError(key, "must be finite", got=value, remedy=_remedy(hint, value, key, command))
    return tuple(validated) if isinstance(validated, list) else validated


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _in_our_words(message: str) -> str:
    start = next((start for start in SENTENCES if message.startswith(start)), "")
    return SENTENCES.get(start, "") + message.removeprefix(start)


def _either(problems: Sequence[str]) -> str:
    """One sentence about the problems that the possible types have with the value.

    >>> _either(["must be true or false", "must be 'auto'"])
    "must be true or false or 'auto'"
    """
    prefix = "must be "
    if all(problem.startswith(prefix) for problem in problems):
        return prefix + " or ".join(problem.removeprefix(prefix) for problem in problems)
    return "; ".join(problems)


def _literals(kinds: Iterable[Any]) -> list[Any]:
    return [v for kind in kinds if typing.get_origin(kind) is typing.Literal for v in typing.get_args(kind)]


def _remedy(hint: Any, value: Any, key: str, command: str) -> str:
    kinds = [
        typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind for kind in options(hint)
    ]
    if str not in kinds and any(typing.get_origin(kind) is Sequence for kind in kinds):
        if value is None:
            return f"write {key}=[]"
        if isinstance(value, str | int | float):
            return f"write {key}=[{as_typed(value)}]"
    if literals := [str(literal) for literal in _literals(kinds)]:
        close = closest(value, literals)
        meant = f"did you mean {close}? " if close else ""
        return f"{meant}use {' or '.join(literals)}" + (" or a number" if float in kinds else "")
    if int in kinds and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if str in kinds and isinstance(value, int | float):
        return f"""quote it twice: "{key}='{value}'" """.strip()
    meaning = catalog.meaning(key, command)
    if meaning is None or not meaning.default:
        return f"`rlft {command} --cfg job` shows every key with a right value"
    return f"for instance {meaning.default}" + (f" ({meaning.comment})" if meaning.comment else "")


def component_name(target: str) -> str:
    """The name of a component from its address: its module's; of the preference losses, which share one, its own.

    >>> component_name("rlft.algorithm.grpo.GRPO"), component_name("rlft.algorithm.preference.BradleyTerry")
    ('grpo', 'bradley_terry')
    """
    module, name = target.rsplit(".", 2)[-2:]
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z]{2})", "_", name).lower() if module == "preference" else module
