"""Rows about the machine: driver and GPU, memory, disk, the hub, and the sandbox for programs.

Looking values up and judging them are separate functions, so that every verdict can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlft.commands.doctor.row import CheckRow, Status, judged
from rlft.commands.doctor.trial import MachineTrial
from rlft.config.model import resolve_path
from rlft.model.backbone import OLDEST_WITH_BFLOAT16
from rlft.system.disk import room, size_text
from rlft.system.hub import hub_answers
from rlft.system.memory import free_memory
from rlft.system.sandbox import trials
from rlft.system.sandbox.bubblewrap import Isolation

MIN_FREE_DISK = 2 * 10**9
"""Bytes for a few checkpoints of an adapter with its optimizer, and rollouts."""
MIN_FREE_SHARE = 0.5
"""Share of a GPU's memory. If less is free, another program uses the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """What torch and the driver report about CUDA.

    Attributes:
        build: the CUDA release that torch is built for, such as "12.8"; None for a build without CUDA.
        driver: the newest CUDA release that the driver supports, such as (12, 8); None if there is no driver.
        works: whether torch can use a GPU.
    """

    build: str | None
    driver: tuple[int, int] | None
    works: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        name: name of the GPU.
        capability: its compute capability, such as (9, 0).
        built_for: the architectures that torch is built for, such as "sm_90".
        total: bytes of its memory.
        free: bytes that are free.
    """

    name: str
    capability: tuple[int, int]
    built_for: tuple[str, ...]
    total: int
    free: int


def rows(trial: MachineTrial) -> Iterator[CheckRow]:
    """The rows of driver, GPU, memory and disk."""
    cuda = Cuda(build=torch.version.cuda, driver=driver_release(), works=torch.cuda.is_available())
    yield driver_row(cuda)
    if cuda.works:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        built_for = tuple(torch.cuda.get_arch_list())
        capability = (properties.major, properties.minor)
        gpu = Gpu(name=properties.name, capability=capability, built_for=built_for, total=total, free=free)
        yield gpu_row(gpu)
    yield CheckRow(name="memory", status=Status.ok, value=f"{size_text(free_memory())} free", numbers=_memory())
    runs = trial.settings.runs
    yield disk_row(runs, room(runs)[0], os.access(_existing_ancestor(runs), os.W_OK))


def _memory() -> dict[str, float]:
    return {"free_bytes": free_memory(), "processors": os.cpu_count() or 1}


def driver_release() -> tuple[int, int] | None:
    """The newest CUDA release that the installed driver supports; None if there is no driver."""
    with suppress(OSError):
        driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
            return number.value // 1000, number.value % 1000 // 10
    return None


def driver_row(cuda: Cuda) -> CheckRow:
    """Whether torch's CUDA build fits the driver. Within a major release, newer builds run on older drivers."""
    build, driver = cuda.build, cuda.driver
    supported = "no NVIDIA driver here" if driver is None else f"the driver takes CUDA {driver[0]}.{driver[1]}"
    value = f"torch is built {f'for CUDA {build}' if build else 'without CUDA'}; {supported}"
    if cuda.works:
        return CheckRow(name="driver", status=Status.ok, value=value)
    if driver is None:
        return CheckRow(name="driver", status=Status.skipped, value=value, remedy="use the CPU, or install a driver")
    if build is None:
        remedy = f"install a torch that is built for CUDA {driver[0]}.{driver[1]} or an older release"
        return CheckRow(name="driver", status=Status.slow, value=value, remedy=remedy)
    if int(build.partition(".")[0]) > driver[0]:
        remedy = f"update the driver, or install a torch that is built for CUDA {driver[0]}"
        return CheckRow(name="driver", status=Status.wrong, value=value, remedy=remedy)
    remedy = "look at nvidia-smi, at the rights on /dev/nvidia*, and at CUDA_VISIBLE_DEVICES"
    return CheckRow(name="driver", status=Status.wrong, value=f"{value}; torch finds no GPU", remedy=remedy)


