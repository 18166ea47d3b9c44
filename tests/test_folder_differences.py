"""What the comparison of two commits finds in files: one changed bit of each kind, and nothing in what must differ."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare_commits
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

CHECKPOINT = "run/checkpoints/step_000002"
CONFIG = {
    "trainer": {"lr": 0.001},
    "algorithm": {"_target_": "rlft.algorithm.ppo.PPO", "gamma": 1.0},
    "lora": {"path": None},
    "origin": {"rlft": "0.1.0", "commit": "7ad35a0ef736", "base_fingerprint": "9e854fe0239b55ee"},
}
ROLLOUT = {"step": 2, "prompt_id": "1+2", "completion": "3", "token_ids": [7, 8], "logprobs": [-0.5, -0.25]}
TENSORS = [
    f"{CHECKPOINT}/{name}.safetensors"
    for name in ("policy/adapter_model", "critic/adapter_model", "critic/head", "learned/adapter_model", "optimizer")
]


def write_lines(file: Path, *lines: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_tensors(file: Path, **tensors: torch.Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with a file of each kind, the same bit for bit but for times, paths and versions."""
    folders = tmp_path / "A", tmp_path / "B"
    for k, folder in enumerate(folders):
        write_lines(
            folder / "run/metrics.jsonl",
            {"step": 1, "loss/total": 0.25, "time/step": 1.5 + k, "memory/peak_bytes": 1000 + k},
            {"step": 2, "loss/total": 0.1 + 0.2, "time/step": 1.25 + k, "memory/peak_bytes": 2000 + k},
        )
        write_lines(folder / "run/eval.jsonl", {"step": 2, "accuracy": 0.5, "examples": [{"score": 1.0}]})
        write_lines(folder / "run/rollouts/step_000002.jsonl", ROLLOUT, {**ROLLOUT, "prompt_id": "3+4"})
        write_lines(folder / "samples/samples.jsonl", {"prompt_id": "1+2", "reward": 1.2000000476837158})
        write_lines(folder / f"run/evaluations/step_000002_2026-11-22_10-20-3{k}.jsonl", {"step": 2, "accuracy": 0.75})
        weights = torch.linspace(0.0, 1.0, 6).reshape(2, 3)
        for name in TENSORS:
            write_tensors(folder / name, other=weights, weight=weights + 1)
        write_tensors(folder / "model/model.safetensors", embed=weights.to(torch.bfloat16))
        state = folder / CHECKPOINT / "state.json"
        state.write_text(json.dumps({"step": 2, "alarms": {"best": [0.5, 0.25]}, "base": f"/code/{folder.name}/tiny"}))
        (folder / CHECKPOINT / "MANIFEST").write_text(f"{k}  state.json\n")
        config = json.loads(json.dumps(CONFIG).replace("7ad35a0", f"7ad35a{k}").replace("ppo.PPO", f"ppo{k}.PPO"))
        config["lora"]["path"] = f"/runs/{folder.name}/sft"
        (folder / "run/config.yaml").write_text(yaml.safe_dump(config))
        (folder / "sweep.csv").write_text(f"job,accuracy,seconds\n0,0.5,1.{k}\n1,0.75,2.{k}\n")
        (folder / "log.txt").write_text(f"took {k} s\n")
        (folder / "model/tokenizer.bin").write_bytes(bytes(range(32)))
    return folders


@pytest.fixture
def compared(two_runs: tuple[Path, Path]) -> Callable[[], Any]:
    """Compares the two folders as they are now."""
    of_a, of_b = ({f"/code/{k}": "<code>", f"/runs/{k}": "<case>"} for k in "AB")
    return lambda: compare_commits.compare_folders("ppo", *two_runs, of_a, of_b)


def flip(file: Path, number: float, pattern: str = "<f") -> None:
    """Changes the last bit of the first place where the file has this number in binary."""
    content, old = bytearray(file.read_bytes()), struct.pack(pattern, number)
    content[content.index(old)] ^= 1
    file.write_bytes(content)


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_times_memory_paths_versions_and_classes_addresses_may_differ(compared: Callable[[], Any]) -> None:
    found = compared()
    assert found.differences == ()
    # metrics, eval, rollouts, samples, an evaluation, 5 tensor files, model, state, config, sweep, a binary
    assert found.files == 15


