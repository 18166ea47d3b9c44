"""Which versions of libraries are installed, and which ranges of them a package asks for, by their metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


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
