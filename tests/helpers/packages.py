"""Packages as pip leaves them, so far as Python finds entry points by them."""

from collections.abc import Mapping
from pathlib import Path


def install(site: Path, package: str, commands: Mapping[str, str]) -> None:
    """A distribution in the folder `site`; commands: its entry points of rlft.commands, {name: module:object}."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in commands.items()]
    (info / "entry_points.txt").write_text("\n".join(["[rlft.commands]", *lines, ""]))
