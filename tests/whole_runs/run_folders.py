"""What two runs left behind, compared bit for bit: seconds and memory aside, nothing may differ."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlft import cli

KILLED = -9
MEASURED = ("time/", "memory/")
SAMPLED = ("samples.jsonl", "progress.json")
"""What `rlft sample` leaves, instead of the files of a training run."""

TINY = (
    "+recipe=grpo_arithmetic", "steps=5", "prompts_per_step=3", "group_size=4", "generation=transformers",
    "generation.max_tokens=24", "model.device=cpu", "lora.rank=2", "lora.dropout=0.1", "data.size=64",
    "data.held_out_size=8", "eval.every=2", "eval.num_prompts=3", "eval.num_samples=2", "scoring.workers=0",
    "console=null",
)  # fmt: skip
"""What is said to `rlft train` for a run of five steps of 3 x 4 completions, evaluated at 0, 2, 4 and 5."""
ALL_WEIGHTS = (
    "lora=null", "trainer.lr=1e-4", "prompts_per_step=4", "group_size=4", "generation=transformers",
    "generation.max_tokens=24", "eval.num_prompts=4", "eval.num_samples=2", "data.size=64", "data.held_out_size=8",
    "scoring.workers=0", "model.device=cpu", "console=null",
)  # fmt: skip
SAMPLE = (
    "sample", "num_prompts=10", "prompts_per_step=2", "n=4", "max_per_prompt=3", "generation=transformers",
    "generation.max_tokens=24", "data.size=16", "data.held_out_size=8", "scoring.workers=0", "model.device=cpu",
)  # fmt: skip
RM = (
    "rm", "+recipe=rm_arithmetic", "rankings_per_step=4", "replay.path=embedded:arithmetic-preferences",
    "replay.fraction=0.5", "lora.rank=2", "lora.dropout=0.1", "eval.every=2", "eval.num_rankings=8", "model.device=cpu",
    "console=null",
)  # fmt: skip
IMAGES = (
    "train", "+recipe=grpo_shapes", "data.size=40", "data.held_out_size=8", "prompts_per_step=4", "group_size=4",
    "eval.every=2", "eval.num_prompts=4", "eval.num_samples=2", "model.device=cpu", "scoring.workers=0",
    "console=null", "minibatches=2",
)  # fmt: skip


def tiny(*keys: str) -> tuple[str, ...]:
    """`train` and TINY with these keys, which replace those of the same name."""
    given = tuple(key.partition("=")[0] + "=" for key in keys)
    return "train", *(key for key in TINY if not key.startswith(given)), *keys


CONVERSATIONS = tiny(
    "generation.transformers.batch_size=4", "environment=game", "environment.workers=1", "environment.turn_tokens=8",
    "environment.factory=conversation_tools.Letters",
)  # fmt: skip
"""Engines in other processes have the workers of their own environment beside them."""
RANKS = tiny(
    "steps=2", "cluster.lanes=4", "checkpoint.on_signal=now", "dynamic_sampling.max_rounds=1", "minibatches=3",
    "eval.every=0", "curriculum.running=true",
)  # fmt: skip
"""Of several ranks, or of one that does all lanes: three updates a step."""


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl without what a clock says. Floats are read back to the bit."""
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)}
        for line in whole_lines(folder / "metrics.jsonl")
    ]


