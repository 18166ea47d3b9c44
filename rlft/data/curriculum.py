"""Chooses the prompts of each step by how often they have been solved, instead of each prompt once an epoch.

The pass rates come from a file of `rlft sample`, or are counted from the run's own groups, or both: the file's counts
are then where the run's begin. With r right and w wrong completions of a prompt, its pass rate p has the posterior
Beta(r + 1, w + 1), and its weight is the mean of p (1 - p) there,

    (r + 1) (w + 1) / ((r + w + 2) (r + w + 3)),

which is the variance of a binary reward, and so about the size of a group's advantages (arXiv 2502.12272). Unlike the
paper's estimate, it is never 0, and a prompt without any completion has 1/6.

A step's prompts are a function of (seed, step) and of the counts, which a checkpoint holds. Weights are computed with
the four operations of arithmetic alone, so that all machines choose the same prompts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlft.data.files import parsed
from rlft.data.records import identity, is_sampled
from rlft.system.seeds import derive
from rlft.types import Prompt, UserError, require

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlft.config.schema import CurriculumConfig

PATH = "curriculum.path"
DRAWS = 64  # between two sums of the weights that are left


class Curriculum:
    """The numbers of right and of wrong completions of each training prompt, float64 `[N]`, and what is chosen by them.

    Where the run's own groups are counted, `memory` of the numbers stays from one step to the next.
    """

    def __init__(
        self, settings: CurriculumConfig, right: NDArray[np.float64], wrong: NDArray[np.float64], seed: int
    ) -> None:
        self.settings, self.seed = settings, seed
        self.right, self.wrong = right.copy(), wrong.copy()
        self._chosen: dict[int, list[int]] = {}

    @classmethod
    def of(cls, settings: CurriculumConfig | None, known: PassRates | None, num_prompts: int, seed: int) -> Self | None:
        """The curriculum at the start of a run, from what its file says of each prompt; None if it is off."""
        if settings is None or not settings.is_on:
            return None
        none = np.zeros(num_prompts)
        return cls(settings, *((none, none) if known is None else (known.right, known.wrong)), seed)

    def of_step(self, step: int, number: int) -> list[int]:
        """Indices of the `number` distinct prompts of the step that follows `step` finished steps.

        The first call for a step decides, and later ones repeat it: a step may be sampled ahead, by older counts.
        Prompts that are left out fill the step only where there are too few others.
        """
        chosen = self._chosen.get(step)
        if chosen is None:
            if self.settings.running:
                self.right *= self.settings.memory
                self.wrong *= self.settings.memory
            solved = self._drawn(self._weights() * (self.right > 0), step, "replay")
            replayed = list(islice(solved, int(number * self.settings.replay)))
            others = (index for index in self.order(step, "curriculum") if index not in replayed)
            chosen = [*replayed, *islice(others, number - len(replayed))]
            self._chosen = {s: indices for s, indices in self._chosen.items() if s == step - 1} | {step: chosen}
        return chosen

    def order(self, step: int, purpose: str) -> Iterator[int]:
        """All prompts, each once: first those not left out, as their weights draw them, then the others."""
        last = self._drawn(self.left_out().astype(np.float64), step, f"{purpose}, left out")
        return chain(self._drawn(self._weights(), step, purpose), last)

    def _drawn(self, weights: NDArray[np.float64], step: int, purpose: str) -> Iterator[int]:
        return drawn(weights, derive(self.seed, step, purpose))

    def _weights(self) -> NDArray[np.float64]:
        """The weight of each prompt; 0 for those that are left out."""
        right, wrong = self.right + 1, self.wrong + 1
        weights = np.ones_like(right)
        if self.settings.weight == "variance":
            weights = right * wrong / ((right + wrong) * (right + wrong + 1))
        return weights * ~self.left_out()

    def left_out(self) -> NDArray[np.bool_]:
        """Whether each prompt's pass rate is out of bounds; never where it rests on less than one completion."""
        number = self.right + self.wrong
        out, known = np.zeros(len(number), dtype=bool), number >= 1
        if self.settings.above is not None:
            out |= known & (self.right <= self.settings.above * number)
        if self.settings.below is not None:
            out |= known & (self.right >= self.settings.below * number)
        return out

    def count(self, indices: Sequence[int], right: Sequence[int], size: int) -> None:
        """Counts groups of `size` completions of these prompts, of which that many are right."""
        if self.settings.running:
            np.add.at(self.right, indices, right)
            np.add.at(self.wrong, indices, size - np.asarray(right))

    def metrics(self) -> dict[str, float]:
        """The shares of prompts whose pass rate is known, and of those that are left out."""
        known = float((self.right + self.wrong >= 1).mean())
        return {"curriculum/known_fraction": known, "curriculum/left_out_fraction": float(self.left_out().mean())}

    # -- in a checkpoint -----------------------------------------------------------------------------------------------
    def state(self, step: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """(arrays, plain values) of what changes, after `step` finished steps.

        Arrays: prompts int64 `[n]`, right and wrong float64 `[n]`, of those that have been counted.
        """
        prompts = np.flatnonzero(self.right + self.wrong)
        chosen = [[later, indices] for later, indices in self._chosen.items() if later >= step]
        arrays = {"prompts": prompts, "right": self.right[prompts], "wrong": self.wrong[prompts]}
        return arrays, {"seed": self.seed, "chosen": chosen}

    def restore(self, arrays: Mapping[str, NDArray[Any]], values: Mapping[str, Any], number: int) -> None:
        """Continues with these counts, and with the steps chosen already, unless a fork chooses others."""
        self.right[:], self.wrong[:] = 0, 0
        self.right[arrays["prompts"]], self.wrong[arrays["prompts"]] = arrays["right"], arrays["wrong"]
        same = values["seed"] == self.seed
        self._chosen = {step: indices for step, indices in values["chosen"] if same and len(indices) == number}


def drawn(weights: NDArray[np.float64], seed: int) -> Iterator[int]:
    """Indices of positive weights, each once: each next one is drawn from those that are left, by weight.

    Several draws are made from one sum of the weights; those of an index that has gone are skipped, which leaves the
    distribution of the others as it is.
    """
    random, left = np.random.RandomState(np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)), weights.copy()
    while (total := (ends := np.cumsum(left))[-1]) > 0:
        for index in np.searchsorted(ends, random.random_sample(DRAWS) * total, side="right").tolist():
            if index < len(left) and left[index]:  # the product may round up to the total
                left[index] = 0
                yield index


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """The numbers of completions of a run's training prompts, float64 `[N]`, in a file of `rlft sample`."""

    right: NDArray[np.float64]
    wrong: NDArray[np.float64]
    fingerprint: str  # sha256 (hex) over the ids of those prompts that the file has, with both numbers


