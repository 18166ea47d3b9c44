"""Seconds of a step with conversations of 1, 2 and 4 turns and without an environment, the same tokens sampled in all.

    python scripts/bench_turns.py                                # two cores, five minutes
    python scripts/bench_turns.py --size 1m --rounds 1 --steps 1

A model with random weights, whose turns end after so many tokens: a completion of 64 is one turn of 64, two of 32 or
four of 16, each answered with 16 letters. The kinds are run in turn (A B C D A B C D). Leaves turns.md in <out>.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from bench_work import run_rlft, table, where_and_when

from rlft.commands.doctor.work import SIZES, Workload, make_model
from rlft.config.compose import compose
from rlft.generation.engine import EngineArgs
from rlft.generation.transformers import Transformers, TransformersGenerator
from rlft.types import Completion, FinishReason, Group, Prompt, Sampling

NO_ENVIRONMENT = 0
TURNS = (NO_ENVIRONMENT, 1, 2, 4)
STAGES = ("sample", "train", "step")
ANSWER = "the next question"[:16]
END = "<|turn|>"
END_ID = 256
"""The token behind the 256 letters of the benchmark's tokenizer."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}>{% endif %}"
    "{{ message['content'] + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


# -- what is measured --------------------------------------------------------------------------------------------------
class FixedTurns(Transformers):
    """The transformers engine, whose turns are over, and not cut, when their tokens are used up."""

    def open(self, args: EngineArgs) -> TransformersGenerator:
        return Ending(args.slot, args.tokenizer, args.device, self.batch_size, weights=self.weights)


class Ending(TransformersGenerator):
    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        return [
            replace(group, rollouts=tuple(replace(r, completion=ended(r.completion)) for r in group.rollouts))
            for group in super().sample(prompts, n, seeds, sampling)
        ]


def ended(completion: Completion) -> Completion:
    return replace(completion, finish_reason=FinishReason.stop)


class Game:
    """Answers so many turns with the same letters; the last one ends it."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, **row: object) -> None:
        self.left = self.turns

    def step(self, text: str) -> tuple[str, None, bool]:
        self.left -= 1
        return ANSWER, None, self.left == 0


def with_turns(folder: Path) -> Path:
    """The model in this folder, with a special token of its own that ends a turn, and a chat template; made once."""
    from transformers import AutoTokenizer

    if AutoTokenizer.from_pretrained(folder).chat_template is None:
        written = json.loads((folder / "tokenizer.json").read_text())
        written["model"]["vocab"][END] = END_ID
        (folder / "tokenizer.json").write_text(json.dumps(written))
        tokenizer = AutoTokenizer.from_pretrained(folder, additional_special_tokens=[END])
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)(END)["input_ids"] == [END_ID], "it is in the model's vocabulary"
    return folder


def words_of(turns: int, work: Workload) -> list[str]:
    """What `rlft train` is told of conversations of so many turns, which sample as many tokens as the work says."""
    between = len(END + ANSWER + END + ">") - 2 * (len(END) - 1)
    words = ["generation=fixed_turns", "prompts.style=chat", f"prompts.max_tokens={work.prompt_tokens + 2}"]
    if turns == NO_ENVIRONMENT:
        return words
    assert work.completion_tokens % turns == 0, "turns are equally long"
    return [
        *words,
        f"generation.max_tokens={work.completion_tokens + (turns - 1) * between}",
        "environment=game",
        "environment.factory=bench_turns.Game",
        f"environment.arguments={{turns: {turns}}}",
        f"environment.turn_tokens={work.completion_tokens // turns}",
        f"environment.max_turns={turns}",
        "environment.workers=1",
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="17m")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="sampled in all turns of a completion")
    parser.add_argument("--group", type=int, default=8, help="completions of each of 8 prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured of each run, behind one that is not")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    options = parser.parse_args(words)
    out = options.out.resolve()
    work = Workload(prompt_tokens=options.prompt, completion_tokens=options.tokens, group=options.group)
    model = with_turns(make_model(out / f"turns-{options.size}", SIZES[options.size], "float32"))
    write_engine(out / "configs" / "generation" / "fixed_turns.yaml")
    seconds: dict[int, list[dict[str, float]]] = {turns: [] for turns in TURNS}
    for number in range(options.rounds):
        for turns in TURNS:
            told = [f"--config-dir={out / 'configs'}", *words_of(turns, work)]
            seconds[turns] += run_rlft(out / "run", str(model), work, options.steps, told, embedded=False).seconds
            print(f"round {number + 1}, {name_of(turns)}: {seconds[turns][-1]['step']:.2f} s a step", flush=True)
    text = report(seconds, work, options)
    (out / "turns.md").write_text(text + "\n")
    print(text)


def write_engine(file: Path) -> None:
    """The YAML of FixedTurns, with the keys of the transformers engine."""
    keys: dict[str, Any] = compose([])["generation"]["transformers"] | {"_target_": "bench_turns.FixedTurns"}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"defaults": ["auto", "_self_"], "engine": "fixed_turns", "fixed_turns": keys}))


def name_of(turns: int) -> str:
    return "no environment" if turns == NO_ENVIRONMENT else f"{turns} turn{'s' * (turns > 1)}"


def report(seconds: dict[int, list[dict[str, float]]], work: Workload, options: argparse.Namespace) -> str:
    middle = {
        turns: {stage: statistics.median(step[stage] for step in own) for stage in STAGES}
        for turns, own in seconds.items()
    }
    rows = []
    for turns, own in seconds.items():
        cells = [
            f"{middle[turns][s]:.2f} ({min(step[s] for step in own):.2f} to {max(step[s] for step in own):.2f})"
            for s in STAGES
        ]
        rate = work.completions * work.completion_tokens / middle[turns]["step"]
        share = middle[NO_ENVIRONMENT]["step"] / middle[turns]["step"]
        rows.append([name_of(turns), *cells, f"{rate:,.0f}", f"{share:.2f}"])
    head = ["conversations", *(f"{stage}, s" for stage in STAGES), "sampled tokens/s", "of no environment"]
    return (
        f"{table(head, rows)}\n\n{work.prompts} prompts of {work.prompt_tokens} tokens x {work.group} completions of"
        f" {work.completion_tokens} sampled tokens, model {options.size}; train is credit and update. Medians (smallest"
        f" to largest) of {options.rounds} runs of each kind in turn, {options.steps} steps each. {where_and_when()}."
    )


if __name__ == "__main__":
    main()
