"""Packages as pip leaves them, so far as Python finds entry points by them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(site: Path, package: str, verbs: Mapping[str, str]) -> None:
    """A distribution in the folder `site`; verbs: its entry points of the group rlft.verbs, {name: module:object}."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in verbs.items()]
    (info / "entry_points.txt").write_text("\n".join(["[rlft.verbs]", *lines, ""]))
