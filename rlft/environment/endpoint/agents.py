"""`environment=endpoint`: agents that speak to the policy through an endpoint, as functions or as programs.

A function is called once for each conversation in a worker process; a program is started once for each, with URL and
key as environment variables, and may have its own Python environment. Both report the reward at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar

from rlft.config.bounds import Port, PositiveInt
from rlft.config.instantiate import locate
from rlft.environment.protocol import Environment, Play
from rlft.reward.workers.reward_spec import accepted, awaited, named_parameters, takes_any_keyword
from rlft.types import UserError, require

SECTION = "environment"
AGENT, COMMAND = f"{SECTION}.agent", f"{SECTION}.command"
HOST = "127.0.0.1"
NEEDED = ("base_url", "api_key")  # parameters that an agent's function must have
MOST_READ = 65_536  # number of bytes at the end of a program's output that are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Environment):
    """The keys of `environment=endpoint`; either `agent`, as `module.function`, or `command` is given."""

    plays_itself: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = False

    agent: str | None
    command: Sequence[str] | None
    port: Port
    body_bytes: PositiveInt

    def check(self) -> None:
        from rlft.environment.endpoint.app import bound, check_installed  # workers start faster without it

        check_installed(SECTION)
        problem = "is missing" if self.agent is None else f"stands next to {COMMAND}"
        remedy = f"give {AGENT}=mine.play, a function, or {COMMAND}=[program,word], a program; one of both"
        require((self.agent is None) != (self.command is None), AGENT, problem, got=self.agent, remedy=remedy)
        if self.agent is not None:
            self._check_function(self.agent)
        elif not self.command:
            raise UserError(COMMAND, "is empty", got="[]", remedy="give a program and its words")
        else:
            is_there, remedy = shutil.which(self.command[0]), "name an executable of PATH, or its path"
            require(is_there, COMMAND, "there is no such program", got=self.command[0], remedy=remedy)
        if self.port:
            bound(HOST, self.port, SECTION).close()

    def _check_function(self, agent: str) -> None:
        function = locate(agent, AGENT)
        parameters = NEEDED if takes_any_keyword(function) else {p.name for p in named_parameters(function)}
        missing = [name for name in NEEDED if name not in parameters]
        remedy = "write it as play(base_url, api_key, model, **row)"
        require(not missing, AGENT, f"has no parameter {' and no '.join(missing)}", got=agent, remedy=remedy)

    def start(self) -> None:
        if self.agent is not None:
            locate(self.agent, AGENT)

    def make(self) -> Agent:
        return Agent(self)


class Agent(Play):
    """A conversation's side that leaves the whole conversation to the agent."""

    def __init__(self, environment: Endpoint) -> None:
        self.environment = environment

    def play(self, row: Mapping[str, Any], base_url: str, api_key: str, model: str) -> float | None:
        """The reward of the conversation. Raises whatever the agent raises."""
        endpoint = {"base_url": base_url, "api_key": api_key, "model": model}
        if self.environment.agent is None:
            return _run(self.environment.command or (), row, endpoint)
        function = locate(self.environment.agent, AGENT)
        return awaited(function(**accepted(function, {**row, **endpoint})))


def _run(command: Sequence[str], row: Mapping[str, Any], endpoint: Mapping[str, str]) -> float | None:
    """Runs a program with the row as JSON on standard input; its last line is the reward as JSON.

    It stays in the worker's process group, with which it ends. What is wrong with it is raised.
    """
    own = {f"OPENAI_{name.upper()}": value for name, value in endpoint.items()}  # OPENAI_BASE_URL, _API_KEY, _MODEL
    given = json.dumps(row, default=str).encode()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        ended = subprocess.run(command, input=given, stdout=stdout, stderr=stderr, env=os.environ | own, check=False)
        if ended.returncode:
            raise RuntimeError(f"{command[0]} ended with exit code {ended.returncode}: {_last_line(stderr)[:300]}")
        return _reward(_last_line(stdout))


def _reward(line: str) -> float | None:
    try:
        value = json.loads(line or "null")
    except ValueError:
        value = line
    if isinstance(value, Mapping):
        value = value.get("reward")
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return float(value)
    raise ValueError(f"the last line of its output is {line[:80]!r}, and no reward as JSON")


def _last_line(stream: IO[bytes]) -> str:
    """The last line that is not empty; "" if there is none."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - MOST_READ))
    lines = stream.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
