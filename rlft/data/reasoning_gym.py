"""Questions of any task of the reasoning-gym library, scored by the library's verifiers (rlft/reward/reasoning_gym.py).

Several of its generators iterate over sets or draw from the global random state, so their questions change with
Python's hash seed (measured in 0.1.x: isomorphic_strings, knight_swap, list_functions, polynomial_multiplication,
ransom_note, word_ladder). A resumed run would get different data. The questions are therefore made in a child process
with a fixed hash seed, which also keeps the library's imports out of this one.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from rlft.config.bounds import PositiveInt, Seed
from rlft.data.arithmetic import HELD_OUT_SHARE, too_few
from rlft.data.records import identity, split_of
from rlft.data.templates import check_template, prompt_of
from rlft.system.process.child import Child
from rlft.system.terminal import pip_install
from rlft.types import Prompt, Split, UserError, require

CHUNK = 2000  # questions made from one seed; some tasks, such as acre, make all at once, so they depend on it
PATIENCE = 1000  # consecutive draws without a usable question after which the task is assumed to have no more

Entry = dict[str, Any]
"""A record of the library: question, answer (a text, or None where only the verifier knows it) and metadata."""

Entries = Mapping[Split, list[tuple[int, Entry]]]
"""{split: (number of the draw, entry) in drawing order}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGym:
    """Questions of one task of reasoning-gym; `metadata["reasoning_gym"]` holds what its verifier needs.

    The task `composite` mixes several, listed in options.datasets as {name, weight, config}.
    """

    task: str
    options: Mapping[str, Any] | None
    size: PositiveInt
    held_out_size: PositiveInt
    seed: Seed
    system_prompt: str | None
    prompt_template: str

    def __post_init__(self) -> None:
        check_template(self.prompt_template, "data.prompt_template", rows=False)

    def load(self, split: Split) -> list[Prompt]:
        """The split's prompts; the first call makes both splits. Raises UserError."""
        is_installed, problem = importlib.util.find_spec("reasoning_gym"), "the reasoning-gym library is not installed"
        require(is_installed, "data", problem, got="reasoning_gym", remedy=pip_install("rlft[reasoning-gym]"))
        options = json.dumps(self.options or {}, sort_keys=True)
        entries_of_split = make(self.task, options, self.size, self.held_out_size, self.seed)
        return [
            Prompt(
                id=f"{self.task}:{number}",
                messages=prompt_of(entry["question"], self.system_prompt, self.prompt_template),
                answer=entry["answer"] if isinstance(entry["answer"], str) else "",
                metadata={"reasoning_gym": {"task": self.task, "options": dict(self.options or {}), "entry": entry}},
            )
            for number, entry in entries_of_split[split]
        ]


@lru_cache(maxsize=4)
def make(task: str, options: str, size: int, held_out_size: int, seed: int) -> Entries:
    """What `draw` returns, made in a child process. `options` is JSON."""
    arguments = (task, json.loads(options), size, held_out_size, seed)
    child = Child("rlft-reasoning-gym", f"{__name__}:serve", arguments, environment={"PYTHONHASHSEED": "0"})
    try:
        made = child.connection.recv()
    except (EOFError, OSError):
        problem = f"the process that makes the questions of {task} ended early; its error stands above"
        raise RuntimeError(problem) from None
    finally:
        child.end()
    if isinstance(made, UserError):
        raise made
    return made


def serve(connection: Connection, *arguments: Any) -> None:
    """Sends what `draw` returns for these arguments, or the UserError that it raises."""
    try:
        connection.send(draw(*arguments))
    except UserError as error:
        connection.send(error)


def draw(task: str, options: Mapping[str, Any], size: int, held_out_size: int, seed: int) -> Entries:
    """The first distinct questions of each split. UserError: there are too few of them."""
    sizes = {Split.train: size, Split.held_out: held_out_size}
    made: dict[Split, list[tuple[int, Entry]]] = {split: [] for split in Split}
    drawn_questions: set[str] = set()
    useless_draws = 0
    for number, entry in entries(task, options, seed):
        question_hash = identity([{"role": "user", "content": entry["question"]}])
        split = split_of(question_hash, HELD_OUT_SHARE)
        useless_draws += 1
        if question_hash not in drawn_questions and len(made[split]) < sizes[split]:
            drawn_questions.add(question_hash)
            made[split].append((number, entry))
            useless_draws = 0
        missing = [split for split in Split if len(made[split]) < sizes[split]]
        if not missing:
            break
        if useless_draws > PATIENCE:
            found, wanted = len(made[missing[0]]), sizes[missing[0]]
            raise too_few(found, wanted, missing[0], f"questions of {task}", "options with more variety")
    return made


def entries(task: str, options: Mapping[str, Any], seed: int) -> Iterator[tuple[int, Entry]]:
    """An endless sequence of (number of the draw, entry). Call it in a process with a fixed hash seed."""
    import numpy as np

    for start in count(step=CHUNK):
        # Tasks use seed + index, so consecutive chunks do not overlap, nor do adjacent data seeds. numpy needs < 2**32.
        chunk_seed = (seed * 1_000_003 + start) % 2**31
        questions = create(task, options, chunk_seed, CHUNK)
        for index in range(CHUNK):
            random.seed(chunk_seed + index)
            np.random.seed(chunk_seed + index)
            yield start + index, questions[index]


def create(task: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """The library's data set. Raises UserError for an unknown task and for options that the library refuses."""
    import reasoning_gym
    import reasoning_gym.composite
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        similar = difflib.get_close_matches(task, DATASETS, n=3)
        remedy = f"did you mean {', '.join(similar)}?" if similar else f"choose one of {', '.join(sorted(DATASETS))}"
        raise UserError("data.task", "is not a task of reasoning-gym", got=task, remedy=remedy)
    problem = "is not the task's to choose"
    for name in sorted({"seed", "size"} & set(options)):
        raise UserError(f"data.options.{name}", problem, got=options[name], remedy=f"set data.{name}")
    try:
        if task == "composite":
            parts = [reasoning_gym.composite.DatasetSpec(**part) for part in options.get("datasets", ())]
            options = {**options, "datasets": parts}
        return reasoning_gym.create_dataset(task, **options, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        # The library checks options by assert; a misspelt one is a TypeError of its config class.
        option_names = sorted(set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"})
        problem = f"{task} refuses them ({str(error) or type(error).__name__})"
        remedy = f"its options are {', '.join(option_names) or 'none'}"
        raise UserError("data.options", problem, got=dict(options), remedy=remedy) from error
