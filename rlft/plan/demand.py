"""What a planned run of any command asks of the trainer's device, by what asks for it; its bytes are `memory_parts`.

Those of a vision tower are measured: an image goes through an empty one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.initialization import no_init_weights

from rlft.config.model import Recompute
from rlft.config.trainer import OptimizerKind
from rlft.data.prompts import PromptSet
from rlft.generation.engine import Engine
from rlft.generation.memory import Decoding, Load, MemoryPart, ModelSizes, TeacherLoad, When
from rlft.model.images import KEPT_BYTES, read_image, tower_class, tower_config
from rlft.system.device import MULTIPROCESSORS, type_of
from rlft.tokens.images import processor_of
from rlft.tokens.text import RunTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerDemand:
    """Memory demand of a vision tower and of images, in bytes."""

    weights: int  # of the tower
    reading: int  # the most that is alive besides the weights while an image goes through it
    vectors: int  # of a prompt's images
    num_prompts: int  # number of prompts whose images are read in a run

    def parts(
        self, device: str, *, prompts_per_step: int, trained_at_once: int, sampled_at_once: int, towers: int = 1
    ) -> list[MemoryPart]:
        """The parts of the trainer's device.

        Vectors stay in main memory, those of a step once more. To a GPU go those of a micro-batch, twice: with its rows
        and with its packed row, and those of prompts that are decoded together.

        Args:
            trained_at_once: number of prompts in a micro-batch.
            sampled_at_once: number of prompts that are decoded together on this device, whose vectors the engine gets.
            towers: how many processes on this device have one: the trainer's, and engines with bases of their own.
        """
        copies = 2 if device != "cpu" else 1
        trained, sampled = copies * trained_at_once * self.vectors, (device != "cpu") * sampled_at_once * self.vectors
        needs = [
            ("vision tower", towers * self.weights, When.always, "model.dtype"),
            ("an image in the tower", towers * self.reading, When.reading, None),
            ("vectors of images", trained, When.updating, "token_budget"),
            ("vectors of images that are sampled from", sampled, When.sampling, "prompts_per_step"),
        ]
        if device == "cpu":
            kept = towers * min(KEPT_BYTES, self.num_prompts * self.vectors) + prompts_per_step * self.vectors
            needs.append(("vectors that are kept", kept, When.always, "prompts_per_step"))
        return [MemoryPart(name=name, bytes=size, when=when, key=key) for name, size, when, key in needs]


def tower_demand(
    config: Any, dtype: torch.dtype, sets: Iterable[PromptSet | None], num_prompts: int, tokenizer: RunTokenizer
) -> TowerDemand | None:
    """The demand of the longest prompt's images, by an empty tower of the model's `config`; None if none has any."""
    places = [(each.prompts, each.longest_with_images) for each in sets if each is not None]
    shown = [prompts[index] for prompts, index in places if index is not None]
    if not shown:
        return None
    longest = max(shown, key=lambda prompt: len(prompt.token_ids))
    with no_init_weights():
        tower = tower_class(config)._from_config(tower_config(config), dtype=dtype).eval().base_model
    reading, vectors = 0, 0
    for image in longest.images:
        inputs = processor_of(tokenizer).tensors(image)
        with torch.no_grad(), LiveBytes(hollow=True) as alive:
            encoded = read_image(tower, inputs, torch.device("cpu"))
        reading = max(reading, alive.peak + sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor)))
        vectors += encoded.num_bytes
    weights = sum(x.nbytes for x in (*tower.parameters(), *tower.buffers()))
    return TowerDemand(weights=weights, reading=reading, vectors=vectors, num_prompts=num_prompts)


class LiveBytes(TorchDispatchMode):
    """Inside, `now` and `peak` are the bytes alive of storages that operations make; those of arguments do not count.

    hollow: whether parameters, and what is made of them, stand for any numbers: results are memory of their shape,
    and nothing is computed. Other arguments keep their numbers, since shapes may depend on them: towers leave
    out parts of an image that are padding.
    """

    def __init__(self, *, hollow: bool = False) -> None:
        super().__init__()
        self._hollow = hollow
        self._sizes: dict[int, int] = {}
        self._without_numbers: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = _tensors((args, kwargs))
        for tensor in arguments:
            self._note(tensor, 0, self._hollow and isinstance(tensor, torch.nn.Parameter))
        is_hollow = any(x.untyped_storage()._cdata in self._without_numbers for x in arguments)
        made = _shaped(func, args, kwargs or {}) if is_hollow else func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._note(tensor, tensor.untyped_storage().nbytes(), is_hollow)
        return made

    def _note(self, tensor: Tensor, size: int, is_hollow: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)
        if is_hollow and tensor.is_floating_point():
            self._without_numbers.add(storage._cdata)

    def _gone(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)
        self._without_numbers.discard(storage)


def _shaped(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A result of the operation's shape; the operation's own where that is a view, or its shape depends on numbers."""
    if any(returned.alias_info for returned in func._schema.returns):
        return func(*args, **kwargs)
    try:
        shapes = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
        made = func(*shapes[0], **shapes[1])
    except RuntimeError:  # the shape depends on numbers, or torch has no rule for it
        return func(*args, **kwargs)
    return tree_map_only(Tensor, _without_numbers, made)


def _without_numbers(shape: Tensor) -> Tensor:
    """Memory of a shape; indices and conditions, on which later shapes may depend, are zeros."""
    memory = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    return memory if shape.is_floating_point() else memory.zero_()


