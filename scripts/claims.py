"""Measures what texts on reinforcement learning of language models claim: runs, a table, a picture, docs/claims.md.

    python scripts/claims.py                      # every claim of claims.yaml, then the page
    python scripts/claims.py lambda baseline      # these alone
    python scripts/claims.py --page               # runs nothing: page and picture from docs/claims.json

An arm of a claim is a few `rlft` command lines, once a seed, in <out>/<claim>/<arm>/seed_<k>; or, where a claim is
about gradients, what `gradients` measures of samples that one command line drew. What is in docs/claims.json is not
measured again; a run that was stopped resumes. A claim holds if each of its checks does.

Exit codes: 0 done, 1 a command failed, 2 there is no such claim, 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from bench_work import REPOSITORY, machine, table as markdown
from claim_picture import draw
from significance import half_interval

HERE = Path(__file__).parent
Values = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""{arm: {seed: {quantity: value}}}"""
REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "first": lambda values: values[0], "last": lambda values: values[-1], "mean": statistics.fmean, "max": max,
    "late": lambda values: statistics.fmean(values[-5:]),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim and how it is measured.

    Args:
        says: the claim, in one sentence.
        arms: {name: command lines of `rlft`, the last of which is the run that is measured}; {run} is its folder,
            {out} that of all claims, {seed} the seed.
        quantities: {name: [file of the run's folder without .jsonl, key, how its lines become one number]}; [plan, key]
            is a number of `rlft plan --json` with the arm's words. Empty where `gradients` measures.
        gradients: {arm: [algorithm, {its keys}]}, whose gradients are compared; the first arm is the unbiased one.
        checks: [arm, quantity, sign, other arm or a number]; signs: < and > (the interval of the difference is on this
            side of 0), ~ (it holds 0), not below and not above (its upper, lower end is on the other side).
        drawn: the quantity in the picture.
        samples: the command line that draws the samples of `gradients`.
        made_by: {script: folder in {out} that it makes with --out}, before the first run.
        found: the result in a few words. note: what is to be said about it.
    """

    title: str
    says: str
    checks: Sequence[tuple[str, str, str, str | float]]
    drawn: str
    found: str
    quantities: Mapping[str, Sequence[str]] = field(default_factory=dict)
    arms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gradients: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    samples: str = ""
    made_by: Mapping[str, str] = field(default_factory=dict)
    seeds: int = 5
    note: str = ""

    @property
    def names(self) -> list[str]:
        return list(self.arms or self.gradients)


class FailedCommand(Exception):
    """A command line of `rlft` failed; the text says which, and its last words."""


def read_claims(read: Mapping[str, Any]) -> dict[str, Claim]:
    """{name: claim} of what claims.yaml holds, where `{word}` in a command line stands for an entry of `words`."""
    words = {f"{{{name}}}": text for name, text in read["words"].items()}

    def filled(text: str) -> str:
        for name, value in words.items():
            text = text.replace(name, value)
        return text

    def claim(entry: Mapping[str, Any]) -> Claim:
        arms = {arm: [*map(filled, lines)] for arm, lines in entry.get("arms", {}).items()}
        return Claim(**{**entry, "arms": arms, "samples": filled(entry.get("samples", ""))})

    return {name: claim(entry) for name, entry in read["claims"].items()}


# -- measuring ---------------------------------------------------------------------------------------------------------
class Commands:
    """Runs command lines of `rlft`, each in a fork of one process that has imported the libraries (rlft_forks.py)."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, line: str, log: Path) -> None:
        """Raises FailedCommand."""
        if self.process is None:
            command = [sys.executable, str(HERE / "rlft_forks.py"), "torch", "transformers", "peft"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._read()
        log.parent.mkdir(parents=True, exist_ok=True)
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"arguments": line.split(), "cwd": str(Path.cwd()), "log": str(log)}) + "\n"
        )
        self.process.stdin.flush()
        if code := self._read()["code"]:
            said = [text for text in log.read_text().splitlines() if text.strip()]
            raise FailedCommand(f"rlft {line} exits with {code}: {said[-1] if said else 'it said nothing'}; see {log}")

    def _read(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or '{"code": "unknown"}')


