"""`rlft completion`: what shells offer at TAB, tried in the shells themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pexpect
import pytest
from in_one_test import each

from rlft import cli
from rlft.commands import completion, tab
from rlft.commands.completion import listed
from rlft.config import catalog

LINES = {  # {what is typed before TAB: what the line is then}
    "rlft compl": "rlft completion ",
    "rlft train trainer.l": "rlft train trainer.lr=",
    "rlft train traine": "rlft train trainer.",
    "rlft train +recipe=grpo_gsm": "rlft train +recipe=grpo_gsm8k ",
    "rlft train algorithm=grpo algorithm.std=popu": "rlft train algorithm=grpo algorithm.std=population ",
    "rlft train lora.use_dora=t": "rlft train lora.use_dora=true ",
    "rlft train reward=exact": "rlft train reward=exact_match ",
    "rlft train 'reward=[format,exact": "rlft train 'reward=[format,exact_match",
    "rlft train steps=3 qa/r": "rlft train steps=3 qa/run.yaml ",
    "rlft eval run=la": "rlft eval run=latest ",
    "rlft watch runs/demo/1": "rlft watch runs/demo/11-00 ",
    "rlft train --multi": "rlft train --multirun ",
    "X=1 rlft diff at=c": "X=1 rlft diff at=common ",
    "rlft plan model.path=my\\ mod": "rlft plan model.path=my\\ model/",
}
SHELLS = {
    "bash": ("--norc --noprofile -i", 'w() { echo; echo "<$READLINE_LINE>"; READLINE_LINE=; }; bind -x \'"\\C-g": w\''),
    "zsh": ("-f -i", "w() { print; print -r -- \"<$BUFFER>\"; BUFFER=; zle reset-prompt }; zle -N w; bindkey '^G' w"),
    "fish": ("--no-config -i", """bind \\cg 'echo; echo "<"(commandline)">"; commandline ""'"""),
}
"""{shell: (its arguments, a command after which Ctrl-G prints the line and empties it)}."""

made = cache(listed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run and files of a user's; the cache is empty."""
    for file in ("qa/run.yaml", "qa/rows.csv", "runs/demo/11-00/config.yaml", "my model/config.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each("shell", completion.SHELLS)
def test_a_shell_completes_lines_as_they_are_typed(
    shell: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{sys.executable} -I -S {tab.__file__} {shell} " in script
    (folder / "rlft.sh").write_text(script)
    if shutil.which(shell) is None:
        assert shell != "bash"
        return
    arguments, shows = SHELLS[shell]
    environment = {**os.environ, "PS1": "$ ", "TERM": "xterm", "HOME": str(folder)}
    child = pexpect.spawn(shell, arguments.split(), env=environment, encoding="utf-8", timeout=60, dimensions=(50, 200))
    child.sendline(f". ./rlft.sh; {shows}; echo read''y")
    child.expect("ready\r\n")
    for typed, line in LINES.items():
        child.send(f"{typed}\t\x07")
        child.expect(r"\n<(.*?)>")
        assert child.match[1] == line, shell
    child.close(force=True)


def offered(line: str) -> list[str]:
    *words, word = line.split(" ")
    return [found for found in tab.words_for(words, word, made()) if found.startswith(word)]


@each("command", [*made()["keys"], "plan", "reward try", "doctor"])
def test_every_key_choice_and_recipe_is_reached(command: str) -> None:
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
    "plan s": [
        "seed=",
        "steps=",
        *(f"{section}." for section in ("scoring", "snapshot", "stop", "sweep")),
        "sft",
        "sample",
    ],
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
def test_words_that_a_command_takes(line: str, folder: Path) -> None:
    assert sorted(offered(line)) == sorted(WORDS[line])


def test_every_command_is_offered() -> None:
    assert {*offered("")} == {*cli.TOOLS, *made()["keys"], "--help", "--version"}


def test_a_list_is_kept_until_configs_or_version_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, json.dumps(made()))

    monkeypatch.setattr(subprocess, "run", run)
    assert tab.cached() == tab.cached() == made()
    assert len(calls) == 1
    [file] = (folder / "cache" / "rlft").iterdir()
    configs = {str(path) for path in catalog.config_folder().rglob("*.yaml")}
    assert configs | {cli.rlft.__file__, str(catalog.config_folder() / "reward")} <= {*made()["watched"]}
    for changed in (cli.rlft.__file__, min(configs)):
        file.write_text(json.dumps({**made(), "watched": {**made()["watched"], changed: 1}}))
        assert tab.cached() == made()
    file.write_text("{")  # written by half
    assert tab.cached() == tab.cached() == made()
    assert len(calls) == 4


def test_what_runs_at_tab_imports_little(folder: Path) -> None:
    tab.cached()
    words = [sys.executable, "-X", "importtime", "-I", "-S", tab.__file__, "bash", "rlft train tr"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "trainer.\n"
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()[1:]}
    assert "shlex" in modules
    assert {name.partition(".")[0] for name in modules} <= sys.stdlib_module_names
    assert modules.isdisjoint({"subprocess", "typing", "inspect", "dataclasses", "importlib.metadata", "logging"})
    assert len(modules) < 80


@each("words", [[*name, option] for name in ([], ["train"], ["eval"], ["runs"]) for option in cli.OF_SHELLS])
def test_completion_of_other_programs_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*words, "install=bash"]) == 2
    assert "rlft completion bash" in capsys.readouterr().err
