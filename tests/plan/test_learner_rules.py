"""Rules for what learns that depend on the machine; those of the config alone are in test_refusals.py."""

from __future__ import annotations

import pytest
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.vllm.engine import VLLM
from rlft.types import UserError


@pytest.mark.parametrize("words", ["train +recipe=grpo_arithmetic", slow("sft +recipe=sft_arithmetic")])
def test_all_weights_are_float32_where_auto_would_be_16_bits_on_a_gpu(words: str) -> None:
    command, recipe = words.split()
    for device in ("cpu", "cuda"):
        keys = [recipe, "eval.every=0", f"model.device={device}"]
        of_adapter, of_all = (
            resolve(compose([*keys, *more], command=command)).config.model.dtype for more in ([], ["lora=null"])
        )
        assert (of_adapter, of_all) == ("auto", "float32")
        with pytest.raises(UserError, match="small updates are lost in the rounding of bfloat16 weights") as refused:
            resolve(compose([*keys, "lora=null", "model.dtype=bfloat16"], command=command))
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
