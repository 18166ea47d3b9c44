"""Seconds of a stage by a model of the machine: nothing here is a measurement.

A kernel takes the longer of its bytes at the device's bandwidth and its operations at the device's rate. A stage takes
the sum of its kernels, or on a GPU the launches by its host if those take longer. Counted are the packed forward and
backward with LoRA on all linear layers, as `model/kernels/` computes them (tests/pretended_card counts the same number
of kernels), and decoding by an engine that reads weights once for a token of all rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rlft.generation.decoding import READ_EVERY
from rlft.model.activations import LayerSizes
from rlft.plan.cards import Machine

IN_A_GRAPH = 1.5e-6  # seconds between two kernels of a CUDA graph, in which engines decode
SCHEDULED = 24e-6
"""Seconds in which vLLM's host schedules, receives and decodes a token of a row: measured with 256 rows on a CPU."""
SMALL, SMALL_OF_VLLM = 18, 6
"""Kernels of a layer and a token besides its four products and its attention: of the transformers engine (counted on
the pretended card), and of vLLM."""
READING = 0.15e-3  # seconds of a token while the host reads several of CUDA graphs: at most so much was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What a device computes at once; bytes and operations are those of one run."""

    name: str
    number: float  # how often it runs
    bytes: float
    operations: float = 0.0
    launch: float | None = None  # in seconds; None: the machine's
    least: float = 0.0  # seconds that a run takes at least, such as the gap between two kernels of a CUDA graph

    def seconds(self, machine: Machine) -> float:
        """Seconds of all runs on the device."""
        moved = self.bytes / (machine.of_the_bandwidth * machine.bandwidth)
        computed = self.operations / (machine.of_the_rate * machine.rate)
        return self.number * max(self.least, moved, computed)


def seconds_of(kernels: Iterable[Kernel], machine: Machine) -> float:
    """Seconds of a stage; those of the launches where the host of a GPU takes longer than it."""
    device = host = 0.0
    for kernel in kernels:
        device += kernel.seconds(machine)
        host += kernel.number * (machine.launch if kernel.launch is None else kernel.launch)
    return device + host if machine.is_host else max(device, host)


