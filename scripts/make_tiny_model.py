"""Makes the embedded model from scratch: tokenizer, weights, and a README with what was measured.

    python scripts/make_tiny_model.py                  # rewrites rlft/assets/tiny-arithmetic (10 minutes, two cores)
    python scripts/make_tiny_model.py --out /tmp/model --steps 400 --mixture-steps 200

A Qwen2-shaped byte-level model of 0.8M parameters is first taught sums and differences step by step, then, late and
briefly, a mixture of right, slightly wrong and badly formatted answers. So it knows the task but doesn't always say so:
there is something to learn for reinforcement learning in both correctness and format, and all of it is within reach.
Only problems of the training split are used (`rlft.data.arithmetic.split_of`), so the held-out split is unseen.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlft import config, evaluation_verb
from rlft.data.arithmetic import question, split_of
from rlft.types import Split

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
ROLES = ["system\n", "user\n", "assistant\n"]

# Shares of the late mixture. The rest is right and well formatted.
NEAR_MISS = 0.36
BAD_FORMAT = 0.24


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer (any text survives) whose tags and chat turns are single tokens."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in [*TAGS, *ROLES]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(eos, int)
    assert isinstance(pad, int)
    shape = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 16) * 16,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
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


def make_batch(tokenizer: PreTrainedTokenizerFast, size: int, mixture: bool, rng: random.Random) -> dict[str, Tensor]:
    """`size` right-padded rows; labels are -100 outside the completion, as transformers wants them."""
    rows, labels = [], []
    for _ in range(size):
        a, operation, b = problem(rng)
        messages = [{"role": "user", "content": question(a, operation, b)}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text = response(a, operation, b, mixture, rng)
        completion = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        rows.append(prompt + completion)
        labels.append([-100] * len(prompt) + completion)
    width = max(map(len, rows))
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    }


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, betas=(0.9, 0.98))
    total = args.steps + args.mixture_steps
    start = time.monotonic()
    for step in range(total):
        mixture = step >= args.steps
        # Warm up, cosine to a tenth; the mixture is taught at a low constant rate so as not to wash the task out.
        progress = min(1.0, step / args.steps)
        rate = 0.15 if mixture else min(1.0, (step + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        loss = model(**make_batch(tokenizer, args.batch, mixture, rng)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == total - 1:
            print(f"step {step:5d}/{total}  loss {loss.item():.4f}  {time.monotonic() - start:6.1f} s", flush=True)


def measure(folder: Path) -> dict[str, float]:
    """Held-out metrics at temperature 1, 8 samples of each of 256 problems, as `rlft eval` gives them."""
    plain = config.compose(
        [
            f"model.path={folder}",
            "generation=transformers",
            "generation.max_tokens=48",
            "prompts.max_tokens=64",
            "eval.num_prompts=256",
            "eval.num_samples=8",
        ]
    )
    return dict(evaluation_verb.run(plain, None, print).metrics)


def write_readme(args: argparse.Namespace, seconds: float, metrics: dict[str, float]) -> None:
    options = f"--seed {args.seed} --steps {args.steps} --mixture-steps {args.mixture_steps}"
    options += f" --batch {args.batch} --lr {args.lr}"
    (args.out / "README.md").write_text(
        f"""# tiny-arithmetic

A Qwen2-shaped byte-level model of 0.8M parameters that answers two-digit sums and differences as
`<think>..</think><answer>..</answer>`, often but not always right and not always in that format: something for
reinforcement learning to improve. Made from nothing by

    python scripts/make_tiny_model.py {options}

in {seconds / 60:.0f} minutes on two CPU cores. Held-out problems at temperature 1, 256 x 8 samples:
right {metrics["eval/exact_match"]:.1%}, pass@8 {metrics["eval/pass@8"]:.1%}, format right
{metrics["eval/reward/format"]:.1%}.
Apache-2.0, like the rest of rlft; no data of anybody else's went into it.
""",
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[1] / "rlft" / "assets" / "tiny-arithmetic"
    parser.add_argument("--out", type=Path, default=default, help="folder to write (replaced)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps on clean solutions")
    parser.add_argument("--mixture-steps", type=int, default=300, help="optimizer steps on the mixture")
    parser.add_argument("--batch", type=int, default=192, help="rows a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, args)
    seconds = time.monotonic() - start
    model.generation_config.do_sample = True
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for file in args.out.iterdir():
        file.chmod(0o644)
    write_readme(args, seconds, measure(args.out))


if __name__ == "__main__":
    main()
