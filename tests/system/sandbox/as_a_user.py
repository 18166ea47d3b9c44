"""The code sandbox as a user who is not root, in two lines of JSON; started by root, who becomes one, or by a user.

    python as_a_user.py <a Python that all users can run>

The first line is about this machine, with every attempt of test_launch.py. Then the sandbox's own filter is put on
this process, so that the kernel makes it no namespaces, and the second line says what becomes of that.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[2] / "helpers"))

from reward_groups import make_group
from test_launch import ATTEMPTS, answers

from rlft.config.instantiate import convert
from rlft.reward import code
from rlft.system.sandbox import bubblewrap, launch
from rlft.types import UserError

USER = 12345
CODE = Path(__file__).parents[3] / "configs" / "reward" / "code.yaml"
BWRAP = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "true"]


def become_a_user(python: str) -> None:
    """From here on files of root's may be closed to it, modules too: all that is needed has been imported."""
    bubblewrap.available()
    forget()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    sys._base_executable = python  # type: ignore[attr-defined]


def forget() -> None:
    """What is available is tried again."""
    for cached in (bubblewrap.available, bubblewrap.memory_bound):
        cached.cache_clear()


def rewarded(keys: dict) -> list[float]:
    reward = code.Code(**keys)
    texts = [f"```python\n{program}\n```" for program in ("def f(): return 1", "def f(): return 2")]
    return reward(make_group(texts, answer="assert f() == 1"))


def forbid_namespaces() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which only root may filter
    program = bubblewrap.system_call_filter()
    assert program is not None, bubblewrap.missing_filter()
    launch.filter_system_calls(program)


def state(keys: dict) -> dict:
    allowed = subprocess.run(BWRAP, capture_output=True, check=False).returncode == 0
    isolation, why = bubblewrap.available()
    known = {"user": os.geteuid(), "allowed": allowed, "isolation": isolation.value, "why": why}
    try:
        return known | {"scores": rewarded(keys), "bound": bubblewrap.memory_bound()[0]}
    except UserError as error:
        return known | {"refusal": str(error)}


def main(python: str) -> None:
    hints = {"program_in": code.ProgramIn, "score": code.Score, "isolation": code.Required}
    keys = yaml.safe_load(CODE.read_text())["code"] | {"group_timeout": 30.0}
    keys = {k: convert(hints[k], v, k) if k in hints else v for k, v in keys.items() if k not in ("_target_", "weight")}
    goal = {"port": 9, "name": "nobody", "victim": os.getppid(), "secret": __file__, "key": 1}
    become_a_user(python)
    here, isolation = state(keys), bubblewrap.available()[0]
    tried = {} if isolation is bubblewrap.Isolation.none else answers(list(ATTEMPTS), goal, isolation)
    print(json.dumps(here | {"attempts": tried}))
    forbid_namespaces()
    forget()
    print(json.dumps(state(keys)))


if __name__ == "__main__":
    main(*sys.argv[1:])