def _tensors(things: Any) -> list[Tensor]:
    return [x for x in tree_leaves(things) if isinstance(x, Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The networks of the roles."""

    adapters: int  # number of adapters of the run's rank on the base, without the engine's own copy
    trainable: int  # number of trained parameters
    matrices: int  # how many of them are in matrices, which Muon moves
    frozen: int = 0  # number of parameters of adapters that keep the rank of their folder
    whole_model: bool = False  # whether the model's own weights are trained
    copies: int = 0  # number of frozen copies of these weights, in other roles
    own_critic: bool = False  # whether the critic has an adapter, and so a forward and backward of its own
    rewards: int = 0  # bytes of learned rewards that have networks of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a step, each as long as the longest."""

    prompt_tokens: int
    completion_tokens: int
    group: int  # number of rows per prompt
    number: int  # of rows in a step
    in_update: int  # number of rows in an optimizer batch
    key: str = "prompts_per_step"  # the key that says how many groups a step has

    @property
    def tokens(self) -> int:
        """Number of tokens of each."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a loss computes of each predicted token."""

    through_head: bool = True  # whether the LM head computes log-probs; values alone need none
    entropy: bool = False  # whether it needs the entropy
    exact_kl: bool = False  # whether it compares the whole distribution with another policy's
    top_k: int = 0  # of how many of a teacher's most likely tokens it compares the distributions
    expert_bytes: int = 0  # bytes of the numbers of a token's experts that a step keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What the engine samples."""

    section: str = ""  # the engine's section in `generation`
    decodings: tuple[Decoding, ...] = ()  # those that happen one after the other, the first of them a step's
    max_tokens: int = 0  # the most tokens in a completion
    max_sequence_tokens: int = 0  # the most tokens in a prompt with its completion
    draft_rows: int = 0  # as in `Load`
    apart: int = 0  # number of engines in other processes on this device, each with a base of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that share the forward and backward passes."""

    number: int = 1
    gradients: int = 1  # the most gradients that a rank holds at a time, those of its lanes
    held: float = 1.0  # the largest share of the optimizer's averages that a rank holds
    sharing: int = 1  # how many ranks share the tokens of each pass
    sharded: bool | None = None  # whether they divide the base's layers among them; None where they cannot


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDemand:
    """A teacher that is a separate model."""

    model: ModelSizes
    engine: Engine  # what computes it
    section: str  # the engine's section in `generation`
    row_tokens: int  # number of tokens of the longest row that it may read
    prompt_tokens: int  # number of prompt tokens, the hint included, of the longest row that it reads
    share: float  # the share of a GPU's memory that the engine gets for it, where it takes one

    def other_shares(self, load: TeacherLoad, room: int) -> Iterator[TeacherDemand]:
        """The same teacher with a share in which its engine starts, or with a smaller one that leaves room for others.

        room: bytes of the device's memory that the rest of the run leaves free.
        """
        least = self.engine.least_teacher_share(self.model, load) if load.device_memory else None
        if least is None:
            return
        fitting = int(100 * room / load.device_memory) / 100
        if self.share < least:
            yield replace(self, share=least)
        elif least <= fitting < self.share:
            yield replace(self, share=fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of the trainer's device."""

    networks: Networks
    rows: Rows
    optimizer: OptimizerKind = OptimizerKind.adamw
    loss: Loss = field(default_factory=Loss)
    token_budget: int  # the most tokens in a micro-batch
    recompute: Recompute  # what gradient checkpointing computes again
    device: str  # the kind of the trainer's device, one of `rlft.system.device.KINDS`
    index: int = 0  # the number of that device
    device_memory: int = 0  # bytes of a GPU's memory; 0 if unknown
    multiprocessors: int = MULTIPROCESSORS  # their number on a GPU
    engine: Engine | None = None  # what samples completions; None if nothing does
    work: EngineWork = field(default_factory=EngineWork)
    ranks: Ranks = field(default_factory=Ranks)
    teacher: TeacherDemand | None = None  # a teacher that is a separate model; None if there is none
    tower: TowerDemand | None = None  # a vision tower; None if prompts have no images

    @property
    def trains(self) -> bool:
        return self.networks.trainable > 0

    def with_groups(self, number: int) -> Demand:
        """The same with so many groups of rows in a step."""
        rows, work, decodings = number * self.rows.group, self.work, self.work.decodings
        if decodings and self.rows.key == "prompts_per_step":  # the first one is a step's, and the others stay
            work = replace(work, decodings=(replace(decodings[0], num_prompts=number), *decodings[1:]))
        in_update = self.rows.in_update * rows // self.rows.number
        return replace(self, rows=replace(self.rows, number=rows, in_update=in_update), work=work)

    @property
    def _numbered(self) -> str:
        return f":{self.index}" if self.index else ""

    @property
    def load(self) -> Load:
        """The engine's work on this device."""
        return Load(
            decodings=self.work.decodings,
            max_tokens=self.work.max_tokens,
            max_sequence_tokens=self.work.max_sequence_tokens,
            draft_rows=self.work.draft_rows,
            device=type_of(self.device) + ("" if self.work.apart else self._numbered),
            device_memory=self.device_memory,
            tower=0 if self.tower is None else self.tower.weights,
        )

    @property
    def teacher_load(self) -> TeacherLoad:
        """The teacher's work on this device."""
        assert self.teacher is not None, "there is one"
        return TeacherLoad(
            row_tokens=self.teacher.row_tokens,
            device=self.device + self._numbered,
            device_memory=self.device_memory,
            share=self.teacher.share,
            libraries=self.teacher.section != self.work.section,
        )
