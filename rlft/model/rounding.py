"""How far a model's log-probs move by roundings to 16 bits alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlft.model.backbone import decoder_layers


@contextmanager
def rounded_once_more(model: nn.Module) -> Iterator[None]:
    """Inside, the output of each decoder layer is off by up to half a unit in the last place, as after a rounding.

    Two programs that compute a model in 16 bits add up in other orders and round at other places. What becomes of that
    depends on the model: in bfloat16 from 0.01 to 0.1 nats of a log-prob. A model in float32 has the errors of
    bfloat16, to which such an engine rounds. The errors are the same each time; there are none in a model whose layers
    are not a single list (`decoder_layers`).
    """

    def off(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return off(module, args, output[0]), *output[1:]
        states: Tensor = output
        drawn = torch.rand(states.shape, generator=dice, dtype=torch.float32)
        dtype = torch.float16 if states.dtype == torch.float16 else torch.bfloat16
        errors = torch.finfo(dtype).eps * (drawn.to(states.device) - 0.5)
        return (states.float() * (1 + errors)).to(states.dtype)

    dice = torch.Generator().manual_seed(0)
    with ExitStack() as hooks:
        for layer in decoder_layers(model):
            hooks.callback(layer.register_forward_hook(off).remove)
        yield
