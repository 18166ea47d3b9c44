"""What a machine computes with, in words, how fast it multiplies and copies now, next to whatever else it does,
and which versions of libraries are installed.

The same numbers in give the same bits out only where these words agree.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import device as Device, dtype as DType

INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""{dtype: names, in Linux's list, of instructions that multiply in it, of x86 and ARM processors}."""

CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """The processor's name and architecture."""
    name = _of_cpuinfo("model name")
    return f"{name} ({platform.machine()})" if name else platform.processor() or platform.machine()


def machine(device: Device) -> dict[str, str]:
    """{what: its name} of processor, device and threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"processor": processor(), "device": name, "threads": str(torch.get_num_threads())}


def multiplies_in(dtype: str) -> bool:
    """Whether the processor has instructions for products in a dtype such as bfloat16; True where it is not known."""
    known = set(_of_cpuinfo("flags", "Features").split())
    return dtype not in INSTRUCTIONS or not known or bool(known & INSTRUCTIONS[dtype])


def _of_cpuinfo(*names: str) -> str:
    """What Linux says of the first processor under one of these names; "" on other systems."""
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


# -- rates -------------------------------------------------------------------------------------------------------------
MIN_REPEATS = 3
SIDE, NUM_BYTES, PROBED_S = 512, 2**25, 0.05
"""Sizes and seconds of the short probe: a call of either part takes some milliseconds."""


def seconds_of_calls(run: Callable[[], object], device: Device, total_s: float) -> list[float]:
    """The seconds that each call of `run` takes, repeated for `total_s` seconds; the first call is not counted."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < total_s or len(seconds) < MIN_REPEATS:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def peak_rate(device: Device, dtype: DType, *, side: int = 4096, seconds: float = 2.0) -> float:
    """FLOP/s of a large square product: the fastest of those made within `seconds` seconds."""
    a = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(seconds_of_calls(lambda: a @ a, device, seconds))


def host_rates(dtype: DType) -> tuple[float, float]:
    """(FLOP/s of a square product, bytes per second of a copy) of this machine's CPU: medians of a tenth of a second.

    The product has few enough numbers that a slow processor is done as well; no random number of the process is drawn.
    """
    cpu = torch.device("cpu")
    a = torch.ones(SIDE, SIDE, dtype=dtype)
    source = torch.ones(NUM_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = statistics.median(seconds_of_calls(lambda: a @ a, cpu, PROBED_S))
    copy = statistics.median(seconds_of_calls(lambda: target.copy_(source), cpu, PROBED_S))
    return 2 * SIDE**3 / product, 2 * NUM_BYTES / copy


# -- versions of libraries ---------------------------------------------------------------------------------------------
def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(name: str, extras: Iterable[str] = ("",)) -> list[Requirement]:
    """The requirements of an installed package on this system, with those of its extras; "" is the package itself."""
    requirements = [Requirement(text) for text in metadata.requires(name) or ()]
    return [one for one in requirements if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def misfits(package: str, libraries: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(library, installed version, range that the installed package asks for) of each that is not in its range."""
    for requirement in requirements_of(package):
        version = installed_version(requirement.name) if requirement.name in libraries else None
        if version is not None and not is_within(version, requirement.specifier):
            yield requirement.name, version, in_order(requirement.specifier)


def in_order(versions: SpecifierSet) -> str:
    """A range with its lower end first, without local parts such as +cpu, which public indexes do not hold.

    >>> in_order(SpecifierSet("<2.15,>=2.11")), in_order(SpecifierSet("==2.13.0+cpu"))
    ('>=2.11,<2.15', '==2.13.0')
    """
    texts = (str(one).partition("+")[0] for one in versions)
    return ",".join(sorted(texts, key=lambda text: (not text.startswith(("=", ">", "~")), text)))


def is_within(version: str, versions: SpecifierSet) -> bool:
    """Whether a version is in a range. Local parts such as +cpu are ignored, in the version and in the range.

    >>> is_within("2.13.0+cpu", SpecifierSet("==2.13.0")), is_within("2.13.0", SpecifierSet("==2.13.0+cpu"))
    (True, True)
    >>> is_within("2.15.0", SpecifierSet(">=2.11,<2.15"))
    False
    """
    try:
        public = Version(version).public
    except InvalidVersion:
        return False
    return SpecifierSet(in_order(versions)).contains(public, prereleases=True)
