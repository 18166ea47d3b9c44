"""`rlft completion`: what shells offer at TAB, tried in the shells themselves."""

import json
import os
import shutil
import subprocess
import sys

import pexpect
from in_one_test import each

from rlft import cli
from rlft.commands import completion, tab
from rlft.commands.completion import listed

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


@each("shell", completion.SHELLS)
def test_a_shell_completes_lines_as_they_are_typed(shell, typed_in, monkeypatch, ran):
    script = ran(["completion", shell]).out
    assert f"{sys.executable} -I -S {tab.__file__} {shell} " in script
    (typed_in / "rlft.sh").write_text(script)
    done = subprocess.CompletedProcess([], 0, json.dumps(listed()))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: done)
        tab.cached()  # the list, which the first TAB would else make
    if shutil.which(shell) is None:
        assert shell != "bash"
        return
    arguments, shows = SHELLS[shell]
    environment = {**os.environ, "PS1": "$ ", "TERM": "xterm", "HOME": str(typed_in)}
    child = pexpect.spawn(shell, arguments.split(), env=environment, encoding="utf-8", timeout=60, dimensions=(50, 200))
    child.sendline(f". ./rlft.sh; {shows}; echo read''y")
    child.expect("ready\r\n")
    for typed, line in LINES.items():
        child.send(f"{typed}\t\x07")
        child.expect(r"\n<(.*?)>")
        assert child.match[1] == line, shell
    child.close(force=True)


@each("words", [[*name, option] for name in ([], ["train"], ["eval"], ["runs"]) for option in cli.OF_SHELLS])
def test_completion_of_other_programs_is_refused(words, ran):
    assert "rlft completion bash" in ran([*words, "install=bash"], ends=2).err
