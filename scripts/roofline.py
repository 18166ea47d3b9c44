"""What a step should take on a GPU, by a model: nothing here is a measurement.

    python scripts/roofline.py                                   # the table of docs/performance.md
    python scripts/roofline.py --prompts 32 --group 8 --prompt 150 --completion 512 --budget 32768
    python scripts/roofline.py --fusion                          # updates with and without compiled functions

A kernel takes the longer of its bytes at the card's bandwidth and its operations at the card's rate. A stage takes the
sum of its kernels, or of their launches by the host if that is longer. Counted are the packed forward and backward in
bfloat16 with LoRA on all linear layers, as `model/kernels/` computes them (tests/pretended_card counts the same number
of kernels), and decoding by an engine that reads weights once for a token of all rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlft.commands.doctor.work import SIZES, Size

ITEM, RANK = 2, 16
MODELS = {
    "0.5B": SIZES["0.5b"],
    "1.5B": SIZES["1.5b"],
    "7B": Size(hidden=3584, layers=28, heads=28, key_heads=4, intermediate=18944, vocabulary=152064),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Rates that are published, and the shares of them that large products and passes reach.

    Attributes:
        rate: bfloat16 operations per second of dense products, sums in float32.
        bandwidth: bytes per second.
        launch: seconds in which the host launches a kernel of an update, Python included, while the GPU computes
            earlier ones: what was measured on one H100, whose host took 168 ms for the 2,201 kernels that are counted
            here of an update of 0.5B (it launched 3,467: single calls of attention are several kernels).
    """

    rate: float
    bandwidth: float
    launch: float = 168e-3 / 2201


CARDS = {
    "H100": Card(rate=989e12, bandwidth=3.35e12),
    "A100": Card(rate=312e12, bandwidth=2.04e12),
    "4090": Card(rate=165e12, bandwidth=1.01e12),
    "L4": Card(rate=121e12, bandwidth=0.30e12),
}
OF_THE_RATE, OF_THE_BANDWIDTH = 0.7, 0.8
IN_A_GRAPH = 1.5e-6
"""Seconds between two kernels of a CUDA graph, in which engines decode."""

SCHEDULED = 2e-3
"""Seconds in which an engine's host prepares a token of all rows; an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """number: how often it runs. bytes and operations are those of one run; launch in seconds, None: the card's.

    least: seconds that a run takes at least, such as the gap between two kernels of a CUDA graph.
    """

    name: str
    number: float
    bytes: float
    operations: float = 0.0
    launch: float | None = None
    least: float = 0.0

    def seconds(self, card: Card) -> tuple[float, str]:
        """(seconds of all runs on the GPU, what bounds them)."""
        bounds = {
            "gaps": self.least,
            "memory": self.bytes / (OF_THE_BANDWIDTH * card.bandwidth),
            "arithmetic": self.operations / (OF_THE_RATE * card.rate),
        }
        bound = max(bounds, key=lambda name: bounds[name])
        return self.number * bounds[bound], bound


LAUNCHES = "launches"


def seconds_of(kernels: Sequence[Kernel], card: Card) -> dict[str, float]:
    """{what bounds a stage: seconds}: launches alone where the host takes longer than the GPU."""
    host = sum(k.number * (card.launch if k.launch is None else k.launch) for k in kernels)
    of_gpu = added_up((k.seconds(card)[1], k.seconds(card)[0]) for k in kernels)
    return of_gpu if sum(of_gpu.values()) >= host else {LAUNCHES: host}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    prompts: int
    group: int
    prompt: int
    completion: int
    budget: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        return self.prompts * self.prompt + self.rows * self.completion

    @property
    def passes(self) -> int:
        """Number of micro-batches, of whole groups where one fits."""
        groups = max(1, self.budget // (self.prompt + self.group * self.completion))
        return -(-self.prompts // groups)

    @property
    def pairs(self) -> float:
        """Number of (query, key) that see each other."""
        p, c = self.prompt, self.completion
        return self.prompts * (p * p / 2 + self.group * (c * p + c * c / 2))


def matrices(size: Size) -> list[tuple[int, list[int]]]:
    """(inputs, outputs of each) of the linear layers that are computed together: q, k, v; o; gate, up; down."""
    key = size.key_heads * size.hidden // size.heads
    return [
        (size.hidden, [size.hidden, key, key]), (size.hidden, [size.hidden]),
        (size.hidden, [size.intermediate] * 2), (size.intermediate, [size.hidden]),
    ]  # fmt: skip


def product(name: str, number: float, rows: float, inputs: float, outputs: float) -> Kernel:
    moved = (rows * inputs + rows * outputs + inputs * outputs) * ITEM
    return Kernel(name=name, number=number, bytes=moved, operations=2 * rows * inputs * outputs)


def update(size: Size, work: Work, *, fused: bool = True) -> Iterator[Kernel]:
    """The kernels of the forward and backward passes of a step's rows, and of the optimizer."""
    sampled = work.rows * work.completion
    parameters = size.layers * RANK * sum(inputs + output for inputs, outputs in matrices(size) for output in outputs)
    for kernel in layer(size, work, fused=fused):
        yield replace(kernel, number=kernel.number * work.passes * size.layers)
    yield product("LM head", 2, sampled, size.hidden, size.vocabulary)
    yield Kernel(name="softmax", number=3, bytes=sampled * size.vocabulary * ITEM)
    yield Kernel(name="optimizer", number=12, bytes=3 * 4 * parameters)


