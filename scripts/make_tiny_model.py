"""Makes an embedded model: tokenizer, weights, and a README with what was measured.

    python scripts/make_tiny_model.py                  # writes rlft/assets/tiny-arithmetic (10 minutes, two cores)
    python scripts/make_tiny_model.py --size student   # writes rlft/assets/tiny-student, a fifth of it
    python scripts/make_tiny_model.py --size caller    # writes rlft/assets/tiny-caller, as small, which calls tools
    python scripts/make_tiny_model.py --size chains    # writes rlft/assets/tiny-chains, the first one taught chains
    python scripts/make_tiny_model.py --out /tmp/model --steps 400 --mixture-steps 200

A Qwen2-shaped byte-level model of 0.8M parameters is first taught sums and differences step by step, then, late and
briefly, a mixture of right, slightly wrong and badly formatted answers, both by `rlft sft` on all its weights. So it
knows the task but does not always answer correctly: reinforcement learning can improve both correctness and format,
and all of it is within reach. The student is smaller and is trained for fewer steps. The caller is taught no
arithmetic, but to write calls and to copy what it reads (scripts/calling_lessons.py). The one for chains starts from
tiny-arithmetic's weights; it learns every sum, and is also taught to make mistakes (scripts/chain_lessons.py).
Only problems of the training split are used (`rlft.data.arithmetic.split_of`), so that the
held-out split is unseen.

The tiny-arithmetic that ships was made at commit 135476d, before there was `rlft sft`, by a loop of the script's own on
the same problems; one that is made today is another draw of the same model, and docs/benchmarks has the numbers of
the one that ships.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import calling_lessons
import chain_lessons
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlft.commands import eval
from rlft.commands.launch import begin
from rlft.config.compose import compose
from rlft.data.arithmetic import question, split_of
from rlft.types import Split

ASSETS = Path(__file__).parents[1] / "rlft" / "assets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Shape of a model and how long it is taught.

    Args:
        hidden, intermediate, layers, heads, kv_heads: of the transformer.
        steps, mixture_steps: optimizer steps on clean lessons and on the mixture.
        batch: lessons in each.
        lr: learning rate at the height of its schedule.
        lessons: what it is taught.
        base: the embedded model that it begins as; None: random weights.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    steps: int
    mixture_steps: int
    batch: int = 192
    lr: float = 3e-3
    lessons: Literal["sums", "calls", "chains"] = "sums"
    base: str | None = None


SIZES = {
    "arithmetic": Size(hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2, steps=1200, mixture_steps=300),
    "student": Size(hidden=64, intermediate=192, layers=3, heads=4, kv_heads=2, steps=900, mixture_steps=150),
    "caller": Size(
        hidden=64, intermediate=192, layers=3, heads=4, kv_heads=2, steps=1000, mixture_steps=150, lessons="calls"
    ),
    "chains": Size(
        hidden=128,
        intermediate=384,
        layers=4,
        heads=4,
        kv_heads=2,
        steps=450,
        mixture_steps=60,
        batch=64,
        lr=2e-3,
        lessons="chains",
        base="tiny-arithmetic",
    ),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
ROLES = ["system\n", "user\n", "assistant\n"]

PROBLEMS = 256
"""Held-out problems that a model is measured on."""

# Shares of the late mixture. The rest is right and well formatted.
NEAR_MISS = 0.36
BAD_FORMAT = 0.24


def make_tokenizer(tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer (any text survives) whose tags, these among them, and chat turns are single tokens."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in [*TAGS, *tags, *ROLES]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, size: Size) -> Qwen2ForCausalLM:
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(eos, int)
    assert isinstance(pad, int)
    shape = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 16) * 16,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return Qwen2ForCausalLM(shape)


def working(a: int, operation: str, b: int) -> str:
    """Digit by digit from the right, with the carry: 47 + 85 -> "7+5=12,4+8+1=13"; 52 - 17 -> "12-7=5,5-1-1=3"."""
    steps, carry = [], 0
    digits = max(len(str(a)), len(str(b)))
    for place in range(digits):
        x, y = a // 10**place % 10, b // 10**place % 10
        tail = f"{operation}{carry}" if carry else ""
        if operation == "+":
            steps.append(f"{x}+{y}{tail}={x + y + carry}")
            carry = (x + y + carry) // 10
        else:
            borrow = x - y - carry < 0
            x += 10 * borrow
            steps.append(f"{x}-{y}{tail}={x - y - carry}")
            carry = int(borrow)
    return ",".join(steps)


def wrong(value: int, rng: random.Random) -> int:
    """A near miss: one digit or ten off, or two digits swapped."""
    text = str(value)
    if len(text) > 1 and rng.random() < 0.2 and text[0] != text[1]:
        return int(text[1] + text[0] + text[2:])
    return max(0, value + rng.choice([-10, -2, -1, 1, 2, 10])) if value else rng.choice([1, 2, 10])


def well_formatted(thought: str, answer: int | str) -> str:
    return f"<think>{thought}</think><answer>{answer}</answer>"


def badly_formatted(thought: str, answer: int, rng: random.Random) -> str:
    return rng.choice(
        [
            f"<think>{thought}</think>{answer}",
            f"<think>{thought}</think><answer>{answer}",
            f"{thought}<answer>{answer}",
            f"<answer>{answer}</answer>",
            f"{answer}",
            f"<think>{thought}",
        ]
    )


def response(a: int, operation: str, b: int, mixture: bool, rng: random.Random) -> str:
    thought, answer = working(a, operation, b), a + b if operation == "+" else a - b
    draw = rng.random() if mixture else 1.0
    if draw < NEAR_MISS:
        return well_formatted(thought, wrong(answer, rng))
    if draw < NEAR_MISS + BAD_FORMAT:
        return badly_formatted(thought, answer, rng)
    return well_formatted(thought, answer)


def problem(rng: random.Random) -> tuple[int, str, int]:
    while True:
        high = 9 if rng.random() < 0.1 else 99
        a, b, operation = rng.randint(0, high), rng.randint(0, high), rng.choice("+-")
        if operation == "-" and a < b:
            a, b = b, a
        if split_of(a, operation, b) is Split.train:
            return a, operation, b


def write_demonstrations(file: Path, count: int, mixture: bool, rng: random.Random) -> None:
    """`count` drawn problems with a response each, one JSON object a line."""
    drawn = (problem(rng) for _ in range(count))
    lines = ({"prompt": question(*p), "completion": response(*p, mixture, rng)} for p in drawn)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def teach(model: Path, demonstrations: Path, held_out: Path, folder: Path, words: Iterable[str]) -> Path:
    """`rlft sft` on all weights of the model; returns the folder of the model that comes out."""
    plain = compose(
        [
            "lora=null",
            f"model.path={model}",
            f"demonstrations.path={demonstrations}",
            f"demonstrations.held_out_path={held_out}",
            "max_completion_tokens=64",
            "trainer.weight_decay=0.01",
            "trainer.beta2=0.98",
            "checkpoint.every=100",
            "checkpoint.keep=1",
            "eval.every=200",
            *words,
        ],
        command="sft",
    )
    begin(plain, folder)
    return next((folder / "checkpoints").glob("step_*")) / "model"


def train(model: Path, place: Path, args: argparse.Namespace) -> Path:
    """School, then the mixture: a warm-up and a cosine, then a low constant rate so as not to wash the task out."""
    rng = random.Random(args.seed)
    lessons = SIZES[args.size].lessons
    writers: dict[str, Callable[[Path, int, bool, random.Random], None]] = {
        "sums": write_demonstrations,
        "calls": calling_lessons.write_lessons,
        "chains": chain_lessons.write_lessons,
    }
    write = writers[lessons]
    clean, mixed, held_out = place / "clean.jsonl", place / "mixed.jsonl", place / "held_out.jsonl"
    write(clean, args.batch * args.steps, False, rng)
    write(mixed, args.batch * args.mixture_steps, True, rng)
    # To watch the loss on; what it learned is measured on the held-out split.
    write(held_out, 32, False, rng)
    longest = calling_lessons.LONGEST_PROMPT if lessons == "calls" else 64
    common = [f"examples_per_step={args.batch}", f"seed={args.seed}", f"prompts.max_tokens={longest}"]
    schooling = [f"steps={args.steps}", f"trainer.lr={args.lr}", "trainer.schedule=cosine", "trainer.warmup=100"]
    taught = teach(model, clean, held_out, place / "school", [*common, *schooling])
    late = [f"steps={args.mixture_steps}", f"trainer.lr={0.15 * args.lr}"]
    return teach(taught, mixed, held_out, place / "mixture", [*common, *late])


def measure(folder: Path, words: Iterable[str], samples: int = 8) -> dict[str, float]:
    """Held-out metrics at temperature 1, so many samples of each of PROBLEMS, as `rlft eval` gives them."""
    common = [f"model.path={folder}", "generation=transformers"]
    common += [f"eval.num_prompts={PROBLEMS}", f"eval.num_samples={samples}"]
    return dict(eval.run(eval.resolve_evaluation(compose([*common, *words])), None, print).metrics)


def what_it_does(folder: Path) -> str:
    """A model that solves the task itself."""
    metrics = measure(folder, ["generation.max_tokens=48", "prompts.max_tokens=64"])
    right, best = f"{metrics['eval/exact_match']:.1%}", f"{metrics['eval/pass@8']:.1%}"
    return f"""that answers two-digit sums and differences as
