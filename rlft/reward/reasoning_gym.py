"""The score that reasoning-gym's own verifier gives, for prompts made by `data=reasoning_gym`.

Verifiers mostly give 0 to 1; some give a little for any answer. A few parse lists with `eval` (binary_matrix,
spiral_matrix, string_insertion in 0.1.x): then completions run as code, so use a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from rlft.reward.answer import AnswerKeys
from rlft.system.terminal import pip_install
from rlft.types import Group, Prompt, UserError, Verdict, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGym(AnswerKeys):
    """The verifier's score of each completion; 0.0 without an answer. The keys say where the answer is (AnswerKeys)."""

    needs_metadata: ClassVar[str] = "reasoning_gym"
    """The key that every prompt's metadata must hold, so that other data can be refused before the run starts."""

    def start(self) -> None:
        """Loads the library, a second or two, before any time limit runs."""
        _library()

    def __call__(self, group: Group) -> list[float]:
        task, verifier = _task(group.prompt)
        answers = (self.extract(rollout.completion.text) for rollout in group.rollouts)
        return [Verdict(score(verifier, a, task["entry"]), None if a is None else self.normal(a)) for a in answers]

    def reference_text(self, prompt: Prompt) -> str | None:
        """None where the library names no answer: there, several are right, and its verifier knows them."""
        return AnswerKeys.reference_text(self, prompt) if prompt.answer else None

    def right(self, group: Group) -> list[bool]:
        """Whether each completion scores what the library's own answer does, which some verifiers give less than 1."""
        task, verifier = _task(group.prompt)
        best = min(1.0, score(verifier, task["entry"]["answer"], task["entry"]))
        return [value >= best for value in self(group)]


def score(verifier: Any, answer: str | None, entry: Mapping[str, Any]) -> float:
    """The verifier's score; 0.0 if the verifier raises for this answer but not for the reference answer."""
    if answer is None:
        return 0.0
    try:
        return float(verifier.score_answer(answer, entry))
    except Exception:
        # Verifiers parse what the model wrote and fail in their own ways. If the reference answer fails, too, the
        # completion is not to blame, and that error is raised.
        verifier.score_answer(entry["answer"], entry)
        return 0.0


def _task(prompt: Prompt) -> tuple[Mapping[str, Any], Any]:
    """(what the data keep with the prompt for its verifier, the verifier)."""
    is_ours = ReasoningGym.needs_metadata in prompt.metadata
    problem = "the verifiers of reasoning-gym know only its own questions"
    require(is_ours, "reward", problem, got="reasoning_gym", remedy="set data=reasoning_gym")
    task = prompt.metadata[ReasoningGym.needs_metadata]
    return task, _verifier(task["task"], json.dumps(task["options"], sort_keys=True))


@lru_cache(maxsize=16)
def _verifier(task: str, options: str) -> Any:
    library = _library()
    parsed = json.loads(options)
    if task == "composite":
        parsed["datasets"] = [library.composite.DatasetSpec(**part) for part in parsed["datasets"]]
    return library.create_dataset(task, **parsed, seed=0, size=1)


def _library() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.composite
    except ImportError as error:
        problem = f"the reasoning-gym library cannot be imported ({error})"
        remedy = pip_install("rlft[reasoning-gym]")
        raise UserError("reward", problem, got="reasoning_gym", remedy=remedy) from None
    return reasoning_gym
