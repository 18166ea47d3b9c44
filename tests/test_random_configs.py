"""Random keys with random values: each command line is planned, or refused in one line that begins with a key."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from slow_cases import slow_but

from rlft import cli
from rlft.config import command as commands, compose as configs
from rlft.config.instantiate import instantiate
from rlft.config.resolved import resolve
from rlft.config.suggest import known_keys
from rlft.plan.model_rules import check_machine
from rlft.types import UserError

NUMBERS_OF_EXAMPLES = (20, int(os.environ.get("RLFT_RANDOM_CONFIGS", "1000")))
SEEDED = "RLFT_RANDOM_CONFIGS" not in os.environ
"""With more examples asked for, they are other ones each time."""

BASE = {
    "train": ["+recipe=grpo_arithmetic"],
    "sft": ["+recipe=sft_arithmetic"],
    "rm": ["+recipe=rm_arithmetic"],
    "dpo": ["+recipe=dpo_arithmetic"],
    "sample": ["generation.max_tokens=48"],
}
OUTSIDE = ("hydra.run.dir", "command", "name", "resume", "model.path", "data.path")
"""Keys that decide what the other examples are read from: they have their own tests."""

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([10**6, -(10**6), 2**31, 2**63, 10**30, -(10**30)]),
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, 1e308, 0.5, 1.0]),
)
ODD_TEXTS = ["", "x", "auto", "none", "base", "off", "on", "yes", "~", "../x", "/", ".", "a b", "é", "\t", "{", "["]
TEXTS = st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=8))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
ODD_WORDS = [
    "", "null", "true", "nan", "inf", "-inf", "1e999", "0x10", "1_000", "'1'", "[]", "{}", "[null]", "[[x]]", "{a: 1}",
    "{*: 1}", "???", "${seed}", "${nothing}", "${oc.env:NO}", "1,2", "a,b", "[1,a]", "-1", "0", "1", "1.5", "1e3",
    "9" * 400,
]  # fmt: skip
WORDS = st.one_of(st.sampled_from(ODD_WORDS), st.text(st.characters(blacklist_categories=["Cs"]), max_size=12))
SIGNS = st.sampled_from(["", "", "", "+", "++", "~"])


@cache
def composed(command: str) -> dict[str, Any]:
    return configs.compose(BASE[command], command=command)


@st.composite
def changed_configs(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    """A command, and one to three of its keys with values of any kind."""
    command = draw(st.sampled_from(commands.OWN))
    keys = [key for key in flat(composed(command)) if key not in OUTSIDE and not key.endswith("_target_")]
    changes = draw(st.lists(st.tuples(st.sampled_from(keys), VALUES), min_size=1, max_size=3))
    return command, changes


def flat(config, prefix=""):
    """Every key and section of a config by its dotted name."""
    names = [f"{prefix}{name}" for name in config]
    return [*names, *(inner for name in config if isinstance(config[name], dict)
                      for inner in flat(config[name], f"{prefix}{name}."))]  # fmt: skip


def changed(config, key, value):
    """A copy with another value; the same config where its section is gone."""
    name, dot, rest = key.partition(".")
    if not dot:
        return {**config, name: value}
    inner = config.get(name)
    return {**config, name: changed(inner, rest, value)} if isinstance(inner, dict) else config


def refusal(command, plain):
    """What is said of a config before any file is read; also of the parts that read data, which are made."""
    try:
        check_machine(resolve(plain, command).config.model)
        for section in ("data", "demonstrations", "preferences"):
            if plain.get(section):
                instantiate(plain[section], section)
    except UserError as error:
        return error
    return None


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory):
    """A folder to run in, in which nothing is."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("nowhere")
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr("rlft.system.crash.tempfile.tempdir", str(place))
        yield place


def tried(examples, of, check):
    """Checks so many examples."""
    given(of)(
        settings(
            max_examples=examples, derandomize=SEEDED, database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )(check)
    )()  # fmt: skip


@pytest.mark.parametrize("examples", slow_but(20, NUMBERS_OF_EXAMPLES))
def test_a_config_of_random_values_is_sound_or_refused_by_a_key(nowhere, examples):
    def check(example: tuple[str, list[tuple[str, Any]]]) -> None:
        command, changes = example
        plain = composed(command)
        for key, value in changes:
            plain = changed(plain, key, value)
        refused = refusal(command, plain)
        assert refused is None or (refused.key and refused.problem and refused.remedy)

    tried(examples, changed_configs(), check)


@pytest.mark.parametrize("examples", slow_but(20, NUMBERS_OF_EXAMPLES))
def test_random_words_are_refused_in_one_line_or_composed(nowhere, examples):
    tried(examples // 5, st.data(), lambda data: check_words(nowhere, data))


def check_words(nowhere, data):
    command = data.draw(st.sampled_from(commands.OWN))
    keys = st.sampled_from([key for key in known_keys(command) if key not in OUTSIDE])
    words = data.draw(st.lists(st.tuples(SIGNS, keys, WORDS), min_size=1, max_size=2))
    typed = [f"{sign}{key}={value}" for sign, key, value in words]
    out, err = io.StringIO(), io.StringIO()

    def planned(plain: dict[str, Any], folder: object) -> None:
        if refused := refusal(command, plain):
            raise refused

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("rlft.commands.launch.begin", planned)
        code = cli.run([str(command), *BASE[command], *typed])
    assert code in (0, 2), err.getvalue()
    assert err.getvalue().count("\n") == (1 if code else 0), err.getvalue()
    assert code == 0 or err.getvalue().startswith("rlft: "), err.getvalue()
    assert not list(nowhere.glob("rlft_error_*"))
