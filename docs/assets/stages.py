"""Writes docs/assets/stages.svg: what each stage of a step hands to the next, and in which shape.

python docs/assets/stages.py
"""

import html
from pathlib import Path

STAGES = [  # (what, its shape, what it holds; then the stage that makes the next one of it, and its room)
    ("Prompt", "P of them", "messages, token_ids, reference answer", "sample", "generation/"),
    ("Group", "G completions of one prompt", "text, token_ids, logprobs, finish_reason", "score", "reward/"),
    ("Scores", "float64 [P, G]", "total, by_reward", "batch", "batch.py"),
    ("Batch", "[B, T], B = P x G rows", "token_ids, loss_mask, old_logprobs", "credit", "algorithm/"),
    ("Batch", "the same, filled", "+ advantages, returns  [B, T]", "forward", "model/"),
    ("Outputs", "[B, T], with gradients", "logprobs, entropy, values", "loss", "algorithm/"),
    ("Loss", "a number", "total, metrics", "", ""),
]
WIDTH, ROW, GAP, LEFT = 580, 46, 34, 70
"""Pixels."""


def text(x: float, y: float, words: str, size: int, colour: str, weight: str = "normal") -> str:
    font = "ui-monospace, Menlo, Consolas, monospace" if weight == "mono" else "system-ui, sans-serif"
    bold = ' font-weight="600"' if weight == "bold" else ""
    words = html.escape(words)
    return f'<text x="{x}" y="{y}" font-family="{font}" font-size="{size}" fill="{colour}"{bold}>{words}</text>'


def picture() -> str:
    height = len(STAGES) * ROW + (len(STAGES) - 1) * GAP + 60
    line = 'fill="none" stroke="#5c6bc0" stroke-width="2" marker-end="url(#tip)"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        'aria-label="What the stages of a step hand to each other, with shapes">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#5c6bc0"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f7f8fc"/>',
    ]
    for i, (name, shape, fields, stage, room) in enumerate(STAGES):
        y = 14 + i * (ROW + GAP)
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{ROW}" rx="6" fill="#fff" stroke="#5c6bc0"/>'
        )
        parts += [text(LEFT + 14, y + 20, name, 15, "#1a237e", "bold"), text(LEFT + 96, y + 20, shape, 13, "#333")]
        parts.append(text(LEFT + 96, y + 38, fields, 12, "#555", "mono"))
        if stage:
            end = y + ROW + GAP - 2
            parts.append(f'<path d="M{LEFT + 40} {y + ROW}V{end}" {line}/>')
            parts.append(text(LEFT + 56, y + ROW + 22, f"{stage}  ", 13, "#1a237e", "bold"))
            parts.append(text(LEFT + 126, y + ROW + 22, room, 12, "#555", "mono"))
    last = 14 + (len(STAGES) - 1) * (ROW + GAP) + ROW / 2
    parts.append(f'<path d="M{LEFT} {last}H30V37H{LEFT - 4}" {line}/>')
    told = "update (trainer/): optimizer steps on the adapter; publish: the engine gets a copy"
    parts.append(text(30, height - 16, told, 12, "#333"))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
