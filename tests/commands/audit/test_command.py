"""`rlft audit`: an honest run is confirmed; whatever is changed in it is found, and named by file and step."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from in_one_test import each
from safetensors.torch import load_file, save_file

from rlft import cli
from rlft.commands.audit.command import audit_run
from rlft.commands.audit.findings import Findings
from rlft.commands.doctor.supervise import CheckRow, Status
from rlft.logger.jsonl import encode
from rlft.runs import checkpoint
from rlft.runs.chain import metrics_part, scores_part, sealed
from rlft.system import digests
from rlft.types import UserError

STEPS = 4
WORDS = (
    "+recipe=grpo_arithmetic", f"steps={STEPS}", "prompts_per_step=3", "group_size=4", "generation=transformers",
    "generation.max_tokens=24", "model.device=cpu", "lora.rank=2", "lora.dropout=0.1", "trainer.lr=0.02",
    "data=jsonl", "data.held_out_fraction=0.25", "eval.every=2", "eval.num_prompts=3", "eval.num_samples=2",
    "scoring.workers=0", "logger=[jsonl]", "checkpoint.every=1", "checkpoint.keep=9", "alarms.patience=1",
    "alarms.equal_groups=0.01", "alarms.constant_reward=1",
)  # fmt: skip


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Path:
    """The folder of a run of four steps, all saved, beside its data and its base."""
    place = tmp_path_factory.mktemp("audited")
    shutil.copytree(tiny_path, place / "base")
    rows = [{"prompt": f"{a} + {b}", "answer": str(a + b)} for a in range(12, 20) for b in range(31, 35)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = (f"data.path={place / 'data.jsonl'}", f"model.path={place / 'base'}")
    assert cli.run(["train", *WORDS, *inputs, f"hydra.run.dir={place / 'run'}"]) == 0
    return place / "run"


@pytest.fixture
def copies(honest: Path, tmp_path: Path) -> Callable[[], Path]:
    """Gives a new copy of the run at each call, with data and base beside it: a moved run uses those."""

    def copy() -> Path:
        place = tmp_path / "copy"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(honest.parent, place)
        plain = (place / "run" / "config.yaml").read_text()
        assert str(honest.parent) in plain
        return place / "run"

    return copy


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


def edited(name: str, place: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes a line of a JSONL file."""

    def tamper(folder: Path) -> None:
        lines = lines_of(folder / name)
        change(lines[place])
        write(folder / name, lines)

    return tamper


def arranged(name: str, *places: int) -> Callable[[Path], None]:
    """Leaves these lines of a JSONL file, in this order."""

    def tamper(folder: Path) -> None:
        lines = lines_of(folder / name)
        write(folder / name, [lines[place] for place in places])

    return tamper


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return tamper


def removed(name: str) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return tamper


def copied(source: str, target: str) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        shutil.copyfile(folder / source, folder / target)

    return tamper