def whole_lines(file: Path) -> list[bytes]:
    """The lines of a file, without a last one that has no end; none where there is no file."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def chain(folder: Path) -> list[dict[str, Any]]:
    """The digests of each step, and the machine, without those of the config, whose checkpoints may differ."""
    lines = map(json.loads, whole_lines(folder / "chain.jsonl"))
    return [{**line["sha256"], "config": None, "step": line["step"], "machine": line["machine"]} for line in lines]


def rollouts(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "rollouts").glob("*"))}


def checkpoints(folder: Path) -> list[Path]:
    """Those that have their final names, oldest first."""
    return sorted((folder / "checkpoints").glob("step_*"), key=lambda found: int(found.name.removeprefix("step_")))


def contents(folder: Path) -> dict[str, bytes]:
    """{path in the folder: its bytes}."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def files_of(folder: Path) -> dict[str, str]:
    """{path in the folder: sha256}."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents(folder).items()}


def is_whole(checkpoint: Path) -> bool:
    """Every file that its MANIFEST names is there with that checksum, and no other."""
    found = files_of(checkpoint)
    if found.pop("MANIFEST", None) is None:
        return False
    lines = [line.split("  ", 1) for line in (checkpoint / "MANIFEST").read_text().splitlines()]
    return {name: digest for digest, name in lines} == found


def check_so_far(folder: Path, undisturbed: Path) -> None:
    """What a killed run has left is the beginning of the undisturbed one, which kept every checkpoint."""
    if (undisturbed / SAMPLED[0]).exists():
        if (folder / SAMPLED[1]).exists():
            size = json.loads((folder / SAMPLED[1]).read_text())["bytes"]
            assert size > 0
            found, expected = ((place / SAMPLED[0]).read_bytes()[:size] for place in (folder, undisturbed))
            assert found == expected
        return
    expected = metrics(undisturbed)
    found = metrics(folder)
    assert found == expected[: len(found)]
    links = chain(folder)
    assert links == chain(undisturbed)[: len(links)]
    evaluations = whole_lines(folder / "eval.jsonl")
    assert evaluations == whole_lines(undisturbed / "eval.jsonl")[: len(evaluations)]
    completions = rollouts(undisturbed)
    for name, content in rollouts(folder).items():
        assert name.endswith(".tmp") or content == completions[name], name
    present = checkpoints(folder)
    assert not present or is_whole(present[-1]), "the newest checkpoint has its name only when it is whole"
    for checkpoint in present:
        if is_whole(checkpoint):
            assert files_of(checkpoint) == files_of(undisturbed / "checkpoints" / checkpoint.name), checkpoint


def check_same(folder: Path, undisturbed: Path) -> None:
    """The finished run left what the undisturbed one left, and nothing of its interruptions."""
    if (undisturbed / SAMPLED[0]).exists():
        for name in SAMPLED:
            assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()
        return
    assert metrics(folder) == metrics(undisturbed)
    assert chain(folder) == chain(undisturbed)
    assert (folder / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert (folder / "eval.jsonl").read_bytes() == (undisturbed / "eval.jsonl").read_bytes()
    assert rollouts(folder) == rollouts(undisturbed)
    last = checkpoints(undisturbed)[-1]
    assert checkpoints(folder)[-1].name == last.name
    assert files_of(checkpoints(folder)[-1]) == files_of(last)
    assert all(map(is_whole, checkpoints(folder)))
    assert [file.name for file in folder.rglob("*") if ".writing" in file.name or file.suffix == ".tmp"] == []


def learned(folder: Path) -> bool:
    """Whether there was something to get wrong: gradients, and weights that differ from step to step."""
    norms = [line["policy/grad_norm"] for line in metrics(folder)]
    weights = [(c / "policy" / "adapter_model.safetensors").read_bytes() for c in checkpoints(folder)]
    return sum(norm > 0 for norm in norms) >= len(norms) - 1 and len(set(weights)) >= len(weights) - 1


def check_goes_on(
    place: Path, words: Sequence[str], halt: int, steps: int, *resumed: str, whole: Path | None = None
) -> Path:
    """In this process: a run that ends after `halt` steps and goes on is that of all steps, whose folder is given.

    whole: that folder, where the run is there already.
    """
    halted = place / "halted"
    if whole is None:
        whole = place / "whole"
        assert cli.run([*words, f"steps={steps}", f"hydra.run.dir={whole}"]) == 0
    assert cli.run([*words, f"steps={halt}", f"hydra.run.dir={halted}"]) == 0
    assert cli.run(["resume", str(halted), f"steps={steps}", *resumed]) == 0
    check_same(halted, whole)
    return whole
