"""Around a step of real runs: when the policy is copied into its snapshots, and prompts chosen by pass rates.

The schedule of snapshots is that of iterative GRPO (MATHS 8). The loop has no outer iterations: it copies when the
roles are built, and again after each step that ends one. So in a list of what happens they stand where the algorithm
has them, and after the last step of a run stand those that open the next one, for a run that goes on from there.
"""

import json
import shutil

import pytest
import torch
from run_folders import check_same, metrics
from safetensors.torch import load_file
from slow_cases import slow

from rlft import cli
from rlft.algorithm.grpo import GRPO
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.loop.parts import Engines
from rlft.loop.session import Session, open_session
from rlft.model.roles import OLD, POLICY, REFERENCE, SAMPLER, Roles
from rlft.train import train
from rlft.trainer.optimizer import Optimizer

SAMPLE = f"{SAMPLER} <- {POLICY}"
SETTINGS = [
    "+recipe=iterative_grpo_arithmetic", "console=null", "eval.every=0", "scoring.workers=0", "prompts_per_step=2",
    "group_size=4", "generation=transformers", "generation.max_tokens=16", "model.device=cpu", "model.dtype=float32",
    "lora.rank=2", "trainer.lr=0.01", "snapshot.reference=copy", "snapshot.refresh_every=3", "snapshot.old=copy",
    "steps=6", "algorithm.entropy_coef=0.1",  # so that every update moves the policy, whatever the rewards are
]  # fmt: skip

# Two outer iterations of three steps with two updates each, as the algorithm is printed.
INNER_STEP = ["old <- policy", "sample", "score", "credit", "update policy", "update policy"]
MATHS_8 = 2 * ["reference <- policy", *INNER_STEP, *INNER_STEP, *INNER_STEP]
NEXT_ITERATION = ["reference <- policy", "old <- policy"]