def read_pass_rates(path: str, reward: str, correct_at: float, prompts: Sequence[Prompt]) -> PassRates:
    """The counts of these prompts in a file of `rlft sample`, whose completion is right by that reward.

    UserError: a row is none of its lines or lacks the reward; prompts have unequal numbers of completions, because some
    were not kept; the prompts are of other data.
    """
    questions: dict[str, str | None] = {}  # None where an environment may have added to it
    of_right, of_all = Counter[str](), Counter[str]()
    for place, fields in parsed(path, PATH, None, lambda fields, _: [fields]):
        scores = fields.get("rewards")
        if not is_sampled(fields) or not isinstance(scores, Mapping) or reward not in scores:
            problem = f"{place} is no line of rlft sample with the reward {reward}"
            remedy = f"sample with reward=[{reward}] dedupe=false, and name the samples.jsonl of that run"
            raise UserError(PATH, problem, got=path, remedy=remedy)
        prompt_id = str(fields.get("prompt_id"))
        questions.setdefault(prompt_id, None if "mask" in fields else identity(fields["prompt"]))
        of_right[prompt_id] += scores[reward] is not None and scores[reward] >= correct_at
        of_all[prompt_id] += 1
    numbers = {*of_all.values()}
    if len(numbers) > 1:
        problem = f"has {min(numbers)} to {max(numbers)} completions of a prompt: some of those sampled are missing"
        raise UserError(PATH, problem, got=path, remedy="sample with dedupe=false keep=all")
    right, wrong, digest = np.zeros(len(prompts)), np.zeros(len(prompts)), hashlib.sha256()
    for index, prompt in enumerate(prompts):
        if prompt.id not in questions:
            continue
        problem = f"prompt {prompt.id} has another text in the training data"
        same = questions[prompt.id] in (None, identity(prompt.messages))
        require(same, PATH, problem, got=path, remedy="sample the data of this run")
        right[index], wrong[index] = of_right[prompt.id], of_all[prompt.id] - of_right[prompt.id]
        digest.update(f"{prompt.id}/{of_right[prompt.id]}/{of_all[prompt.id]}\n".encode())
    remedy = "sample the train split of this run's data"
    require((right + wrong).any(), PATH, "has none of the training prompts", got=path, remedy=remedy)
    return PassRates(right=right, wrong=wrong, fingerprint=digest.hexdigest())
