"""All weights of vLLM's model: loads them in place, and reads back what its kernels multiply with.

On a CPU vLLM packs matrices in a form of its own. Those are read by multiplying the identity with them, which loses
nothing but the sign of zeros. This relies on the source of vLLM 0.32 and 0.33: `reload_weights` and `cpu_linear`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlft.generation.loaded_adapter import Fingerprint, LoadedAdapter, fingerprints
from rlft.generation.sending import Assembly, Part
from rlft.generation.shared_base import Rows, Shape, places_in
from rlft.generation.vllm.slots import known_layout


def load_some(llm: Any, weights: Mapping[str, Tensor]) -> None:
    """Makes these weights of the engine (vLLM's `LLM`), one layer after the other, where its old ones lie.

    weights: {name in a checkpoint: tensor}. All tensors of a layer are loaded together; the others stay.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def load_whole(llm: Any, weights: Mapping[str, Tensor]) -> None:
    """As `load_some`, for the last or the only weights of a version; those of before that are in no call stay."""
    load_some(llm, weights)
    for model in llm.apply_model(lambda model: model):
        for module in _packed_beside(model).values():
            module.quant_method.process_weights_after_loading(module)  # vLLM leaves a tied head packed as it was


class Arriving:
    """All weights on their way to vLLM, in parts; what has arrived and is not loaded yet is at most one layer.

    Attributes:
        shapes: {name: shape} of what has arrived.
        rest: what has arrived and is not loaded.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self.rest: dict[str, Tensor] = {}
        self._assembly = Assembly()

    def layers(self, parts: Iterable[Part]) -> Iterator[dict[str, Tensor]]:
        """What these parts complete: it is whole once a tensor of the next layer comes, which is the `rest` then."""
        for name, tensor in self._assembly.whole(parts):
            self.shapes[name] = tuple(tensor.shape)
            if self.rest and layer_of(name) != layer_of(next(iter(self.rest))):
                loaded, self.rest = self.rest, {}
                yield loaded
            self.rest[name] = tensor


def layer_of(name: str) -> str:
    """What a tensor is loaded with: its name up to the layer's number, or else its module.

    >>> layer_of("model.layers.1.mlp.up_proj.weight"), layer_of("model.norm.weight")
    ('model.layers.1', 'model.norm')
    """
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0]


@known_layout()
@torch.no_grad()
def read_whole(model: nn.Module, shapes: Mapping[str, Shape], faults: tuple[str, ...] = ()) -> LoadedAdapter:
    """What vLLM's model holds of weights with these names and shapes.

    Tensors that it lays out in another way, or in another dtype than most, are unread. UnknownLayoutError if this vLLM
    packs matrices in another way.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    dtype = next(parameter.dtype for parameter in parameters.values() if parameter.is_floating_point())
    packed = {f"{name}.weight": module for name, module in model.named_modules() if _is_packed(module)}
    held = {name: _shape(packed[name]) if name in packed else tuple(p.shape) for name, p in parameters.items()}
    parts: dict[str, dict[str, Rows]] = defaultdict(dict)
    unread = []
    for name, rows in places_in(model, shapes, held).items():
        if isinstance(rows, Rows) and parameters[rows.name].dtype == dtype:
            parts[rows.name][name] = rows
        else:
            unread.append(name)
    read: dict[str, Fingerprint] = {}
    for whole, rows_of_part in parts.items():  # one at a time, since a packed one is unpacked
        tensor = _unpacked(packed[whole]) if whole in packed else parameters[whole].data
        read |= fingerprints(
            {
                name: tensor[rows.start : rows.start + rows.count].view(shapes[name])
                for name, rows in rows_of_part.items()
            }
        )
    differing = tuple(
        f"{name} multiplies with other weights than it holds"
        for name, module in _packed_beside(model).items()
        if not torch.equal(_unpacked(module), module.weight)
    )
    return LoadedAdapter(
        dtype=str(dtype).removeprefix("torch."),
        tensors={name: read[name] for name in shapes if name in read},
        faults=faults + differing,
        unread=tuple(unread),
    )


def _packed_beside(model: nn.Module) -> dict[str, Any]:
    """{name: module} of those that hold a matrix twice, plain and packed: embeddings and output heads on a CPU."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "cpu_linear") and not _is_packed(module)
    }


def _is_packed(module: Any) -> bool:
    """Whether only a packed form of the module's matrix is left."""
    return hasattr(module, "cpu_linear") and module.weight.numel() == 0


def _shape(module: Any) -> Shape:
    return module.output_size, module.input_size


def _unpacked(module: Any) -> Tensor:
    """The matrix `[out, in]` that a module on a CPU multiplies with."""
    columns = module.weight.shape[1] if module.weight.numel() else module.input_size
    identity = torch.eye(columns, dtype=module.weight.dtype)
    return module.cpu_linear(identity, module.weight, None).t()