def operations_of(kernels: Iterable[Kernel]) -> float:
    """Floating-point operations of a stage."""
    return sum(kernel.number * kernel.operations for kernel in kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A model of attention and gated MLPs."""

    hidden: int
    vocabulary: int
    layers: tuple[LayerSizes, ...]
    rank: float  # that of an adapter on all linear layers, or with as many parameters; 0: all weights are trained
    itemsize: int = 2  # bytes of a weight and of an activation

    def matrices(self, layer: LayerSizes) -> list[tuple[int, list[int]]]:
        """(inputs, outputs of each) of the linear layers that are computed together: q, k, v; o; gate, up; down."""
        return [
            (self.hidden, [layer.queries, layer.keys, layer.keys]), (layer.queries, [self.hidden]),
            (self.hidden, [layer.mlp] * 2), (layer.mlp, [self.hidden]),
        ]  # fmt: skip

    @property
    def linear(self) -> int:
        """Number of weights in the linear layers, the LM head left out."""
        return sum(inputs * sum(outputs) for layer in self.layers for inputs, outputs in self.matrices(layer))

    @property
    def widths(self) -> int:
        """The sum of inputs and outputs of all linear layers: an adapter has `rank` times as many parameters."""
        matrices = [matrix for layer in self.layers for matrix in self.matrices(layer)]
        return sum(inputs + output for inputs, outputs in matrices for output in outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Rows that are sampled or trained on; prompt and completion in tokens, budget in tokens of a micro-batch."""

    prompts: float
    group: float
    prompt: float
    completion: float
    budget: int

    @property
    def rows(self) -> float:
        return self.prompts * self.group

    @property
    def tokens(self) -> float:
        return self.prompts * self.prompt + self.rows * self.completion

    @property
    def passes(self) -> int:
        """Number of micro-batches, of whole groups where one fits."""
        groups = max(1, self.budget // (self.prompt + self.group * self.completion))
        return math.ceil(self.prompts / groups)

    @property
    def pairs(self) -> float:
        """Number of (query, key) that see each other."""
        p, c = self.prompt, self.completion
        return self.prompts * (p * p / 2 + self.group * (c * p + c * c / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What the steps and evaluations of a run compute."""

    trained: Work  # the rows of a step
    epochs: int = 1  # times that the updates go over them; 0 if nothing is trained
    critics: int = 0  # number of networks with adapters of their own that learn from them as well
    forwards: int = 0  # number of passes without gradient over them, between sampling and updates
    anchors: int = 0  # and before each update
    scorers: int = 0  # number of rewards that are networks in the trainer, which read them
    is_sampled: bool = False  # whether the engine samples them, so that they may be shorter than generation.max_tokens
    sampled: Work | None = None  # the rows of an evaluation that are sampled
    read: Work | None = None  # the rows of an evaluation whose loss is computed

    @property
    def samples(self) -> bool:
        return self.is_sampled or self.sampled is not None

    def shorter(self, share: float) -> StepWork:
        """The same with completions of this share of their tokens, where they are sampled."""
        trained, sampled = (
            work and replace(work, completion=max(1.0, share * work.completion))
            for work in (self.trained, self.sampled)
        )
        return replace(self, trained=trained if self.is_sampled else self.trained, sampled=sampled)


def product(name: str, number: float, rows: float, inputs: float, outputs: float, item: int) -> Kernel:
    moved = (rows * inputs + rows * outputs + inputs * outputs) * item
    return Kernel(name=name, number=number, bytes=moved, operations=2 * rows * inputs * outputs)


# -- updates -----------------------------------------------------------------------------------------------------------
def update(network: Network, work: Work) -> Iterator[Kernel]:
    """The kernels of the forward and backward passes of a step's rows, and of the optimizer."""
    sampled = work.rows * work.completion
    parameters = network.rank * network.widths or network.linear + network.hidden * network.vocabulary
    for sizes, number in Counter(network.layers).items():
        for kernel in layer(network, sizes, work):
            yield replace(kernel, number=kernel.number * work.passes * number)
    yield product("LM head", 2 if network.rank else 3, sampled, network.hidden, network.vocabulary, network.itemsize)
    yield Kernel(name="softmax", number=3, bytes=sampled * network.vocabulary * network.itemsize)
    yield Kernel(name="optimizer", number=12, bytes=3 * 4 * parameters)


def layer(network: Network, sizes: LayerSizes, work: Work) -> Iterator[Kernel]:
    """The kernels of a layer, forward and backward, on the tokens of a micro-batch."""
    tokens, rank, item = work.tokens / work.passes, network.rank, network.itemsize
    matrices = network.matrices(sizes)
    for inputs, outputs in matrices:
        for output in outputs:
            # Forward, and of x; of W as well where it learns.
            yield product("linear layers", 2 if rank else 3, tokens, inputs, output, item)
            if not rank:
                continue
            yield product("LoRA", 3, tokens, rank, output, item)  # forward, of what A gave, and of B
            yield from (Kernel(name="gradients added up", number=1, bytes=3 * 4 * rank * n) for n in (inputs, output))
        if rank:
            yield product("LoRA", 3, tokens, inputs, rank * len(outputs), item)  # forward, of x, and of A
    hidden = tokens * network.hidden * item
    yield from passes(hidden, tokens * sum(matrices[0][1]) * item, tokens * sizes.mlp * item)
    scores, queries = 4 * work.pairs / work.passes * sizes.queries, tokens * sizes.queries * item
    yield Kernel(name="attention", number=2, bytes=4 * queries, operations=scores / 2)
    yield Kernel(name="attention", number=2, bytes=8 * queries, operations=1.25 * scores)
    yield Kernel(name="attention: merged", number=5, bytes=2 * queries)


def passes(hidden: float, heads: float, mlp: float) -> Iterator[Kernel]:
    """What stands between a layer's products, forward and backward, as `model/kernels/` compiles it.

    hidden, heads, mlp: bytes of the residual stream, of q, k and v, and of the MLP's gate, of all tokens.
    """
    yield Kernel(name="norms", number=2, bytes=2 * hidden)
    yield Kernel(name="norms", number=2, bytes=6.5 * hidden)  # backward, with the sums of x's gradient
    yield Kernel(name="residual sums", number=2, bytes=4 * hidden)
    yield from (Kernel(name="rotary positions", number=1, bytes=times * heads) for times in (3, 2))
    yield from (Kernel(name="SiLU", number=1, bytes=times * mlp) for times in (7, 6))
    yield Kernel(name="LoRA: scales", number=11, bytes=0.0)  # of what has the adapter's rank


# -- the other stages --------------------------------------------------------------------------------------------------
def sampling(network: Network, work: Work, *, in_graphs: bool = True, by_vllm: bool = True) -> Iterator[Kernel]:
    """The kernels of an engine that decodes all rows at once, with base and adapter merged.

    in_graphs: whether in CUDA graphs; else the host launches each kernel. by_vllm: else by the transformers engine.
    """
    steps, rows, item = work.completion, work.rows, network.itemsize
    how: dict[str, float] = {"launch": 0.0, "least": IN_A_GRAPH} if in_graphs else {}
    for sizes, number_of_layers in Counter(network.layers).items():
        number = steps * number_of_layers
        for inputs, outputs in network.matrices(sizes):
            yield product("prompts", number_of_layers, work.prompts * work.prompt, inputs, sum(outputs), item)
            yield replace(product("linear layers", number, rows, inputs, sum(outputs), item), **how)
        # vLLM reads a prompt's keys for each of its completions, the transformers engine once.
        read = (rows if by_vllm else work.prompts) * work.prompt + rows * work.completion / 2
        scores = 4 * rows * (work.prompt + work.completion / 2) * sizes.queries
        moved = read * 2 * sizes.keys * item
        yield Kernel(name="keys and values", number=number, bytes=moved, operations=scores, **how)
        small = SMALL_OF_VLLM if by_vllm else SMALL
        yield Kernel(name="small kernels", number=small * number, bytes=rows * network.hidden * item * 3, **how)
    yield replace(product("LM head", steps, rows, network.hidden, network.vocabulary, item), **how)
    yield Kernel(name="choice of a token", number=4 * steps, bytes=rows * network.vocabulary * 4, **how)
    if by_vllm:
        yield Kernel(name="scheduler", number=steps, bytes=0, launch=0.0, least=SCHEDULED * rows)
    elif in_graphs:
        yield Kernel(name="graphs", number=steps, bytes=0)
        yield Kernel(name="reads", number=steps / READ_EVERY, bytes=0, launch=0.0, least=READ_EVERY * READING)


MERGED, MERGED_BY_THE_HOST = 3, 25
"""Times that the weights with an adapter are read or written where it is added to them; the latter was measured on CPUs
(0.16 s for 13.8 million weights, 2.6 s for 106 million), where most of it are faults of new memory pages."""


def publishing(network: Network, checked: int = 0, *, by_the_host: bool = False) -> Iterator[Kernel]:
    """The kernels that add up base and adapter for the engine, and of its freshness check.

    checked: number of tokens whose log-probs engine and trainer compute for the check.
    """
    times, weights = MERGED_BY_THE_HOST if by_the_host else MERGED, network.linear
    head = network.hidden * network.vocabulary
    yield Kernel(name="merged weights", number=1, bytes=times * weights * network.itemsize)
    yield Kernel(name="probe", number=500, bytes=0)
    yield Kernel(name="check", number=2, bytes=0, operations=2 * checked * (weights + head))
