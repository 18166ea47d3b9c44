"""When a run copies the policy into its snapshots, seen in real runs: the schedule of iterative GRPO (MATHS 8).

    for each outer iteration: reference <- policy
        for each inner step: old <- policy, sample, score, credit, then update the policy several times

The loop has no outer iterations: it copies when the roles are built, and again after each step that ends one.
So in a list of what happens they stand where the algorithm has them, and after the last step of a run stand those that
open the next one, for a run that goes on from there.
"""

from __future__ import annotations

import pytest
import torch
from slow_cases import slow

from rlft.algorithm.grpo import GRPO
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.loop.parts import Engines
from rlft.loop.session import Session, open_session
from rlft.model.roles import OLD, POLICY, REFERENCE, SAMPLER, Roles
from rlft.train import train
from rlft.trainer.optimizer import Optimizer

SAMPLE, UPDATE = f"{SAMPLER} <- {POLICY}", f"update {POLICY}"
SETTINGS = [
    "+recipe=iterative_grpo_arithmetic", "console=null", "eval.every=0", "scoring.workers=0", "prompts_per_step=2",
    "group_size=4", "generation=transformers", "generation.max_tokens=16", "model.device=cpu", "model.dtype=float32",
    "lora.rank=2", "trainer.lr=0.01", "snapshot.reference=copy", "snapshot.refresh_every=3", "snapshot.old=copy",
    "steps=6", "algorithm.entropy_coef=0.1",  # so that every update moves the policy, whatever the rewards are
]  # fmt: skip

# Two outer iterations of three steps with two updates each, as the algorithm is printed.
MATHS_8 = """
reference <- policy
    old <- policy, sample, score, credit, update policy, update policy
    old <- policy, sample, score, credit, update policy, update policy
    old <- policy, sample, score, credit, update policy, update policy
reference <- policy
    old <- policy, sample, score, credit, update policy, update policy
    old <- policy, sample, score, credit, update policy, update policy
    old <- policy, sample, score, credit, update policy, update policy
"""
NEXT_ITERATION = ["reference <- policy", "old <- policy"]


def schedule(text: str) -> list[str]:
    return [event.strip() for line in text.strip().splitlines() for event in line.split(",")]


class Recorder:
    """Notes every copy between roles and every stage, in order, and whose weights each role held when it sampled.

    held: for each `sample`, by role, the number of updates after which the policy had the weights that the role has.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.held: list[dict[str, int]] = []
        self.versions: list[dict[str, torch.Tensor]] = []
        self.roles: Roles | None = None
        self._watch(monkeypatch, Roles, "copy", lambda roles, source, target: f"{target} <- {source}")
        self._watch(monkeypatch, Roles, "load_sampler", lambda roles, adapter, **how: SAMPLE)
        self._watch(monkeypatch, Session, "sample", self._sampling)
        self._watch(monkeypatch, Session, "score", lambda session, groups: "score")
        self._watch(monkeypatch, GRPO, "credit", lambda algorithm, batch: "credit")
        self._watch(monkeypatch, Optimizer, "update", lambda optimizer, lr: f"update {optimizer.role}", self._updated)

    def _watch(self, monkeypatch, owner, name, event, after=lambda: None) -> None:
        method = getattr(owner, name)

        def watched(*args, **kwargs):
            self.events.append(event(*args, **kwargs))
            result = method(*args, **kwargs)
            after()
            return result

        monkeypatch.setattr(owner, name, watched)

    def begin(self, roles: Roles) -> None:
        """Versions that an earlier run has seen keep their numbers."""
        self.roles = roles
        self._updated()

    def _updated(self) -> None:
        assert self.roles is not None
        if not self._numbers(POLICY):
            self.versions.append(self.roles.weights(POLICY))

    def _sampling(self, session: Session, step: int) -> str:
        self.held.append({})
        for role in (*session.roles.moving, SAMPLER):
            (self.held[-1][role],) = self._numbers(role)
        return "sample"

    def _numbers(self, role: str) -> list[int]:
        assert self.roles is not None
        weights = self.roles.weights(role)
        same = [all(torch.equal(w, version[name]) for name, w in weights.items()) for version in self.versions]
        return [number for number, equal in enumerate(same) if equal]


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture
def run(recorder, tmp_path):
    """Runs the recipe with these overrides; returns the policy's and the snapshots' last weights."""

    def go(*overrides: str) -> dict[str, dict[str, torch.Tensor]]:
        plan = resolve(compose([*SETTINGS, *overrides])).plan()
        (tmp_path / "config.yaml").touch()
        with Engines() as engines, open_session(plan, tmp_path, engines, lambda text: None) as session:
            recorder.begin(session.roles)
            train(session)
            return {role: session.roles.weights(role) for role in session.roles.moving}

    return go


@pytest.mark.parametrize("updates", [slow("epochs=2"), "minibatches=2"])
def test_a_run_copies_samples_and_updates_in_the_order_of_the_algorithm(updates, run, recorder):
    run(updates)
    print("\n".join(recorder.events))
    engine, algorithm = [], []
    for event in recorder.events:
        (engine if event == SAMPLE else algorithm).append(event)
    assert algorithm == schedule(MATHS_8) + NEXT_ITERATION
    # The engine's copy, which the algorithm takes for granted, is made at the start and after each step.
    assert len(engine) == 1 + 6
    # Before step s the policy has had 2 s updates, and its outer iteration began at 3 floor(s / 3) steps.
    expected = [{REFERENCE: 6 * (s // 3), OLD: 2 * s, SAMPLER: 2 * s, POLICY: 2 * s} for s in range(6)]
    assert recorder.held == expected
    # Each update made another policy, so that these numbers mean something.
    assert len(recorder.versions) == 1 + 2 * 6


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # The reference stays the policy of the start: one copy, at the start.
        (("snapshot.refresh_every=0", "snapshot.old=auto"), ["reference <- policy"]),
        slow(("snapshot.reference=base", "snapshot.refresh_every=0", "snapshot.old=auto"), []),
        slow(("snapshot.refresh_every=1",), ["reference <- policy", "old <- policy"] * 3),
    ],
)
def test_nothing_is_copied_that_the_config_does_not_ask_for(overrides, expected, run, recorder):
    run(*overrides, "steps=2")
    assert [event for event in recorder.events if event.endswith("<- policy") and event != SAMPLE] == expected
