"""What only weights can show: random steps are replayed, bit for bit on a machine like the run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audited_runs import WORDS, audited, edited, key_set, noisy, rechained, replaced, resealed, saved, wrong
from safetensors.torch import load_file, save_file
from slow_cases import slow_but

from rlft import cli
from rlft.commands.audit.recomputed import largest_gap
from rlft.generation.transformers import TransformersGenerator
from rlft.system.terminal import Status

ADAPTER = "policy/adapter_model.safetensors"

FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "an adapter": (resealed(lambda folder: noisy(folder / ADAPTER)), "replay: step 3: adapters/policy differ"),
    "moments": (resealed(lambda folder: noisy(folder / "optimizer.safetensors")), "replay: step 3: optimizer differ"),
    "a learning rate": (
        replaced("config.yaml", "lr: 0.02", "lr: 0.01"),
        "replay: step 1: adapters/policy, metrics differ",
    ),
    "a metric": (edited("metrics.jsonl", 2, key_set(**{"reward/mean": 0.9})), "replay: step 3: metrics differ"),
}
"""{what was changed, and all digests with it: (how, how the finding begins)}."""


@pytest.mark.parametrize("what", slow_but("an adapter", FORGED))
def test_a_forger_who_writes_all_digests_anew_is_found_by_a_replay(what: str, copies: Callable[[], Path]) -> None:
    tamper, expected = FORGED[what]
    folder = copies()
    tamper(folder)
    rechained(folder)
    assert wrong(audited(folder, recompute=9)) == [], "without weights nothing shows"
    found = wrong(audited(folder, replay=9))
    assert any(row.startswith(expected) for row in found), (what, found)


def test_an_engine_that_was_stale_is_found(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps version 0 in step 2, and nothing in the run looks."""
    load = TransformersGenerator.load

    def stale(self: Any, adapter: Any) -> None:
        if adapter.version == 1:
            self.version = 1
        else:
            load(self, adapter)

    inputs = (f"data.path={honest.parent / 'data.jsonl'}", f"model.path={honest.parent / 'base'}")
    words = [word for word in WORDS if not word.startswith(("steps=", "eval.every="))]
    with monkeypatch.context() as patch:
        patch.setattr(TransformersGenerator, "load", stale)
        assert cli.run(["train", *words, *inputs, "freshness.read_back=false", "freshness.threshold=1e9", "steps=2",
                        "eval.every=0", f"hydra.run.dir={tmp_path / 'run'}"]) == 0  # fmt: skip
    rows = audited(tmp_path / "run", recompute=9, replay=9)
    [found] = wrong(rows)
    assert found.startswith("replay: step 2: ")
    assert "rollouts" in found
    assert [row.value[:20] for row in rows if row.name == "replay" and row.status is Status.ok] == [
        "step 1, bit for bit:"
    ]


def slightly(file: Path, relative: float) -> None:
    """The roundings of another processor."""
    save_file({name: t * (1 + relative) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.slow
def test_an_honest_run_of_another_processor_is_not_accused(copies: Callable[[], Path]) -> None:
    folder = copies()
    resealed(lambda place: slightly(place / ADAPTER, 1e-6))(folder)
    rechained(folder, {2: {"advantages": "0" * 64}}, machine={"processor": "another one"})
    rows = audited(folder, recompute=9, replay=9)
    assert wrong(rows) == []
    replayed = {row.value[:6]: row for row in rows if row.name == "replay"}
    assert len(replayed) == 4
    assert "metrics within 0.001, tokens the same; not bit for bit: other processor" in replayed["step 3"].value
    [advantages] = [row for row in rows if row.name == "advantages"]
    assert advantages.status is Status.skipped
    assert "within 1e-06" in advantages.value
    resealed(lambda place: noisy(place / ADAPTER))(folder)
    rechained(folder)
    rows = audited(folder, replay=9)
    assert wrong(rows) == [], "on another machine other tokens say nothing"
    assert [row.value[:26] for row in rows if row.status is Status.skipped] == ["step 4 samples other tokens"[:26]]


def test_without_checkpoints_only_the_first_step_is_replayed(copies: Callable[[], Path]) -> None:
    folder = copies()
    for step in (1, 2, 3):
        for file in sorted(saved(folder, step).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        saved(folder, step).rmdir()
    rows = audited(folder, replay=9)
    assert wrong(rows) == []
    assert [row.value[:7] for row in rows if row.name == "replay"] == ["step 1,"]


def test_the_gap_of_metrics_leaves_out_times_and_is_relative_above_one() -> None:
    # |40 - 44| / 40 = 0.1; |0.2 - 0.25| = 0.05; times and what is not finite do not count
    recorded = {"a": 40.0, "b": 0.2, "time/x": 1.0, "c": None}
    assert largest_gap(recorded, {"a": 44.0, "b": 0.25, "time/x": 9.0, "c": 1.0}) == pytest.approx(0.1)
    assert largest_gap({}, {"a": 1.0}) is None