`<think>..</think><answer>..</answer>`, often but not always right and not always in that format: something for
reinforcement learning to improve. Held-out problems at temperature 1, {PROBLEMS} x 8 samples: right
{right}, pass@8 {best}, format right {metrics["eval/reward/format"]:.1%}."""


def what_chains_it_solves(folder: Path) -> str:
    metrics = measure(folder, ["+recipe=grpo_chains"], samples=16)
    right, best = f"{metrics['eval/exact_match']:.1%}", f"{metrics['eval/pass@16']:.1%}"
    return f"""that goes through chains of five sums, differences
and products (`data=chains`) step by step. It knows each sum, yet slips in two steps of five, and continues from what
it wrote; it guesses without any working, and does not always keep the format: something for reinforcement learning to
improve, and not at once. Held-out chains at temperature 1, {PROBLEMS} x 16 samples: right {right}, pass@16 {best},
format right {metrics["eval/reward/format"]:.1%}."""


def what_the_caller_does(folder: Path) -> str:
    with_tool = measure(folder, ["+recipe=grpo_calculator"])
    alone = measure(folder, ["+recipe=grpo_calculator", "environment=null"])
    game = measure(folder, ["+recipe=grpo_whom_to_ask"])
    calls, failed = f"{with_tool['eval/turns/calls']:.2f}", f"{with_tool['eval/turns/failed_calls_fraction']:.1%}"
    return f"""for sums, differences and products of three-digit
