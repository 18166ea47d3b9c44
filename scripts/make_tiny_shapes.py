"""Makes the embedded model that counts shapes in pictures: tokenizer, processor, weights, and a README.

    python scripts/make_tiny_shapes.py                  # writes rlft/assets/tiny-shapes (3 minutes, two cores)
    python scripts/make_tiny_shapes.py --out /tmp/model --steps 400

A Qwen2.5-VL-shaped byte-level model of 0.1M parameters is first taught to count, and then, briefly, answers of which
most are one or two off: its tower sees every shape, and what it says is often wrong, so that reinforcement learning,
which leaves the tower as it is, can improve it. Only pictures of the training split are used.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make_tiny_model import ASSETS, make_tokenizer, measure
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlft.data.prompts import tokenised
from rlft.data.shapes import CELL, CELLS, Shapes
from rlft.tokens.images import ImageProcessor, read_processor
from rlft.tokens.text import RunTokenizer
from rlft.types import Prompt, Split

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PATCH, MERGED = 8, 2
PICTURES, BATCH = 2048, 48
WRONG = 0.62
"""Share of the late lessons whose answer is another number nearby."""


def make_model(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "fullatt_block_indexes": [0],
        "out_hidden_size": text["hidden_size"],
    }
    ids = dict(zip(VISION, tokenizer.convert_tokens_to_ids(VISION), strict=True))
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


class Lessons:
    """Pictures of the training split, as the model reads them, with answers."""

    def __init__(self, tokenizer: Any, model: Any, processor: ImageProcessor) -> None:
        loaded = Shapes(most=CELLS**2, size=PICTURES, held_out_size=1, seed=1).load(Split.train)
        self.prompts: list[Prompt] = list(tokenised(loaded, tokenizer, "chat"))
        self.pixels = [processor.tensors(prompt.images[0])["pixel_values"] for prompt in self.prompts]
        edge = CELL * CELLS // PATCH
        self.grid = torch.tensor([[1, edge, edge]])
        self.tokenizer, self.model, self.image_token = tokenizer, model, processor.image_token_id

    def loss(self, chosen: Sequence[int], rng: random.Random, wrong: float) -> Tensor:
        rows = [self._row(i, rng, wrong) for i in chosen]
        ids = torch.tensor(rows)
        start = len(self.prompts[0].token_ids)
        given = {"input_ids": ids[:1], "mm_token_type_ids": (ids[:1] == self.image_token).int()}
        positions, _ = self.model.model.get_rope_index(**given, image_grid_thw=self.grid)
        output = self.model(
            input_ids=ids,
            pixel_values=torch.cat([self.pixels[i] for i in chosen]),
            image_grid_thw=self.grid.expand(len(chosen), -1),
            position_ids=positions.expand(-1, len(chosen), -1),
        )
        logits = output.logits[:, start - 1 : -1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten())

    def _row(self, index: int, rng: random.Random, wrong: float) -> list[int]:
        prompt = self.prompts[index]
        answer = int(prompt.answer)
        if rng.random() < wrong:
            others = [answer + gap for gap in (-2, -1, 1, 2) if 1 <= answer + gap <= CELLS**2]
            answer = rng.choice(others)
        said = f"<answer>{answer}</answer>{self.tokenizer.eos_token}"
        return [*prompt.token_ids, *self.tokenizer(said, add_special_tokens=False)["input_ids"]]


def train(lessons: Lessons, steps: int, late_steps: int, lr: float, seed: int) -> None:
    """Counting, with a warm-up and a cosine; then a mixture of right and wrong answers, without the tower."""
    rng, model = random.Random(seed), lessons.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        _update(optimizer, lessons, rng, 0.0)
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {_update(optimizer, lessons, rng, 0.0):.4f}", flush=True)
    model.model.visual.requires_grad_(False)
    late = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(late, lr=0.1 * lr, weight_decay=0.0)
    losses = [_update(optimizer, lessons, rng, WRONG) for _ in range(late_steps)]
    print(f"late: loss {losses[-1]:.4f}")


def _update(optimizer: torch.optim.Optimizer, lessons: Lessons, rng: random.Random, wrong: float) -> float:
    loss = lessons.loss(rng.sample(range(PICTURES), BATCH), rng, wrong)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(lessons.model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def write_readme(args: argparse.Namespace, seconds: float, num_parameters: int) -> None:
    metrics = measure(args.out, ["+recipe=grpo_shapes"])
    right, best = f"{metrics['eval/exact_match']:.1%}", f"{metrics['eval/pass@8']:.1%}"
    options = f"--seed {args.seed} --steps {args.steps} --late-steps {args.late_steps} --lr {args.lr}"
    (args.out / "README.md").write_text(
        f"""# {args.out.name}

A Qwen2.5-VL-shaped byte-level model of {num_parameters / 1e6:.1f}M parameters that counts shapes in a picture
(`data=shapes`), as `<answer>..</answer>`. It was taught to be one or two off more often than not: something for
reinforcement learning to improve. Held-out pictures at temperature 1, 256 x 8 samples: right {right}, pass@8 {best}.
Made from nothing in {seconds / 60:.0f} minutes with {torch.get_num_threads()} thread(s) by

    python scripts/make_tiny_shapes.py {options}

Apache-2.0, like the rest of rlft; no data of anybody else's went into it.
""",
        encoding="utf-8",
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-shapes", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps on right answers")
    parser.add_argument("--late-steps", type=int, default=150, help="optimizer steps on the mixture")
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args(words)
    start = time.monotonic()
    torch.manual_seed(args.seed)
    tokenizer: Any = make_tokenizer(VISION)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_model(tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {len(tokenizer)} tokens")
    size = {"shortest_edge": CELL**2, "longest_edge": (4 * CELL * CELLS) ** 2}
    images = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGED, temporal_patch_size=2, size=size)
    model.config.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    images.save_pretrained(args.out)
    processor = read_processor(tokenizer, {"pretrained_model_name_or_path": args.out}, model.config)
    lessons = Lessons(RunTokenizer(tokenizer, processor=lambda: processor), model, processor)
    train(lessons, args.steps, args.late_steps, args.lr, args.seed)
    model.generation_config.do_sample = True
    model.half().save_pretrained(args.out)
    write_readme(args, time.monotonic() - start, num_parameters)


if __name__ == "__main__":
    main()