class Recorder:
    """Notes every copy between roles and every stage, in order, and whose weights each role held when it sampled.

    held: for each `sample`, by role, the number of updates after which the policy had the weights that the role has.
    """

    def __init__(self, monkeypatch):
        self.events = []
        self.held = []
        self.versions = []
        self.roles = None
        self._watch(monkeypatch, Roles, "copy", lambda roles, source, target: f"{target} <- {source}")
        self._watch(monkeypatch, Roles, "load_sampler", lambda roles, adapter, **how: SAMPLE)
        self._watch(monkeypatch, Session, "sample", self._sampling)
        self._watch(monkeypatch, Session, "score", lambda session, groups: "score")
        self._watch(monkeypatch, GRPO, "credit", lambda algorithm, batch: "credit")
        self._watch(monkeypatch, Optimizer, "update", lambda optimizer, lr: f"update {optimizer.role}", self._updated)

    def _watch(self, monkeypatch, owner, name, event, after=lambda: None):
        method = getattr(owner, name)

        def watched(*args, **kwargs):
            self.events.append(event(*args, **kwargs))
            result = method(*args, **kwargs)
            after()
            return result

        monkeypatch.setattr(owner, name, watched)

    def begin(self, roles):
        """Versions that an earlier run has seen keep their numbers."""
        self.roles = roles
        self._updated()

    def _updated(self):
        if not self._numbers(POLICY):
            self.versions.append(self.roles.weights(POLICY))

    def _sampling(self, session, step):
        self.held.append({})
        for role in (*session.roles.moving, SAMPLER):
            (self.held[-1][role],) = self._numbers(role)
        return "sample"

    def _numbers(self, role):
        weights = self.roles.weights(role)
        same = [all(torch.equal(w, version[name]) for name, w in weights.items()) for version in self.versions]
        return [number for number, equal in enumerate(same) if equal]


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Runs the recipe with these overrides; returns what was recorded."""

    def run(*overrides):
        recorder, plan = Recorder(monkeypatch), resolve(compose([*SETTINGS, *overrides])).plan()
        (tmp_path / "config.yaml").touch()
        with Engines() as engines, open_session(plan, tmp_path, engines, lambda text: None) as session:
            recorder.begin(session.roles)
            train(session)
        return recorder

    return run


@pytest.mark.parametrize("updates", [slow("epochs=2"), "minibatches=2"])
def test_a_run_copies_samples_and_updates_in_the_order_of_the_algorithm(updates, recorded):
    recorder = recorded(updates)
    engine, algorithm = [], []
    for event in recorder.events:
        (engine if event == SAMPLE else algorithm).append(event)
    assert algorithm == MATHS_8 + NEXT_ITERATION
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
        (("snapshot.refresh_every=0", "snapshot.old=auto", "steps=1"), ["reference <- policy"]),
        slow(("snapshot.reference=base", "snapshot.refresh_every=0", "snapshot.old=auto", "steps=2"), []),
        slow(("snapshot.refresh_every=1", "steps=2"), ["reference <- policy", "old <- policy"] * 3),
    ],
)
def test_nothing_is_copied_that_the_config_does_not_ask_for(overrides, expected, recorded):
    events = recorded(*overrides).events
    assert [event for event in events if event.endswith("<- policy") and event != SAMPLE] == expected


# -- prompts by pass rates ---------------------------------------------------------------------------------------------
WORDS = (
    "steps=4", "prompts_per_step=3", "group_size=4", "generation=transformers", "generation.max_tokens=24",
    "lora.rank=2", "trainer.lr=3e-3", "model.device=cpu", "data.size=12", "eval.every=0", "scoring.workers=0",
    "console=null", "name=x", "checkpoint.every=1", "checkpoint.keep=9", "token_values=null",
    "curriculum.running=true", "curriculum.replay=0.4", "curriculum.memory=0.5", "curriculum.below=1",
)  # fmt: skip
AHEAD = ("overlap.lag=1", "algorithm.mismatch=token_truncate", "dynamic_sampling.max_rounds=1")


def run(folder, *words, code=0):
    given = {word.partition("=")[0] for word in words}
    kept = (word for word in WORDS if word.partition("=")[0] not in given)
    assert cli.run(["train", *kept, *words, f"hydra.run.dir={folder}"]) == code
    return folder


def rows_of(folder, step):
    """{prompt id: the first rewards of its completions} of a step."""
    found = {}
    for line in (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["prompt_id"], []).append(row["rewards"]["exact_match"])
    return found


def test_the_runs_own_groups_are_counted_and_a_resumed_run_is_the_same_run(tmp_path):
    folder = run(tmp_path / "run", "curriculum.memory=1.0")
    counted = {}
    for step in range(1, 5):
        for name, rewards in rows_of(folder, step).items():
            counted.setdefault(name, []).extend(rewards)
    saved = load_file(folder / "checkpoints" / "step_000004" / "curriculum.safetensors")
    expected = sorted((sum(rewards), len(rewards) - sum(rewards)) for rewards in counted.values())
    assert sorted(zip(saved["right"].tolist(), saved["wrong"].tolist(), strict=True)) == expected
    last = metrics(folder)[-1]
    assert last["curriculum/known_fraction"] == len(counted) / 12
    assert last["curriculum/left_out_fraction"] == sum(right > 0 == wrong for right, wrong in expected) / 12
    check_resumed(folder, tmp_path / "resumed")


def check_resumed(straight, folder):
    shutil.copytree(straight, folder)
    for later in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{later:06d}")
    assert cli.run(["resume", str(folder)]) == 0
    check_same(folder, straight)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [(), AHEAD], ids=["in time", "a step ahead, with dynamic sampling"])
def test_a_resumed_run_and_a_longer_one_are_the_same_run(ahead, tmp_path):
    straight = run(tmp_path / "straight", *ahead)
    assert all(len(rows_of(straight, step)) == 3 for step in range(1, 5))
    plain = run(tmp_path / "plain", *ahead, "curriculum.running=false", "curriculum.replay=0", "curriculum.below=null")
    assert [set(rows_of(plain, step)) for step in range(1, 5)] != [set(rows_of(straight, s)) for s in range(1, 5)]
    assert not any(name.startswith("curriculum/") for name in metrics(plain)[-1])
    check_resumed(straight, tmp_path / "resumed")
    longer = run(tmp_path / "longer", *ahead, "steps=2")
    assert cli.run(["resume", str(longer), "steps=4"]) == 0
    shutil.rmtree(longer / "checkpoints" / "step_000002")
    shutil.copytree(straight / "checkpoints" / "step_000002", longer / "checkpoints" / "step_000002")
    check_same(longer, straight)


def test_pass_rates_of_a_file_stay_as_they_are(tmp_path, capsys):
    words = ("generation=transformers", "generation.max_tokens=24", "model.device=cpu", "data.size=12", "dedupe=false")
    sampled = tmp_path / "sampled"
    assert cli.run(["sample", *words, "n=4", "scoring.workers=0", f"hydra.run.dir={sampled}"]) == 0
    rates = {}
    for line in (sampled / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        rates[row["prompt_id"]] = rates.get(row["prompt_id"], 0.0) + row["rewards"]["exact_match"] / 4
    between = {name for name, rate in rates.items() if 0 < rate < 1}
    assert 3 <= len(between) < 12
    fixed = ("curriculum.running=false", f"curriculum.path={sampled / 'samples.jsonl'}", "curriculum.above=0")
    folder = run(tmp_path / "run", *fixed)
    assert all(set(rows_of(folder, step)) <= between for step in range(1, 5))
    assert {line["curriculum/left_out_fraction"] for line in metrics(folder)} == {1 - len(between) / 12}
    run(tmp_path / "other", *fixed, f"prompts_per_step={len(between) + 1}", code=2)
    assert f"the curriculum leaves {len(between)} of 12 train prompts" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    lines = (sampled / "samples.jsonl").read_text().replace('"exact_match": 1.0', '"exact_match": 0.0', 1)
    (sampled / "samples.jsonl").write_text(lines)
    capsys.readouterr()
    assert cli.run(["resume", str(folder)]) == 2
    assert "curriculum.path: the file of pass rates changed since the run began" in capsys.readouterr().err