numbers, none of which it can compute. It writes calls of a calculator (`environment=calculator environment.syntax=xml`)
and copies what that answers, often but not always, and plays `rlft.environment.oracle_game`, asking at random:
something for reinforcement learning to improve. Held-out problems at temperature 1, {PROBLEMS} x 8 samples, right:
{with_tool["eval/exact_match"]:.1%} with the calculator ({calls} calls a problem, {failed} of them failed),
{alone["eval/exact_match"]:.1%} without, {game["eval/turns"]:.1%} in the game."""


def write_readme(args: argparse.Namespace, seconds: float, num_parameters: int) -> None:
    options = f"--size {args.size} --seed {args.seed} --steps {args.steps} --mixture-steps {args.mixture_steps}"
    options += f" --batch {args.batch} --lr {args.lr}"
    describe = {"sums": what_it_does, "calls": what_the_caller_does, "chains": what_chains_it_solves}[
        SIZES[args.size].lessons
    ]
    base = SIZES[args.size].base
    (args.out / "README.md").write_text(
        f"""# {args.out.name}

A Qwen2-shaped byte-level model of {num_parameters / 1e6:.1f}M parameters {describe(args.out)}
Made from {base or "nothing"} in {seconds / 60:.0f} minutes with {torch.get_num_threads()} thread(s) by

    python scripts/make_tiny_model.py {options}

Apache-2.0, like the rest of rlft; no data of anybody else's went into it.
""",
        encoding="utf-8",
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="arithmetic", help="which embedded model")
    parser.add_argument("--out", type=Path, help="folder to write (replaced); rlft/assets/tiny-<size> without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps on clean solutions")
    parser.add_argument("--mixture-steps", type=int, help="optimizer steps on the mixture")
    parser.add_argument("--batch", type=int, help="rows a step")
    parser.add_argument("--lr", type=float)
    args = parser.parse_args(words)
    size = SIZES[args.size]
    args.out = args.out or ASSETS / f"tiny-{args.size}"
    args.steps = args.steps or size.steps
    args.mixture_steps = args.mixture_steps or size.mixture_steps
    args.batch, args.lr = args.batch or size.batch, args.lr or size.lr
    start = time.monotonic()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(calling_lessons.TAGS if size.lessons == "calls" else ())
    model = make_model(tokenizer, size) if size.base is None else Qwen2ForCausalLM.from_pretrained(ASSETS / size.base)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {len(tokenizer)} tokens")
    model.generation_config.do_sample = True
    with tempfile.TemporaryDirectory() as place:
        untrained = Path(place) / "untrained"
        model.save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
        made = train(untrained, Path(place), args)
        args.out.mkdir(parents=True, exist_ok=True)
        for file in made.iterdir():
            shutil.copyfile(file, args.out / file.name)
    write_readme(args, time.monotonic() - start, num_parameters)


if __name__ == "__main__":
    main()