def gpu_row(gpu: Gpu) -> CheckRow:
    """Whether torch has kernels for the GPU, and the GPU is free.

    Kernels for a compute capability also run on GPUs with the same major and a higher minor number.
    """
    major, minor = gpu.capability
    numbers = {"memory_bytes": gpu.total, "free_bytes": gpu.free, "capability": major + minor / 10}
    free_text = f"{size_text(gpu.free)} of {size_text(gpu.total)} free"
    value = f"{gpu.name}, compute capability {major}.{minor}, {free_text}"
    if gpu.capability < OLDEST_WITH_BFLOAT16:
        value += "; computes in float16 (model.dtype=auto), as it has no bfloat16"
    if not any(runs_on(name, gpu.capability) for name in gpu.built_for):
        remedy = f"install a torch that is built for sm_{major}{minor}, or use another GPU"
        return judged("card", f"{value}; torch is built for {', '.join(gpu.built_for)}", remedy, numbers, wrong=True)
    is_in_use = gpu.free < MIN_FREE_SHARE * gpu.total
    return judged(
        "card", value, "nvidia-smi names the programs that hold the rest", numbers, wrong=False, slow=is_in_use
    )


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
    """Whether the folder can be written to and its disk has room.

    Args:
        folder: the folder in which runs would be.
        free: number of free bytes; None if the file system does not report it.
        may_write: whether the folder can be written to.
    """
    place = f"{folder.absolute()}"
    if not may_write:
        remedy = "go to another folder, or choose hydra.run.dir"
        return judged("disk", f"{place} cannot be written to", remedy, {}, wrong=True)
    value = f"{'an unknown amount' if free is None else size_text(free)} free at {place}"
    is_too_little = free is not None and free < MIN_FREE_DISK
    remedy = f"free {size_text(MIN_FREE_DISK)} there, or choose hydra.run.dir on another disk"
    return judged("disk", value, remedy, {} if free is None else {"free_bytes": free}, wrong=is_too_little)


def _existing_ancestor(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def hub_rows(trial: MachineTrial) -> list[CheckRow]:
    from huggingface_hub import constants

    path = trial.settings.plain["model"]["path"]
    hub_id = None if trial.settings.makes_model or Path(resolve_path(path)).is_dir() else path
    return [hub_row(hub_answers(), constants.HF_HUB_OFFLINE, hub_id)]


def hub_row(answers: bool, switched_off: bool, model: str | None) -> CheckRow:
    """Whether the hub can be reached.

    Args:
        answers: whether it answered.
        switched_off: whether HF_HUB_OFFLINE is set, so that the hub is not used.
        model: hub id of the model that the user has named; None if the model is made here or local.
    """
    if answers:
        return CheckRow(name="hub", status=Status.ok, value="can be reached")
    requirement = f"; {model} must be in its cache here" if model else ""
    if switched_off:
        return CheckRow(name="hub", status=Status.ok, value=f"is not asked, by HF_HUB_OFFLINE{requirement}")
    value = f"cannot be reached{requirement}"
    remedy = "connect to the network, or set HF_HUB_OFFLINE=1 and use local paths, which saves waiting for it"
    return judged("hub", value, remedy, {}, wrong=model is not None, slow=True)


def sandbox_rows(trial: MachineTrial) -> list[CheckRow]:
    isolation, sentence = trials.available()
    bound = trials.memory_bound().sentence if isolation is not Isolation.none else ""
    return [sandbox_row(isolation, sentence, bound, uses_code(trial.settings.rewards))]


def uses_code(rewards: Mapping[str, Any]) -> bool:
    """Whether one of these rewards runs programs."""
    targets = [reward.get("_target_") for reward in rewards.values() if isinstance(reward, Mapping)]
    return any(str(target).startswith("rlft.reward.code.") for target in targets)


def sandbox_row(isolation: Isolation, sentence: str, bound: str, is_used: bool) -> CheckRow:
    """Whether reward=code can isolate programs.

    Args:
        isolation: what isolates programs here.
        sentence: a description of it.
        bound: how their memory is limited, in words; empty if it is not.
        is_used: whether the run has that reward.
    """
    if isolation is not Isolation.none:
        return CheckRow(name="sandbox", status=Status.ok, value=f"{sentence}; {bound}" if bound else sentence)
    remedy = "install bubblewrap (apt install bubblewrap) for reward=code"
    if is_used:
        return CheckRow(name="sandbox", status=Status.wrong, value=sentence, remedy=remedy)
    return CheckRow(
        name="sandbox", status=Status.skipped, value=f"{sentence}; only reward=code needs it", remedy=remedy
    )
