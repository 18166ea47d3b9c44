"""How near the training part of a step comes to this machine's arithmetic limit.

    python scripts/bench_limit.py
    python scripts/bench_limit.py --shapes 384+64 --size 0.5b

For each shape: the operations that the step needs (`rlft.commands.doctor.work`), the rate at which this machine
makes the same matrix products, measured before and after the step in turn, the seconds that this would take, and the
seconds that credit and update took. 1 / their ratio is the share of the limit that is reached.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from bench_work import default_dtype, device_and_dtype, run_rlft, table, where_and_when

from rlft.commands.doctor.work import SIZES, Shape, Workload, make_model, product_rate, step_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["128+128", "384+64", "64+512"])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--size", choices=list(SIZES), default="17m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("bench"))
    asked = parser.parse_args()
    out, size = asked.out.resolve(), SIZES[asked.size]
    out.mkdir(parents=True, exist_ok=True)
    model = str(make_model(out / asked.size, size, default_dtype()))
    rows = []
    for shape in asked.shapes:
        prompt, completion = map(int, shape.split("+"))
        work = Workload(group=asked.group, prompt_tokens=prompt, completion_tokens=completion)
        tokens = min(prompt + asked.group * completion, 4096)
        rates, seconds = [product_rate(size, tokens, *device_and_dtype())], []
        for _ in range(asked.rounds):
            measured = run_rlft(out / "run", model, work, asked.steps, asked.override, embedded=False)
            seconds += [step["train"] for step in measured.seconds]
            rates.append(product_rate(size, tokens, *device_and_dtype()))
        rate, took, flops = (
            statistics.median(rates),
            statistics.median(seconds),
            step_flops(Shape.of_size(size, work.rank), work),
        )
        rows.append(
            [
                work.name,
                f"{flops / 1e9:,.0f}",
                f"{rate / 1e9:,.0f} ({min(rates) / 1e9:,.0f} to {max(rates) / 1e9:,.0f})",
                f"{flops / rate:.2f}",
                f"{took:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
                f"{took * rate / flops:.2f}",
                f"{flops / rate / took:.0%}",
            ]
        )
        print(rows[-1], flush=True)
    head = ["work", "GFLOP", "products, GFLOP/s", "limit, s", "credit + update, s", "times the limit", "of the limit"]
    text = table(head, rows) + f"\n\n{where_and_when()}."
    (out / "limit.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
