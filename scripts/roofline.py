"""What a step should take on a GPU, by the model of rlft/plan/roofline.py: nothing here is a measurement.

python scripts/roofline.py                                   # the table of docs/benchmarks/performance.md
python scripts/roofline.py --prompts 32 --group 8 --prompt 150 --completion 512 --budget 32768
python scripts/roofline.py --fusion                          # updates with and without compiled functions
"""

from __future__ import annotations

import argparse

from rlft.commands.doctor.work import SIZES, Size
from rlft.model.activations import LayerSizes
from rlft.plan.cards import CARDS, Machine
from rlft.plan.roofline import LAUNCHES, Kernel, Network, Work, added_up, publishing, sampling, seconds_of, update

RANK = 16
SHOWN = ("H100", "A100", "4090", "L4")


def network(size: Size, itemsize: int = 2) -> Network:
    """A model of these sizes with an adapter of rank 16 on all linear layers."""
    keys = size.key_heads * size.hidden // size.heads
    layers = (LayerSizes(queries=size.hidden, keys=keys, mlp=size.intermediate, heads=size.heads),) * size.layers
    return Network(hidden=size.hidden, vocabulary=size.vocabulary, layers=layers, rank=RANK, itemsize=itemsize)


MODELS = {
    "0.5B": network(SIZES["0.5b"]),
    "1.5B": network(SIZES["1.5b"]),
    "7B": network(Size(hidden=3584, layers=28, heads=28, key_heads=4, intermediate=18944, vocabulary=152064)),
}


def stages(name: str, work: Work, *, fused: bool = True) -> dict[str, list[Kernel]]:
    model = MODELS[name]
    return {
        "sample": list(sampling(model, work)),
        "update": list(update(model, work, fused=fused)),
        "publish": list(publishing(model)),
    }


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
        for name, card in ((name, CARDS[name]) for name in SHOWN):
            print((before_and_after if fusion else row)(model, name, card, work))


def before_and_after(model: str, name: str, card: Machine, work: Work) -> str:
    """A line of the table that fusion is chosen by: what is largest beside the products is to be fused next."""
    times = [sum(seconds_of(stages(model, work, fused=fused)["update"], card).values()) for fused in (False, True)]
    spent = added_up((k.name, k.seconds(card)[0]) for k in stages(model, work)["update"])
    shares = ", ".join(f"{kernel} {share / sum(spent.values()):.0%}" for kernel, share in largest(spent)[:4])
    return f"| {' | '.join([model, name, *(f'{seconds:.2f}' for seconds in times), shares])} |"


def row(model: str, name: str, card: Machine, work: Work) -> str:
    of_stages = stages(model, work)
    bounds = {stage: seconds_of(kernels, card) for stage, kernels in of_stages.items()}
    seconds = {stage: sum(parts.values()) for stage, parts in bounds.items()}
    of_update = largest(bounds["update"])[:2]
    shares = ", ".join(f"{bound} {share / seconds['update']:.0%}" for bound, share in of_update)
    cells = [f"{seconds[stage]:.2f}" for stage in of_stages]
    return f"| {' | '.join([model, name, *cells, f'{sum(seconds.values()):.2f}', shares, gains(of_stages, card)])} |"


def gains(of_stages: dict[str, list[Kernel]], card: Machine) -> str:
    """The fewest groups of kernels whose time beyond their arithmetic is a tenth of the step, with these shares."""
    bounds = {stage: seconds_of(kernels, card) for stage, kernels in of_stages.items()}
    total = sum(sum(parts.values()) for parts in bounds.values())
    beyond = added_up(
        (f"{stage}: {k.name}", k.seconds(card)[0] - k.number * k.operations / (card.of_the_rate * card.rate))
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


def largest(numbers: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(numbers.items(), key=lambda item: -item[1])


if __name__ == "__main__":
    main()