def measure(name: str, claim: Claim, out: Path, seeds: Sequence[int], results: Path) -> None:
    """Measures what the file of results does not have yet, and writes it after each arm and seed."""
    commands = Commands()
    for script, folder in claim.made_by.items():
        if not (out / folder).exists():
            subprocess.run([sys.executable, str(HERE / script), "--out", str(out / folder)], check=True)
    for seed in seeds:
        for arm in claim.names:
            if str(seed) in read_results(results).get(name, {}).get(arm, {}):
                continue
            print(f"{name}: {arm}, seed {seed}", flush=True)
            begun, folder = datetime.now(UTC), out / name / arm.replace(",", "").replace(" ", "-") / f"seed_{seed}"
            if claim.gradients:
                folder = out / "samples" / f"seed_{seed}"  # claims of the same command share them
            lines = [line.format(run=folder, out=out, seed=seed) for line in claim.arms.get(arm, [claim.samples])]
            for i, line in enumerate(lines):
                own = "" if "hydra.run.dir=" in line else f" hydra.run.dir={folder}"
                commands.run(f"{line}{own} seed={seed} resume=auto", folder.with_name(f"{folder.name}.{i}.log"))
            if claim.gradients:
                from claim_gradients import gradients  # torch is not needed for a page

                found = gradients(claim.gradients, folder)
            else:
                found = {arm: quantities(claim, folder, lines[-1])}
            made = {"date": f"{begun:%Y-%m-%d}", "machine": machine("cpu"), **origin(folder)}
            for of_arm, values in found.items():
                everything = read_results(results)
                everything.setdefault(name, {}).setdefault(of_arm, {})[str(seed)] = {**values, "made": made}
                write_results(everything, results)


def origin(folder: Path) -> dict[str, str]:
    """Commit and torch of a run, from its config.yaml."""
    noted = yaml.safe_load((folder / "config.yaml").read_text()).get("origin", {})
    return {key: str(noted.get(key, "unknown")) for key in ("commit", "torch")}


def quantities(claim: Claim, folder: Path, line: str) -> dict[str, float]:
    """A run's numbers by the claim's names."""
    from rlft.runs.lines import read_lines

    values = {}
    for quantity, (file, key, *how) in claim.quantities.items():
        if file == "plan":
            words = [word for word in line.split()[1:] if not word.startswith(("hydra.", "resume="))]
            command = [sys.executable, "-m", "rlft.cli", "plan", *words, "--json"]
            planned = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            values[quantity] = float(json.loads(planned)[key])
            continue
        read = [row[key] for row in read_lines(folder / f"{file}.jsonl") if row.get(key) is not None]
        values[quantity] = read if how[0] == "each" else float(REDUCE[how[0]](read))
    return values


