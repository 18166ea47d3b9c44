"""Embedded models, whose files no test changes, are checked, digested and measured once, and not by each plan."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from done_once import once

from rlft.config.model import LoraSettings, ModelConfig
from rlft.plan import fit, prediction, sizes


def of_embedded(settings: ModelConfig) -> Any:
    return repr(settings) if settings.path.startswith("embedded:") else None


def of_sizes(settings: ModelConfig, lora: LoraSettings | None) -> Any:
    if settings.quantization is not None or (lora is not None and lora.path is not None):
        return None
    base = of_embedded(settings)
    return base and (base, repr(lora), torch.cuda.is_available())  # which tests change


READ = {name: once(getattr(sizes, name), of_embedded) for name in ("check_weights", "fingerprints")}
MEASURED = once(sizes.sizes_of, of_sizes)


@pytest.fixture(scope="module", autouse=True)
def base_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, function in READ.items():
            patch.setattr(sizes, name, function)
        for user in (sizes, fit, prediction):
            patch.setattr(user, "sizes_of", MEASURED)
        yield
