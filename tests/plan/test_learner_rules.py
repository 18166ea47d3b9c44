"""Rules for what learns that depend on the machine; those of the config alone are in test_refusals.py."""

from __future__ import annotations

import pytest
import torch
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.vllm.engine import VLLM
from rlft.types import UserError


@pytest.mark.parametrize("words", ["train +recipe=grpo_arithmetic", slow("sft +recipe=sft_arithmetic")])
def test_all_weights_are_not_trained_in_the_16_bits_that_auto_is_on_a_gpu(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, recipe = words.split()
    resolved = resolve(compose([recipe, "lora=null", "eval.every=0"], command=command))
    resolved.plan(runs_here=False)
    monkeypatch.setattr("rlft.system.device.resolve_dtype", lambda *_: torch.bfloat16)
    with pytest.raises(UserError, match="small updates are lost in the rounding of bfloat16 weights") as refused:
        resolved.plan(runs_here=False)
    assert refused.value.key == "model.dtype"


@pytest.mark.parametrize("words", ["train +recipe=grpo_arithmetic", slow("sft +recipe=sft_arithmetic")])
def test_an_engine_that_takes_adapters_alone_does_not_serve_all_weights(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, recipe = words.split()
    config = compose([recipe, "lora=null", "eval.every=0", "generation=vllm"], command=command)
    resolve(config).plan(runs_here=False)
    monkeypatch.setattr(VLLM, "serves_whole_models", False)
    with pytest.raises(UserError, match="is given adapters only, and lora=null has none, got vllm; use tr") as refused:
        resolve(config).plan(runs_here=False)
    assert refused.value.key == "generation.engine"
