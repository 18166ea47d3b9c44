"""What holds for each family of causal language models (`model_type` in config.json), as tiny random models have shown.

tests/helpers/write_families.py writes families.json with the newest transformers that is tested, and
tests/model/test_families.py tries every family again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models."""

    untried: str | None = None  # why it was not tried
    refused: str | None = None  # what a rule refuses such a model for
    wrong: str | None = None  # what was seen to be wrong with it in training
    decoding: str | None = None  # what was seen to be wrong with its decoding in the transformers engine
    # Why no choice of its experts can be imposed (`snapshot.routing`); None if it can, or it has none.
    routing: str | None = None
    adapted: str = ""  # the layers that `lora.target_modules: all-linear` adapts
    not_adapted: str = ""  # the layers that it leaves out
    padded: str | None = None  # why its rows are padded; None if they are packed
    exported: bool = False  # whether the model with the merged adapter computes what the adapter does
    vllm: bool | None = None  # whether vLLM serves adapters on it; None if it has no such model

    @property
    def is_trained(self) -> bool:
        return not (self.untried or self.refused or self.wrong)


class Families(NamedTuple):
    """{type of model: its family}, and the releases with which they were tried."""

    by_type: Mapping[str, Family]
    transformers: str
    vllm: str


@cache
def known() -> Families:
    """The content of families.json."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    by_type = {kind: Family(**fields) for kind, fields in read["families"].items()}
    return Families(by_type, read["transformers"], read["vllm"])


def recorded_family(*types: str) -> Family:
    """The family of the first of these types that was tried; an empty one if transformers is another minor release."""
    families = known()
    if families.transformers.split(".")[:2] == metadata.version("transformers").split(".")[:2]:
        for kind in types:
            if kind in families.by_type:
                return families.by_type[kind]
    return Family()
