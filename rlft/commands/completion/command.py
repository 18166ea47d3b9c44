"""`rlft completion bash|zsh|fish`: prints the script that a shell sources to complete rlft's words."""

from __future__ import annotations

import shlex
import sys

from rlft.commands.completion import tab
from rlft.config.choices import choice_remedy
from rlft.config.suggest import ASSETS
from rlft.types import require

SHELLS = ("bash", "zsh", "fish")


def command(arguments: list[str]) -> None:
    shell = " ".join(arguments)
    remedy = choice_remedy(shell, SHELLS)
    require(shell in SHELLS, "completion", "takes the name of your shell", got=shell or "nothing", remedy=remedy)
    tab.cached()  # so that the first TAB need not wait
    script = (ASSETS / "completion" / f"rlft.{shell}").read_text(encoding="utf-8")
    print(script.replace("PYTHON TAB", shlex.join([sys.executable, "-I", "-S", tab.__file__])), end="")
