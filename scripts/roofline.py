"""What a step should take on a GPU, by the model of rlft/plan/roofline.py: nothing here is a measurement.

python scripts/roofline.py                                   # the table of docs/benchmarks/performance.md
python scripts/roofline.py --prompts 32 --group 8 --prompt 150 --completion 512 --budget 32768
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from rlft.commands.doctor.work import SIZES, Size
from rlft.model.activations import LayerSizes
from rlft.plan.cards import CARDS, Machine
from rlft.plan.roofline import Kernel, Network, Work, publishing, sampling, seconds_of, update

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


def stages(name: str, work: Work) -> dict[str, list[Kernel]]:
    model = MODELS[name]
    return {
        "sample": list(sampling(model, work)),
        "update": list(update(model, work)),
        "publish": list(publishing(model)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("prompts", 32), ("group", 8), ("prompt", 150), ("completion", 512), ("budget", 32768)):
        parser.add_argument(f"--{name}", type=int, default=value)
    work = Work(**vars(parser.parse_args()))
    print(f"A model, not a measurement: {work.prompts} x {work.group}, {work.prompt} + {work.completion} tokens.\n")
    columns = ("sample, s", "update, s", "publish, s", "step, s", "the next ten per cent")
    print(f"| {' | '.join(('model', 'card', *columns))} |")
    print("|" + " --- |" * (2 + len(columns)))
    for model in MODELS:
        for name, card in ((name, CARDS[name]) for name in SHOWN):
            print(row(model, name, card, work))


def row(model: str, name: str, card: Machine, work: Work) -> str:
    of_stages = stages(model, work)
    seconds = [seconds_of(kernels, card) for kernels in of_stages.values()]
    cells = [f"{number:.2f}" for number in (*seconds, sum(seconds))]
    return f"| {' | '.join([model, name, *cells, gains(of_stages, card)])} |"


def gains(of_stages: dict[str, list[Kernel]], card: Machine) -> str:
    """The fewest groups of kernels whose time beyond their arithmetic is a tenth of the step, with these shares."""
    total = sum(seconds_of(kernels, card) for kernels in of_stages.values())
    beyond: defaultdict[str, float] = defaultdict(float)
    for stage, kernels in of_stages.items():
        if (seconds := seconds_of(kernels, card)) > sum(k.seconds(card) for k in kernels):
            beyond[f"{stage}: launches"] += seconds
            continue
        for k in kernels:
            beyond[f"{stage}: {k.name}"] += k.seconds(card) - k.number * k.operations / (card.of_the_rate * card.rate)
    told, so_far = [], 0.0
    for name, seconds in sorted(beyond.items(), key=lambda item: -item[1]):
        told.append(f"{name} {seconds / total:.0%}")
        so_far += seconds / total
        if so_far >= 0.1:
            break
    return ", ".join(told)


if __name__ == "__main__":
    main()
