"""YAML parsed once in a process: Hydra reads 25 files for a config, and mostly the same ones for the next config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

_parse = OmegaConf.load
_parsed: dict[str, Any] = {}


def load(file: str | Path | IO[Any]) -> Any:
    """As `OmegaConf.load`: of an open text file a copy of what the same text gave before."""
    if isinstance(file, str | Path):
        return _parse(file)
    text = file.read()
    file.seek(0)
    if text not in _parsed:
        _parsed[text] = _parse(file)
    return copy.deepcopy(_parsed[text])
