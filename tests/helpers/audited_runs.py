"""Audits of runs that were changed, and ways to change them."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlft.commands.audit.command import audit_run
from rlft.commands.audit.files import Findings
from rlft.runs import checkpoint
from rlft.runs.chain import metrics_part, scores_part, sealed
from rlft.runs.lines import encode
from rlft.system.files import digest_of_bytes, digest_of_file
from rlft.system.terminal import CheckRow, Status
from rlft.types import UserError

STEPS = 4
WORDS = (
    "+recipe=grpo_arithmetic", f"steps={STEPS}", "prompts_per_step=3", "group_size=4", "generation=transformers",
    "generation.max_tokens=24", "model.device=cpu", "lora.rank=2", "lora.dropout=0.1", "trainer.lr=0.02",
    "data=jsonl", "data.held_out_fraction=0.25", "eval.every=2", "eval.num_prompts=3", "eval.num_samples=2",
    "scoring.workers=0", "console=null", "checkpoint.every=1", "checkpoint.keep=9", "alarms.patience=1",
    "alarms.equal_groups=0.01", "alarms.constant_reward=1",
)  # fmt: skip


def audited(folder: Path, recompute: int = 0, replay: int = 0) -> list[CheckRow]:
    """The rows of an audit; a refusal is a row of its own."""
    findings = Findings()
    try:
        audit_run(folder, findings, recompute, replay)
    except UserError as error:
        findings.differ("refused", str(error))
    return findings.rows


def wrong(rows: Sequence[CheckRow]) -> list[str]:
    return [f"{row.name}: {row.value}" for row in rows if row.status is Status.wrong]


# -- ways to change a run ----------------------------------------------------------------------------------------------
def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.write_bytes(b"".join(map(encode, lines)))


def rollouts(folder: Path, step: int) -> Path:
    return folder / "rollouts" / f"step_{step:06d}.jsonl"


def saved(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}"


def way(change: Callable[..., None]) -> Callable[..., Callable[[Path], None]]:
    """Of a function of a folder and other arguments: one of the others, which gives a function of the folder."""
    return lambda *args, **keys: lambda folder: change(folder, *args, **keys)


@way
def edited(folder: Path, name: str, place: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a line of a JSONL file."""
    lines = lines_of(folder / name)
    change(lines[place])
    write(folder / name, lines)


@way
def arranged(folder: Path, name: str, *places: int) -> None:
    """Leaves these lines of a JSONL file, in this order."""
    lines = lines_of(folder / name)
    write(folder / name, [lines[place] for place in places])


@way
def replaced(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


@way
def removed(folder: Path, name: str) -> None:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@way
def copied(folder: Path, source: str, target: str) -> None:
    shutil.copyfile(folder / source, folder / target)


@way
def resealed(folder: Path, change: Callable[[Path], None]) -> None:
    """Changes a checkpoint of step 3, and writes a MANIFEST that fits."""
    change(saved(folder, 3))
    checkpoint._write_manifest(saved(folder, 3))


@way
def json_edited(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}, indent=2))


def noisy(file: Path) -> None:
    """Puts other numbers of the same shapes into a file of tensors."""
    generator = torch.Generator().manual_seed(5)
    changed = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})


def key_set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.update(values)


def nested(outer: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line[outer].update({key: value})


def exchanged_files(folder: Path) -> None:
    first, second = (rollouts(folder, step).read_bytes() for step in (2, 3))
    rollouts(folder, 2).write_bytes(second)
    rollouts(folder, 3).write_bytes(first)


def other_step(folder: Path) -> None:
    shutil.rmtree(saved(folder, 3))
    shutil.copytree(saved(folder, 2), saved(folder, 3))


# -- a forger who writes the chain anew --------------------------------------------------------------------------------
def rechained(
    folder: Path, more: Mapping[int, Mapping[str, str]] | None = None, machine: Mapping[str, str] | None = None
) -> None:
    """Writes the chain so that it fits all files of the run.

    more: {step: {part: digest}} of what no file shows. machine: what the lines say of it beside what they said.
    """
    metrics = {line["step"]: line for line in lines_of(folder / "metrics.jsonl")}
    raw = dict(zip(metrics, (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True), strict=True))
    evaluations = {line["step"]: digest_of_bytes(encode(line)) for line in lines_of(folder / "eval.jsonl")}
    previous, made = None, []
    for line in lines_of(folder / "chain.jsonl"):
        step, parts = line["step"], line["sha256"]
        parts["config"] = digest_of_file(folder / "config.yaml")
        if step in evaluations:
            parts["evaluation"] = evaluations[step]
        if step:
            parts["metrics"] = metrics_part(metrics[step])
            parts["rollouts"] = digest_of_file(rollouts(folder, step))
            said = lines_of(rollouts(folder, step))
            names = {name: [one["rewards"][name] for one in said] for name in said[0]["rewards"]}
            parts["scores"] = scores_part(names, [one["reward"] for one in said])
            if saved(folder, step).is_dir():
                parts |= checkpoint.parts_of(checkpoint.load(saved(folder, step)))
        parts |= (more or {}).get(step, {})
        whole = digest_of_bytes(raw[step]) if step else None
        made.append(sealed(step, previous, {**line["machine"], **(machine or {})}, parts, whole))
        previous = made[-1]["digest"]
    write(folder / "chain.jsonl", made)
