"""Variance and bias of one policy's gradients with several advantages, from what `rlft sample` drew."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlft
from rlft.batch import batch_of_rows
from rlft.types import Batch, LossScale, Outputs

PROMPTS = 4
"""Prompts of a batch whose gradient is taken."""


def gradients(advantages: Mapping[str, tuple[str, Mapping[str, Any]]], folder: Path) -> dict[str, dict[str, float]]:
    """{arm: what is known of its gradients}, over batches of PROMPTS groups of the samples in the folder.

    advantages: {arm: (algorithm, its keys)}, the first one unbiased.

    variance: mean squared distance of a batch's gradient to the mean one, over the first arm's. length: of the mean
    gradient along the first arm's, over the length of that; 1 without bias. error: squared distance of the two means,
    over the squared length of the first; 0 without bias. Products of means are of two halves of the batches, so that
    noise adds nothing to them. Half of the prompts only teach a critic: values are linear in the last hidden states.
    """
    config = yaml.safe_load((folder / "config.yaml").read_text())
    path = Path(rlft.__file__).parent / "assets" / config["model"]["path"].removeprefix("embedded:")
    model = AutoModelForCausalLM.from_pretrained(path)
    rows = batches(folder, path, config["n"])
    learned, measured = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    weights_H = critic(model, learned)
    algorithms = {arm: rlft.load_algorithm(name, **keys) for arm, (name, keys) in advantages.items()}
    squares = dict.fromkeys(algorithms, 0.0)
    halves: dict[str, list[Any]] = {arm: [0.0, 0.0] for arm in algorithms}
    for i, plain in enumerate(measured):
        logprobs_BT, hidden_BTH = forward(model, plain)
        values_BT = torch.where(plain.loss_mask, hidden_BTH.detach() @ weights_H, 0.0)
        batch = replace(plain, sampled_logprobs=logprobs_BT.detach(), old_values=values_BT)
        tokens_B = batch.loss_mask.sum(-1)
        scale = LossScale(
            num_tokens=int(tokens_B.sum()), num_sequences=len(tokens_B), max_completion_tokens=int(tokens_B.max())
        )
        for arm, algorithm in algorithms.items():
            outputs = Outputs(logprobs=logprobs_BT, values=values_BT)
            loss = algorithm.loss(outputs, algorithm.credit(batch), scale).total
            parts = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            gradient = torch.cat([part.flatten() for part in parts]).double()
            squares[arm] += float(gradient @ gradient)
            halves[arm][i % 2] = halves[arm][i % 2] + gradient
    return compared(squares, halves, len(measured))


def compared(squares: Mapping[str, float], halves: Mapping[str, Any], num: int) -> dict[str, dict[str, float]]:
    """What `gradients` says of each arm, from the sums of squared lengths and of gradients in both halves."""
    variance = {arm: (squares[arm] - float((a + b) @ (a + b)) / num) / (num - 1) for arm, (a, b) in halves.items()}
    first = next(iter(halves))
    one, two = halves[first]
    length = float(one @ two)
    return {
        arm: {
            "variance": variance[arm] / variance[first],
            "length": float(a @ two + one @ b) / (2 * length),
            "error": float((a - one) @ (b - two)) / length,
        }
        for arm, (a, b) in halves.items()
    }


def batches(folder: Path, path: Path, group: int) -> list[Batch]:
    """The samples of a folder as batches of PROMPTS groups, in their order."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    made, size = [], PROMPTS * group
    for start in range(0, len(lines) - size + 1, size):
        chosen = lines[start : start + size]
        prompts = [
            tokenizer.apply_chat_template(line["prompt"], add_generation_prompt=True, tokenize=False) for line in chosen
        ]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
        batch = batch_of_rows(
            [(i // group, p, line["token_ids"]) for i, (p, line) in enumerate(zip(ids, chosen, strict=True))]
        )
        made.append(replace(batch, rewards=torch.tensor([line["reward"] for line in chosen], dtype=torch.float64)))
    return made


def forward(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(log-probs of the tokens `[B, T]`, the last hidden state before each `[B, T, hidden]`); 0 at the first column."""
    found = model(batch.token_ids, attention_mask=batch.attention_mask.long(), output_hidden_states=True)
    after = found.logits[:, :-1].log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])[..., 0]
    first = torch.zeros_like(after[:, :1]), torch.zeros_like(found.hidden_states[-1][:, :1])
    return torch.cat([first[0], after], 1), torch.cat([first[1], found.hidden_states[-1][:, :-1]], 1)


def critic(model: Any, learned: Sequence[Batch]) -> Tensor:
    """`[hidden]`: ridge regression of a completion's reward on the hidden states before its tokens."""
    with torch.no_grad():
        rows = [(forward(model, batch)[1][batch.loss_mask], batch) for batch in learned]
    states = torch.cat([row for row, _ in rows])
    rewards = torch.cat([b.rewards[:, None].expand(b.loss_mask.shape)[b.loss_mask] for _, b in rows]).to(states)
    square = states.T @ states + len(states) * 1e-3 * torch.eye(states.shape[1])
    return torch.linalg.solve(square, states.T @ rewards)
