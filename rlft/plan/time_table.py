"""The rows of `rlft plan` about time: how often what happens, how long it is estimated to take, and what that costs."""

from __future__ import annotations

from rlft.logger.forecast import FIRST, Forecast
from rlft.logger.price import Price
from rlft.logger.text import duration
from rlft.plan.duration import BETWEEN_STEPS, Duration
from rlft.plan.run_plan import Schedule
from rlft.plan.startup_table import TableRow

MEASURED_LATER = f"after {FIRST} steps rlft watch says it from what they took"


def time_rows(schedule: Schedule, estimated: Duration | str, price: Price | None) -> list[TableRow]:
    """The numbers of the schedule, the estimate or why there is none, and the price."""
    first = schedule.first_evaluation
    when = "none" if first is None else f"before the first step, after {first} of them, and so on to the last"
    table = [("steps", f"{schedule.steps:,}", "")]
    if schedule.checkpoints:
        table.append(("evaluations", f"{schedule.evaluations:,}", when))
        table.append(("checkpoints", f"{schedule.checkpoints:,}", "of the last step as well"))
    later = [MEASURED_LATER] * bool(schedule.checkpoints)  # of a run that writes metrics
    if isinstance(estimated, str):
        table.append(("the run", "no estimate", "; ".join([estimated, *later])))
        said_later = "with price= rlft watch says what it costs" * bool(later)
        return table if price is None else [*table, ("price", str(price), said_later)]
    run = estimated.run
    words = [f"an estimate for {estimated.machine}", *later]
    if schedule.checkpoints:
        words.insert(0, ", ".join(f"{name} {seconds(estimated.stages[name].seconds)}" for name in BETWEEN_STEPS))
    table += [
        ("a step", in_seconds(estimated.step), stages_text(estimated)),
        ("the run", str(run), "; ".join(words)),
    ]
    if price is not None:
        table.append(("price", f"{price.whole(run)} {price.currency}".rstrip(), f"at {price}, without the start"))
    return table


def stages_text(estimated: Duration) -> str:
    """Such as `sample 5.2 s, update 10 s, if all completions have 64 tokens (lower end: 16); without rewards`."""
    stages = {name: stage for name, stage in estimated.stages.items() if name not in BETWEEN_STEPS}
    text = ", ".join(f"{name} {seconds(stage.seconds)}" for name, stage in stages.items())
    if estimated.completion_tokens is None:
        return text
    short, longest = estimated.completion_tokens
    text += f"; if completions have all {longest} tokens (at the lower end {short})"
    return f"{text}; rewards by programs are not counted"


def seconds(number: float) -> str:
    """Seconds in two digits, or as a clock shows them from a minute on.

    >>> seconds(0.0321), seconds(5.24), seconds(61.2), seconds(3601)
    ('0.032 s', '5.2 s', '1:01', '1:00:01')
    """
    return f"{number:.2g} s" if number < 59.5 else duration(number)


def in_seconds(forecast: Forecast) -> str:
    """Such as `5.2 s (1.3 s to 10 s)`."""
    return f"{seconds(forecast.seconds)} ({seconds(forecast.low)} to {seconds(forecast.high)})"
