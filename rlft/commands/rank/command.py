"""`rlft rank`: a person ranks the answers of `rlft sample` in a browser; two people's agreement is printed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from rlft.commands.rank.rankings import Rankings, Row, questions_of, read_rows
from rlft.commands.rank.server import RankServer
from rlft.commands.watch.runs import read_words
from rlft.config.overrides import unquoted
from rlft.system import interrupt
from rlft.system.terminal import command_line, program, say
from rlft.types import counted, require


def command(arguments: Sequence[str]) -> None:
    others, values, _ = read_words("rank", arguments)
    if "agree" in values:
        remedy = "write rlft rank agree=[anna.jsonl,ben.jsonl], and no other key"
        paths = [Path(name) for name in _names(values["agree"])]
        is_alone = len(paths) == 2 and len(values) == 1 and not others
        require(is_alone, "agree", "takes two files", got=" ".join(arguments), remedy=remedy)
        missing = next((path for path in paths if not path.is_file()), None)
        require(missing is None, "agree", "there is no such file", got=missing, remedy=remedy)
        print_agreement(*([row for _, row in read_rows(path, "agree")] for path in paths))
        return
    remedy = "write rlft rank samples=<samples.jsonl> out=<preferences.jsonl>"
    require(not others, "rank", "takes keys alone", got=" ".join(others), remedy=remedy)
    for key in ("samples", "out"):
        require(values.get(key), key, "is missing", remedy=remedy)
    ranker = unquoted(values.get("ranker") or os.environ.get("USER", "user"))
    out, seed = Path(unquoted(values["out"])), values.get("seed", "0")
    require(out.suffix == ".jsonl", "out", "must be a JSONL file", got=out, remedy="name one: out=preferences.jsonl")
    require(seed.isdecimal(), "seed", "must be a whole number, at least 0", got=seed, remedy="try seed=1")
    rankings = Rankings(out, questions_of(_names(values["samples"]), ranker, int(seed)))
    server = RankServer(rankings)
    say(f"{len(rankings.done)} done, {counted(len(rankings.left), 'prompt')} left to rank by {ranker}, in a browser at")
    say(f"  {server.url}\nCtrl-C ends; all rankings until then are in {out}")
    try:
        server.serve_forever()
    finally:
        server.lock.acquire()  # and not released: what is being written is finished, and nothing else is begun
        done, of = len(rankings.done), counted(len(rankings.done) + len(rankings.left), "prompt")
        again = f"continue with {command_line(program(), 'rank', *arguments)}"
        learn = f"learn from them with {command_line(program(), 'rm', f'preferences.path={out}')} model.path=<model>"
        interrupt.set_interrupt_message(f"{done} of {of} are done, in {out}; {again if rankings.left else learn}")


def print_agreement(first: Sequence[Row], second: Sequence[Row]) -> None:
    """Prints how far two people agree on the pairs of answers that both have ranked. UserError: there is none."""
    verdicts, prompts = verdicts_of(first, second)
    number, same = verdicts.total(), sum(count for (one, other), count in verdicts.items() if one == other)
    require(number, "agree", "no two answers were ranked by both", remedy="let both rank the same samples")
    names = " and ".join(", ".join(dict.fromkeys(row["ranker"] for row in rows)) for rows in (first, second))
    found = kappa(verdicts)
    print(f"{names}: {counted(number, 'pair')} in {counted(prompts, 'prompt')} that both ranked")
    print(f"same verdict   {same / number:.3f}  ({same} of {number}: better, worse or equal)")
    print(f"Cohen's kappa  {'undefined' if found is None else f'{found:.3f}'}  (1: always the same; 0: as by chance)")


def verdicts_of(first: Sequence[Row], second: Sequence[Row]) -> tuple[Counter[tuple[int, int]], int]:
    """({(one person's verdict on a pair, the other's): number of pairs}, number of prompts); a verdict is 1, 0 or -1.

    Prompts that one of them has skipped are left out.
    """

    def sign(difference: int) -> int:
        return (difference > 0) - (difference < 0)

    ranked = [{json.dumps(row["messages"]): row for row in rows if not row.get("skipped")} for rows in (first, second)]
    verdicts, prompts = Counter[tuple[int, int]](), 0
    for prompt in ranked[0].keys() & ranked[1].keys():
        one, other = (dict(zip(rows[prompt]["completions"], rows[prompt]["scores"], strict=True)) for rows in ranked)
        pairs = [*combinations(sorted(one.keys() & other.keys()), 2)]
        verdicts.update((sign(one[a] - one[b]), sign(other[a] - other[b])) for a, b in pairs)
        prompts += bool(pairs)
    return verdicts, prompts


def kappa(verdicts: Mapping[tuple[int, int], int]) -> float | None:
    """Cohen's kappa (1960) of `verdicts_of`; None if both call every pair equal, where it is undefined.

    Which answer of a pair comes first is arbitrary: each pair counts in both orders, so 1 is as frequent as -1.
    """
    number = sum(verdicts.values())
    same = sum(count for (one, other), count in verdicts.items() if one == other) / number
    tied = [sum(count for pair, count in verdicts.items() if not pair[i]) / number for i in (0, 1)]
    chance = tied[0] * tied[1] + (1 - tied[0]) * (1 - tied[1]) / 2
    return None if chance == 1 else (same - chance) / (1 - chance)


def _names(text: str) -> list[str]:
    """The names in `a` or `[a,b]`."""
    is_list = text[:1] == "[" and text[-1:] == "]"
    return [unquoted(name.strip()) for name in text[1:-1].split(",")] if is_list else [unquoted(text)]