def layer(size: Size, work: Work, *, fused: bool = True) -> Iterator[Kernel]:
    """The kernels of a layer, forward and backward, on the tokens of a micro-batch."""
    tokens = work.tokens / work.passes
    for inputs, outputs in matrices(size):
        for output in outputs:
            yield product("linear layers", 2, tokens, inputs, output)  # forward, and of x
            yield product("LoRA", 3, tokens, RANK, output)  # forward, of what A gave, and of B
            yield from (Kernel(name="gradients added up", number=1, bytes=3 * 4 * RANK * n) for n in (inputs, output))
        yield product("LoRA", 3, tokens, inputs, RANK * len(outputs))  # forward, of x, and of A
    hidden = tokens * size.hidden * ITEM
    yield from passes(hidden, tokens * sum(matrices(size)[0][1]) * ITEM, tokens * size.intermediate * ITEM, fused)
    scores = 4 * work.pairs / work.passes * size.hidden
    yield Kernel(name="attention", number=2, bytes=4 * hidden, operations=scores / 2)
    yield Kernel(name="attention", number=2, bytes=8 * hidden, operations=1.25 * scores)
    yield Kernel(name="attention: merged", number=5, bytes=2 * hidden)


def passes(hidden: float, heads: float, mlp: float, fused: bool) -> Iterator[Kernel]:
    """What stands between a layer's products, as compiled or step by step, as `model/kernels/` writes it.

    hidden, heads, mlp: bytes of the residual stream, of q, k and v, and of the MLP's gate, of all tokens.
    """
    compiled_and_not = [  # (name, runs, bytes of a compiled one; kernels and bytes of its steps)
        ("norms", 2, 2 * hidden, 9, 14 * hidden),
        ("norms", 2, 6.5 * hidden, 11, 28 * hidden),  # backward, with the sums of x's gradient
        ("residual sums", 2, 4 * hidden, 1, 3 * hidden),
        ("rotary positions", 1, 3 * heads, 6, 5 * heads),
        ("rotary positions", 1, 2 * heads, 6, 5 * heads),
        ("SiLU", 1, 7 * mlp, 2, 5 * mlp),
        ("SiLU", 1, 6 * mlp, 4, 11 * mlp),
        ("LoRA: scales", 11, 0.0, 1, 0.0),  # of what has the adapter's rank
    ]
    for name, runs, written, steps, of_steps in compiled_and_not:
        number, moved = (1, written) if fused else (steps, of_steps / steps)
        yield Kernel(name=name, number=runs * number, bytes=moved)


def sampling(size: Size, work: Work) -> Iterator[Kernel]:
    """The kernels of an engine that decodes all rows at once in CUDA graphs, with base and adapter merged."""
    steps, rows, number = work.completion, work.rows, work.completion * size.layers
    in_a_graph: dict[str, float] = {"launch": 0.0, "least": IN_A_GRAPH}
    for inputs, outputs in matrices(size):
        yield product("prompts", size.layers, work.prompts * work.prompt, inputs, sum(outputs))
        yield replace(product("linear layers", number, rows, inputs, sum(outputs)), **in_a_graph)
    yield replace(product("LM head", steps, rows, size.hidden, size.vocabulary), **in_a_graph)
    yield Kernel(name="choice of a token", number=4 * steps, bytes=rows * size.vocabulary * 4, **in_a_graph)
    key = 2 * size.key_heads * size.hidden // size.heads * ITEM
    seen = rows * (work.prompt + work.completion / 2)
    yield Kernel(name="keys and values", number=number, bytes=seen * key, **in_a_graph)
    yield Kernel(name="small kernels", number=6 * number, bytes=rows * size.hidden * ITEM * 3, **in_a_graph)
    yield Kernel(name="scheduler", number=steps, bytes=0, launch=0.0, least=SCHEDULED)