# What is replaced, or the number whose last bit is flipped; the difference that is found.
CHANGES = {
    # 0.1 + 0.2 is 0.30000000000000004, and 0.3 its neighbour, 2^-54 below.
    "run/metrics.jsonl": ("0.30000000000000004", "0.3", 2, "line 2: loss/total", 2**-54),
    "run/eval.jsonl": ('"accuracy": 0.5', '"accuracy": 0.5000000000000001', 2, "line 1: accuracy", 2**-53),
    "run/rollouts/step_000002.jsonl": ("-0.25", "-0.25000000000000006", 2, "line 1: logprobs[1]", 2**-54),
    "samples/samples.jsonl": ("1.2000000476837158", "1.200000047683716", None, "line 1: reward", 2**-52),
    f"{CHECKPOINT}/state.json": ("0.25", "0.25000000000000006", 2, "alarms.best[1]", 2**-54),
    "run/config.yaml": ("lr: 0.001", "lr: 0.0010000000000000002", None, "trainer.lr", 2**-62),
    "sweep.csv": ("0.75", "0.7500000000000001", None, "row 2: accuracy", None),  # texts, as a table has them
    # The last of `weight`: in [2, 4) neighbours in float32 are 2^-22 apart.
    **dict.fromkeys(TENSORS, (None, 2.0, 2, "weight", 2 ** (-22))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_last_bit_of_a_number_is_found(two_runs: tuple[Path, Path], compared: Callable[[], Any], name: str) -> None:
    old, new, step, field, largest = CHANGES[name]
    if old is None:
        flip(two_runs[1] / name, new)
    else:
        replace(two_runs[1] / name, old, new)
    [found] = compared().differences
    assert (found.file, found.step, found.field, found.count, found.largest) == (name, step, field, 1, largest)
    assert f"ppo: {name}" + (f", step {step}" if step else "") in str(found)
    assert ("F32 of [2, 3] with other bits" if old is None else old.split()[-1]) in str(found)


def test_a_changed_bit_of_an_exported_model_and_of_any_other_file_is_found(
    two_runs: tuple[Path, Path], compared: Callable[[], Any]
) -> None:
    values = load_file(two_runs[1] / "model/model.safetensors")["embed"]
    values[1, 2] += 2**-7  # bfloat16 has 7 bits after the point: the neighbour of 1
    write_tensors(two_runs[1] / "model/model.safetensors", embed=values)
    flip(two_runs[1] / "model/tokenizer.bin", 5, "B")
    found = compared().differences
    assert [(d.file, d.field, d.largest) for d in found] == [
        ("model/model.safetensors", "embed", 2**-7),
        ("model/tokenizer.bin", "byte 5", None),
    ]


# A number may be written otherwise; signs of zero, types and lengths count, and so does a fingerprint of data or base.
@pytest.mark.parametrize(
    ("file", "old", "new", "differs"),
    [
        ("state.json", "0.25", "2.5e-1", False),
        ("state.json", "0.5", "0.50", False),
        ("state.json", "0.25", "-0.0", True),
        ("state.json", "0.25", "null", True),
        ("state.json", "[0.5, 0.25]", "[0.5]", True),
        ("state.json", "2,", "2.0,", True),
        ("config.yaml", "9e854fe0239b55ee", "0e854fe0239b55ee", True),
    ],
)
def test_what_counts_as_another_value(
    two_runs: tuple[Path, Path], compared: Callable[[], Any], file: str, old: str, new: str, differs: bool
) -> None:
    name = f"{CHECKPOINT}/{file}" if file == "state.json" else f"run/{file}"
    if new == "-0.0":
        replace(two_runs[0] / name, old, "0.0")
    replace(two_runs[1] / name, old, new)
    assert [d.file for d in compared().differences] == [name] * differs


def test_a_file_or_a_line_that_only_one_side_has_is_a_difference(
    two_runs: tuple[Path, Path], compared: Callable[[], Any]
) -> None:
    (two_runs[0] / "run/eval.jsonl").unlink()
    shutil.copy(two_runs[0] / "sweep.csv", two_runs[0] / "extra.csv")
    metrics = two_runs[0] / "run/metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    found = {d.file: d for d in compared().differences}
    assert set(found) == {"run/eval.jsonl", "extra.csv", "run/metrics.jsonl"}
    assert found["run/eval.jsonl"].values == "is only on side B"
    assert found["extra.csv"].values == "is only on side A"
    assert (found["run/metrics.jsonl"].step, found["run/metrics.jsonl"].field) == (2, "line 2: {}")


def test_the_earliest_step_comes_first_and_of_a_step_the_metrics(
    two_runs: tuple[Path, Path], compared: Callable[[], Any]
) -> None:
    flip(two_runs[1] / CHECKPOINT / "policy/adapter_model.safetensors", 2.0)
    replace(two_runs[1] / "run/rollouts/step_000002.jsonl", "-0.25", "-0.125")
    replace(two_runs[1] / "run/metrics.jsonl", "0.30000000000000004", "0.3")
    replace(two_runs[1] / "run/metrics.jsonl", "0.25", "0.75")
    first, second, third = compared().differences
    assert (first.file, first.step, first.count, first.largest) == ("run/metrics.jsonl", 1, 2, 0.5)
    assert second.file == "run/rollouts/step_000002.jsonl"
    assert third.file.endswith("policy/adapter_model.safetensors")