# -- the page ----------------------------------------------------------------------------------------------------------
def read_results(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def write_results(everything: Mapping[str, Any], file: Path) -> None:
    """JSON with a line for each arm and seed."""
    from rlft.system.files import write_atomically

    def nested(value: Mapping[str, Any], depth: int) -> str:
        if not depth:
            return json.dumps(value)
        entries = ",\n".join(f"{json.dumps(key)}: {nested(inner, depth - 1)}" for key, inner in value.items())
        return f"{{\n{entries}\n}}"

    write_atomically(file, nested(everything, 3) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a claim in words, with the mean difference over the seeds and its 95 % interval."""

    text: str
    holds: bool


def checked(values: Values, rule: tuple[str, str, str, str | float]) -> Check:
    """arm less other, paired by seed; a quantity of the same arm where `other` names no arm, or a number."""
    arm, quantity, sign, other = rule
    mine = {seed: found[quantity] for seed, found in values[arm].items()}
    if isinstance(other, str):
        of_arm = other in values
        theirs = {
            seed: found[quantity if of_arm else other] for seed, found in values[other if of_arm else arm].items()
        }
    else:
        theirs = dict.fromkeys(mine, float(other))
    less = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    mean, half = statistics.fmean(less), half_interval(less)
    low, high = (-math.inf, math.inf) if half is None else (mean - half, mean + half)
    holds = {"<": high < 0, ">": low > 0, "~": low <= 0 <= high, "not below": high >= 0, "not above": low <= 0}[sign]
    words = {"<": "is below", ">": "is above", "~": "is not told apart from"}.get(sign, f"is {sign}")
    named = other if isinstance(other, str) else f"{other:.3g}"
    text = f"{arm}: {quantity} {words} {named}: {mean:+.3g}, {low:+.3g} to {high:+.3g}"
    return Check(text=text, holds=holds)


def is_complete(claim: Claim, values: Values) -> bool:
    return all(len(values.get(arm, {})) >= claim.seeds for arm in claim.names)


def page(claims: Mapping[str, Claim], results: Mapping[str, Values], intro: str) -> str:
    """The Markdown of claims.md: the table of all verdicts, then a section a claim."""
    done = {name: claim for name, claim in claims.items() if is_complete(claim, results.get(name, {}))}
    checks = {name: [checked(results[name], rule) for rule in claim.checks] for name, claim in done.items()}
    rows = [
        [f"[{claim.title}](#{anchor(claim.title)})", claim.found, verdict(checks[name])] for name, claim in done.items()
    ]
    left = [f"{claim.title} (`scripts/claims.py {name}`)" for name, claim in claims.items() if name not in done]
    parts = [
        intro.strip(),
        markdown(["claim", "measured", "verdict"], rows),
        "![The arms of each claim: a point a seed, means with 95 % intervals](claims.png)",
        *(section(name, claim, results[name], checks[name]) for name, claim in done.items()),
        *([f"## Not measured yet\n\n{'; '.join(left)}."] if left else []),
    ]
    return "\n\n".join(parts) + "\n"


def anchor(title: str) -> str:
    """GitHub's name of a heading: "Lambda, measured" -> "lambda-measured"."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def verdict(checks: Sequence[Check]) -> str:
    return "holds here" if all(check.holds for check in checks) else "does not hold here"


def section(name: str, claim: Claim, values: Values, checks: Sequence[Check]) -> str:
    """A claim with its numbers, its checks, its note, and where it was measured."""
    seeds = [found for arm in claim.names for found in values[arm].values()]
    keys = [key for key, value in seeds[0].items() if isinstance(value, float)]
    rows = [[arm, *(interval([found[key] for found in values[arm].values()]) for key in keys)] for arm in claim.names]
    lines = [f"- {check.text}{'' if check.holds else ' (**does not hold**)'}." for check in checks]

    def made(key: str) -> str:
        return ", ".join(sorted({found["made"][key] for found in seeds}))

    where = f"{made('machine')}, shared, torch {made('torch')}, commit {made('commit')}, {made('date')}"
    again = f"`python scripts/claims.py {name}`: {claim.seeds} seeds, {where}."
    body = [
        textwrap.fill(claim.says, 120),
        markdown(["", *keys], rows),
        "\n".join(lines),
        textwrap.fill(claim.note, 120),
        again,
    ]
    return "\n\n".join([f"## {claim.title}", *filter(None, body)])


def interval(values: Sequence[float]) -> str:
    """Mean ± half of its 95 % interval.

    >>> interval([0.25, 0.75])
    '0.5 ± 3.2'
    """
    return f"{statistics.fmean(values):.3g} ± {half_interval(values) or 0:.2g}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="claims.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of claims; none: all of them")
    parser.add_argument(
        "--seeds", type=int, nargs="+", metavar="K", help="default: as many as a claim asks for, from 0"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/claims"), help="folder of the runs (%(default)s)")
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="folder of claims.json, .md and .png")
    parser.add_argument("--definitions", type=Path, default=HERE / "claims.yaml", help="the claims (%(default)s)")
    parser.add_argument("--page", action="store_true", help="measure nothing: the page from claims.json")
    options = parser.parse_args(arguments)
    definitions = yaml.safe_load(options.definitions.read_text())
    claims, results = read_claims(definitions), options.docs / "claims.json"
    if unknown := [name for name in options.names if name not in claims]:
        print(
            f"claims.py: names: there is no such claim, got {unknown[0]}; choose of {', '.join(claims)}",
            file=sys.stderr,
        )
        return 2
    try:
        for name in [] if options.page else options.names or claims:
            out = options.out.resolve()
            out.mkdir(parents=True, exist_ok=True)
            for file, text in definitions.get("files", {}).items():
                (out / file).write_text(text)
            measure(name, claims[name], out, options.seeds or range(claims[name].seeds), results)
    except FailedCommand as failure:
        print(f"claims.py: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr)
        return 130
    (options.docs / "claims.md").write_text(page(claims, read_results(results), definitions["intro"]))
    recorded = read_results(results)
    panels = [
        (c.title, c.drawn, recorded[name]) for name, c in claims.items() if is_complete(c, recorded.get(name, {}))
    ]
    if panels:
        draw(panels, options.docs / "claims.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