def stages(name: str, work: Work, *, fused: bool = True) -> dict[str, list[Kernel]]:
    size = MODELS[name]
    adapted = size.layers * sum(inputs * sum(outputs) for inputs, outputs in matrices(size)) * ITEM
    publish = [Kernel(name="merged weights", number=1, bytes=3 * adapted), Kernel(name="probe", number=500, bytes=0)]
    return {"sample": list(sampling(size, work)), "update": list(update(size, work, fused=fused)), "publish": publish}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("prompts", 32), ("group", 8), ("prompt", 150), ("completion", 512), ("budget", 32768)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fusion", action="store_true")
    arguments = vars(parser.parse_args())
    fusion = arguments.pop("fusion")
    work = Work(**arguments)
    print(f"A model, not a measurement: {work.prompts} x {work.group}, {work.prompt} + {work.completion} tokens.\n")
    columns = ("sample, s", "update, s", "publish, s", "step, s", "bound of the update", "the next ten per cent")
    columns = ("update step by step, s", "as compiled, s", "what a compiled one spends") if fusion else columns
    print(f"| {' | '.join(('model', 'card', *columns))} |")
    print("|" + " --- |" * (2 + len(columns)))
    for model in MODELS:
        for name, card in CARDS.items():
            print((before_and_after if fusion else row)(model, name, card, work))


def before_and_after(model: str, name: str, card: Card, work: Work) -> str:
    """A line of the table that fusion is chosen by: what is largest beside the products is to be fused next."""
    times = [sum(seconds_of(stages(model, work, fused=fused)["update"], card).values()) for fused in (False, True)]
    spent = added_up((k.name, k.seconds(card)[0]) for k in stages(model, work)["update"])
    shares = ", ".join(f"{kernel} {share / sum(spent.values()):.0%}" for kernel, share in largest(spent)[:4])
    return f"| {' | '.join([model, name, *(f'{seconds:.2f}' for seconds in times), shares])} |"


def row(model: str, name: str, card: Card, work: Work) -> str:
    of_stages = stages(model, work)
    bounds = {stage: seconds_of(kernels, card) for stage, kernels in of_stages.items()}
    seconds = {stage: sum(parts.values()) for stage, parts in bounds.items()}
    of_update = largest(bounds["update"])[:2]
    shares = ", ".join(f"{bound} {share / seconds['update']:.0%}" for bound, share in of_update)
    cells = [f"{seconds[stage]:.2f}" for stage in of_stages]
    return f"| {' | '.join([model, name, *cells, f'{sum(seconds.values()):.2f}', shares, gains(of_stages, card)])} |"


def gains(of_stages: dict[str, list[Kernel]], card: Card) -> str:
    """The fewest groups of kernels whose time beyond their arithmetic is a tenth of the step, with these shares."""
    bounds = {stage: seconds_of(kernels, card) for stage, kernels in of_stages.items()}
    total = sum(sum(parts.values()) for parts in bounds.values())
    beyond = added_up(
        (f"{stage}: {k.name}", k.seconds(card)[0] - k.number * k.operations / (OF_THE_RATE * card.rate))
        for stage, kernels in of_stages.items()
        if LAUNCHES not in bounds[stage]
        for k in kernels
    )
    beyond |= {f"{stage}: launches": parts[LAUNCHES] for stage, parts in bounds.items() if LAUNCHES in parts}
    told, so_far = [], 0.0
    for name, seconds in largest(beyond):
        told.append(f"{name} {seconds / total:.0%}")
        so_far += seconds / total
        if so_far >= 0.1:
            break
    return ", ".join(told)


def added_up(pairs: Iterator[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, number in pairs:
        sums[name] = sums.get(name, 0.0) + number
    return sums


def largest(numbers: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(numbers.items(), key=lambda item: -item[1])


if __name__ == "__main__":
    main()
