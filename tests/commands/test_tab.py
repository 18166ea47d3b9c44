"""What runs at TAB: words that fit, from a list that is kept, with few imports."""

import json
import subprocess
import sys
from functools import cache

from in_one_test import each

from rlft import cli
from rlft.commands import tab
from rlft.commands.completion import listed
from rlft.config import catalog

made = cache(listed)


def offered(line):
    *words, word = line.split(" ")
    return [found for found in tab.words_for(words, word, made()) if found.startswith(word)]


@each("command", [*made()["keys"], "plan", "reward try", "doctor"])
def test_every_key_choice_and_recipe_is_reached(command):
    tool, _, _ = command.partition(" ")
    takes, keys = made()["commands"][tool], made()["keys"].get(command, made()["keys"]["train"])
    for key, choices in {**keys, **takes["own"]}.items():
        typed = ""
        while not typed.endswith("="):
            further = [found for found in offered(f"{command} {typed}") if f"{key}=".startswith(found)]
            [typed] = [found for found in further if found.endswith((".", "="))]
        values = [choice for choice in choices if choice[0] != "<"]
        assert [f"{typed}{value}" for value in values] == [v for v in offered(f"{command} {typed}") if values]
    own = catalog.choices("recipe", command) if command in made()["keys"] else catalog.choices("recipe")
    assert {*offered(f"{command} +recipe=")} == {f"+recipe={name}" for name in own}


WORDS = {  # {line: what is offered at its end}
    "completion ": ["bash", "zsh", "fish"],
    "plan s": ["seed=", "steps=", "scoring.", "snapshot.", "stop.", "sweep.", "sft", "sample"],
    "plan train tr": ["trainer."],
    "plan +recipe=sft_arithmetic demonstrations.pa": ["demonstrations.path="],
    "plan card=GH": ["card=GH200"],
    "recipes grpo_gsm": ["grpo_gsm8k"],
    "keys trainer.l": ["trainer.lr"],
    "serve serve.syntax=j": ["serve.syntax=json"],
    "eval data=gsm": ["data=gsm8k"],
    "train --config-dir ": ["my model/", "qa/", "runs/"],
    "train reward=[format,exact": ["reward=[format,exact_match]", "reward=[format,exact_match,"],
    "train -m algorithm=grpo,rl": ["algorithm=grpo,rloo"],
    "train --cfg j": ["job"],
    "train q": ["qa/"],
    "train qa/": ["qa/run.yaml"],
    "train +recipe=qa/": ["+recipe=qa/run.yaml"],
    "train data.path=qa/r": ["data.path=qa/rows.csv", "data.path=qa/run.yaml"],
    "resume runs/": ["runs/demo/", "runs/demo/11-00"],
    "eval run=": ["run=latest", "run=runs/demo/11-00"],
    "no_such_command ": [],
}


@each("line", WORDS)
def test_words_that_a_command_takes(line, typed_in):
    assert sorted(offered(line)) == sorted(WORDS[line])


def test_every_command_is_offered():
    assert {*offered("")} == {*cli.TOOLS, *made()["keys"], "--help", "--version"}


def test_a_list_is_kept_until_configs_or_version_change(typed_in, monkeypatch):
    calls = []

    def run(words, **_):
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, json.dumps(made()))

    monkeypatch.setattr(subprocess, "run", run)
    assert tab.cached() == tab.cached() == made()
    assert len(calls) == 1
    [file] = (typed_in / "cache" / "rlft").iterdir()
    configs = {str(path) for path in catalog.config_folder().rglob("*.yaml")}
    assert configs | {cli.rlft.__file__, str(catalog.config_folder() / "reward")} <= {*made()["watched"]}
    for changed in (cli.rlft.__file__, min(configs)):
        file.write_text(json.dumps({**made(), "watched": {**made()["watched"], changed: 1}}))
        assert tab.cached() == made()
    file.write_text("{")  # written by half
    assert tab.cached() == tab.cached() == made()
    assert len(calls) == 4


def test_what_runs_at_tab_imports_little(typed_in):
    tab.cached()
    words = [sys.executable, "-X", "importtime", "-I", "-S", tab.__file__, "bash", "rlft train tr"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "trainer.\n"
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()[1:]}
    assert "shlex" in modules
    assert {name.partition(".")[0] for name in modules} <= sys.stdlib_module_names
    assert modules.isdisjoint({"subprocess", "typing", "inspect", "dataclasses", "importlib.metadata", "logging"})
    assert len(modules) < 80