def resealed(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Changes a checkpoint of step 3, and writes a MANIFEST that fits."""

    def tamper(folder: Path) -> None:
        change(saved(folder, 3))
        checkpoint._write_manifest(saved(folder, 3))

    return tamper


def noisy(file: Path) -> None:
    """Puts other numbers of the same shapes into a file of tensors."""
    generator = torch.Generator().manual_seed(5)
    changed = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})


def key_set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.update(values)


def nested(outer: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line[outer].update({key: value})


def json_edited(name: str, **values: Any) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}, indent=2))

    return tamper


def exchanged_files(folder: Path) -> None:
    first, second = (rollouts(folder, step).read_bytes() for step in (2, 3))
    rollouts(folder, 2).write_bytes(second)
    rollouts(folder, 3).write_bytes(first)


def other_step(folder: Path) -> None:
    shutil.rmtree(saved(folder, 3))
    shutil.copytree(saved(folder, 2), saved(folder, 3))


R2, C3 = "rollouts/step_000002.jsonl", "checkpoints/step_000003"
M, E, C, A = "metrics.jsonl", "eval.jsonl", "chain.jsonl", "alarms.jsonl"
NOBODYS = "0" * 64

PLAIN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a reward edited": (edited(R2, 1, nested("rewards", "exact_match", 0.5)), f"{R2}: step 2"),
    "a total reward edited": (edited(R2, 1, key_set(reward=0.5)), f"{R2}: step 2"),
    "an advantage edited": (edited(R2, 1, key_set(advantage=0.5)), f"{R2}: step 2"),
    "a text edited": (edited(R2, 1, key_set(completion="43")), f"{R2}: step 2"),
    "a token edited": (edited(R2, 1, lambda line: line["token_ids"].__setitem__(0, 7)), f"{R2}: step 2"),
    "a log-prob edited": (edited(R2, 1, lambda line: line["logprobs"].__setitem__(0, -0.25)), f"{R2}: step 2"),
    "a policy version edited": (edited(R2, 1, key_set(policy_version=0)), f"{R2}: step 2"),
    "an answer edited": (edited(R2, 1, key_set(answer="0")), f"{R2}: step 2"),
    "two completions exchanged": (arranged(R2, 1, 0, *range(2, 12)), f"{R2}: step 2"),
    "a completion removed": (arranged(R2, *range(11)), f"{R2}: step 2"),
    "a completion twice": (arranged(R2, *range(12), 11), f"{R2}: step 2"),
    "the completions of two steps exchanged": (exchanged_files, f"{R2}: step 2"),
    "completions removed": (removed(R2), f"{R2}: step 2 is missing"),
    "completions added": (copied(R2, "rollouts/step_000009.jsonl"), "rollouts/step_000009.jsonl: step 9"),
    "a metric edited": (edited(M, 2, key_set(**{"reward/mean": 0.9})), f"{M}: step 3: its numbers"),
    "a metric added": (edited(M, 2, key_set(**{"reward/median": 0.9})), f"{M}: step 3: its numbers"),
    "a time edited": (edited(M, 2, key_set(**{"time/sample": 1.0})), f"{M}: step 3: its times"),
    "a step left out of the metrics": (arranged(M, 0, 1, 3), f"{M}: step 3 is missing"),
    "two steps exchanged": (arranged(M, 0, 2, 1, 3), f"{M}: step 2 comes after step 3"),
    "a step twice": (arranged(M, 0, 1, 2, 2, 3), f"{M}: step 3 comes after step 3"),
    "the metrics removed": (removed(M), f"{M}: step 1 is missing"),
    "a step added": (edited(M, 3, key_set(step=7)), f"{M}: step 7 is not in the chain"),
    "an accuracy edited": (edited(E, 1, key_set(accuracy=1.0)), f"{E}: step 2"),
    "an example edited": (edited(E, 2, lambda line: line["examples"][0].update(score=1.5)), f"{E}: step 4"),
    "an evaluation removed": (arranged(E, 0, 2), f"{E}: step 2 is missing"),
    "the evaluations exchanged": (arranged(E, 0, 2, 1), f"{E}: step 2 comes after step 4"),
    "an alarm edited": (edited(A, 0, key_set(text="all is well")), f"{A}: step "),
    "the alarms removed": (removed(A), f"{A}: step "),
    "an alarm added": (lambda folder: write(folder / A, [*lines_of(folder / A), {"step": 4, "name": "x", "text": "y"}]),
                       f"{A}: step 4"),
    "a step left out of the chain": (arranged(C, 0, 1, 3, 4), f"{C}: step 2 is left out: step 3 follows"),
    "the chain's beginning removed": (arranged(C, 1, 2, 3, 4), f"{C}: step 0 is left out"),
    "the chain's end removed": (arranged(C, 0, 1, 2, 3), "status.json: says 4 steps, and the chain has 3"),
    "two lines of the chain exchanged": (arranged(C, 0, 1, 3, 2, 4), f"{C}: step 2 is left out"),
    "a digest in the chain edited": (edited(C, 3, nested("sha256", "scores", NOBODYS)), f"{C}: step 3"),
    "a machine in the chain edited": (edited(C, 3, nested("machine", "threads", "99")), f"{C}: step 3"),
    "the last digest edited": (edited(C, 4, key_set(digest=NOBODYS)), f"{C}: step 4"),
    "a link edited": (edited(C, 2, key_set(previous=NOBODYS)), f"{C}: step 2"),
    "the digest with times edited": (edited(C, 2, key_set(metrics_line=NOBODYS)), f"{M}: step 2: its times"),
    "the chain cut short": (lambda folder: (folder / C).write_bytes((folder / C).read_bytes()[:-9]), f"{C}: its last"),
    "the chain removed": (removed(C), "has no chain.jsonl"),
    "a key of the config edited": (replaced("config.yaml", "lr: 0.02", "lr: 0.01"), "config.yaml: step 4"),
    "a fingerprint edited": (replaced("config.yaml", "data_fingerprint: ", "data_fingerprint: 0"), "config.yaml: step 4"),
    "the number of steps edited": (json_edited("status.json", steps=3), "status.json: "),
    "the status removed": (removed("status.json"), "status.json: is missing"),
    "a checkpoint's adapter exchanged": (copied("checkpoints/step_000002/policy/adapter_model.safetensors",
                                                f"{C3}/policy/adapter_model.safetensors"), f"{C3}: step 3: policy/"),
    "an adapter from another run": (resealed(lambda folder: noisy(folder / "policy" / "adapter_model.safetensors")),
                                    f"{C3}: step 3: adapters/policy differs"),
    "an optimizer from another run": (resealed(lambda folder: noisy(folder / "optimizer.safetensors")),
                                      f"{C3}: step 3: optimizer differs"),
    "a seed in a state edited": (resealed(lambda folder: checkpoint.change_state(folder, {"seed": 9})),
                                 f"{C3}: step 3: state differs"),
    "an adapter's scale edited": (resealed(json_edited("policy/adapter_config.json", lora_alpha=99)),
                                  f"{C3}: step 3: state differs"),
    "an adapter's record edited": (resealed(json_edited("policy/rlft.json", base_fingerprint="0")),
                                   f"{C3}: step 3: records differs"),
    "a checkpoint of another step": (other_step, f"{C3}: step 3: adapters/policy differs"),
    "the last checkpoint removed": (removed("checkpoints/step_000004"), "checkpoints: step 4 is missing"),
    "a manifest cut short": (replaced(f"{C3}/MANIFEST", "  optimizer", "  optimiser"), f"{C3}: step 3: MANIFEST"),
    "a file of a checkpoint removed": (removed(f"{C3}/optimizer.safetensors"), f"{C3}: step 3: optimizer.safetensors"),
    "a file in a checkpoint added": (copied(R2, f"{C3}/more.json"), f"{C3}: step 3: MANIFEST does not list more.json"),
}  # fmt: skip
"""{what was done: (how, how the finding begins or what it holds)}: nobody has changed the chain to fit."""


def test_an_honest_run_is_confirmed_and_a_moved_one(honest: Path, copies: Callable[[], Path]) -> None:
    rows = audited(honest, recompute=9, replay=9)
    assert {row.status for row in rows} == {Status.ok}, rows
    replayed = [row.value for row in rows if row.name == "replay"]
    assert [value.partition(",")[0] for value in replayed] == [f"step {step}" for step in range(1, STEPS + 1)]
    assert all("bit for bit" in value and "adapters/policy" in value for value in replayed)
    assert wrong(audited(copies())) == []


@each("what", PLAIN)
def test_whatever_is_changed_is_found_and_named(what: str, copies: Callable[[], Path]) -> None:
    tamper, expected = PLAIN[what]
    folder = copies()
    tamper(folder)
    found = wrong(audited(folder))
    assert any(expected in row for row in found), (what, found)


def test_one_flipped_bit_in_any_file_is_found(copies: Callable[[], Path]) -> None:
    folder = copies()
    draw = random.Random(3)
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
        content = file.read_bytes()
        for _ in range(2):
            place, bit = draw.randrange(len(content)), draw.randrange(8)
            file.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            found, where = wrong(audited(folder)), (file.relative_to(folder), place, bit)
            step = file.relative_to(folder).parts[1] if file.parent.name.startswith("step_") else file.name
            assert any(step in row for row in found), (where, found)
        file.write_bytes(content)
    assert wrong(audited(folder)) == []
