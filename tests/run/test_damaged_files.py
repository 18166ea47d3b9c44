"""Whatever happened to the files of a run: every verb ends in one line at most, and other runs are still listed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlft import cli, runfolder
from rlft.config import compose
from rlft.logger.jsonl import encode
from rlft.roots import Verb
from rlft.trainer import checkpoint
from rlft.trainer.checkpoint import Checkpoint

SAVED = "checkpoints/step_000002"
FILES = [
    "config.yaml", "status.json", "metrics.jsonl", "eval.jsonl", "alarms.jsonl", "rollouts/step_000002.jsonl",
    *(f"{SAVED}/{name}" for name in ("state.json", "MANIFEST", "optimizer.safetensors")),
    *(f"{SAVED}/policy/{name}" for name in ("adapter_config.json", "adapter_model.safetensors", "rlft.json")),
]  # fmt: skip


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_its_end(file: Path) -> None:
    """Cut where a line ends: what is left is YAML."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 4]))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 4)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def nested(file: Path) -> None:
    file.write_text("[" * 100_000 + "\n")


def other_json(file: Path) -> None:
    file.write_text('[1]\n{"step": "x", "status": ["y"], "steps": 1e999}\n')


DAMAGES = [cut, empty, garbage, folder, nested, other_json]


def make_run(place: Path) -> None:
    """A run of two steps as it is on disk, with one checkpoint."""
    import torch

    place.mkdir(parents=True)
    runfolder.start(place, compose(["steps=2", "name=made"]), {"base_fingerprint": "0"})
    (place / "status.json").write_text('{"status": "finished", "steps": 2}\n')
    lines = {"metrics.jsonl": {"reward/mean": 0.5}, "eval.jsonl": {"accuracy": 0.5, "accuracy_se": 0.1, "examples": []}}
    lines["alarms.jsonl"] = {"name": "kl", "text": "it grows"}
    for name, line in lines.items():
        (place / name).write_bytes(b"".join(encode({"step": step, **line}) for step in (1, 2)))
    said = {"completion": "1", "token_ids": [1], "logprobs": [0.0], "rewards": {"r": 1.0}, "reward": 1.0}
    row = {"step": 2, "prompt_id": "p", "prompt": [{"role": "user", "content": "x"}], "answer": "1", **said}
    end = {"advantage": 0.0, "policy_version": 1, "finish_reason": "stop"}
    (place / "rollouts").mkdir()
    content = b"".join(encode({**dict(list(row.items())[:2]), "index": i, **row, **end}) for i in range(2))
    (place / "rollouts" / "step_000002.jsonl").write_bytes(content)
    tensors = {"w": torch.zeros(2)}
    saved = Checkpoint(step=2, adapters={"policy": tensors}, adapter_config={"r": 1}, optimizer=tensors, state={})
    checkpoint.save(place / "checkpoints", saved, keep=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    make_run(place / "runs" / "good")
    make_run(place / "runs" / "hurt")
    return place


@pytest.fixture
def workplace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlft.run.crash.tempfile.tempdir", str(tmp_path))
    return tmp_path


LIGHT = ["runs", "runs --json", "watch runs/hurt", "diff runs/good runs/hurt", "report runs/hurt", "report runs"]
PLANNING = [
    "resume runs/hurt", "eval runs/hurt", "sample run=runs/hurt", "chat runs/hurt", "export runs/hurt out=out",
    "train lora.path=runs/hurt", "train resume=runs/hurt", "train hydra.run.dir=runs/hurt resume=auto", "eval latest",
]  # fmt: skip
WHATEVER_HAPPENS = ("runs", "runs --json", "report runs")
"""Verbs of many runs: the other run is still shown."""


@pytest.mark.parametrize("name", FILES)
def test_no_verb_ends_in_a_traceback(name: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, chosen = Path("runs/hurt") / name, FILES.index(name)
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    for damage in DAMAGES:
        if file.is_dir():
            file.rmdir()
        for path, content in before.items():
            path.write_bytes(content)
        damage(file)
        # Verbs that plan a run take a second each: a kind of damage each file.
        heavy = damage is DAMAGES[chosen % len(DAMAGES)]
        ends_in_a_line([*LIGHT, *(PLANNING if heavy else ())], workplace, capsys)


def ends_in_a_line(verbs: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs these on the damaged run."""
    for typed in verbs:
        before = sorted(Path("runs/hurt").rglob("*"))
        code = cli.run(typed.split())
        told = capsys.readouterr()
        lines = [line for line in told.err.splitlines() if line.startswith("rlft: ")]
        assert not list(workplace.glob("rlft_error_*")), f"{typed}: {told.err}"
        assert code in ((0,) if typed in WHATEVER_HAPPENS else (0, 2)), f"{typed}: {told.err}"
        assert len(lines) == (1 if code == 2 else 0), f"{typed}: {told.err}"
        if typed.startswith("runs"):
            assert "good" in told.out
            assert "hurt" in told.out
        for new in set(Path("runs/hurt").rglob("*")) - set(before):
            assert new.name == "report.html"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is damaged (it "),  # in the middle of a line: YAML or not, as the paths in it are long
        (without_its_end, "it has no verb"),
        (empty, "it holds no keys"),
        (garbage, "it is no YAML"),
        (nested, "it is no YAML"),
        (other_json, "it is no YAML"),
        (folder, "cannot be read (Is a directory)"),
    ],
)
def test_a_damaged_config_is_named(
    damage: Callable[[Path], None], said: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(Path("runs/hurt/config.yaml"))
    assert cli.run(["resume", "runs/hurt"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlft: resume: config.yaml in that folder ")
    assert said in told
    assert cli.run(["runs", "--json"]) == 0
    rows = {row["folder"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["runs/good"]["status"] == "finished"
    assert rows["runs/hurt"]["status"] == "damaged"
    assert "config.yaml" in rows["runs/hurt"]["reason"]
    assert cli.run(["runs", "status=damaged"]) == 0
    assert "hurt" in capsys.readouterr().out


def test_a_config_cut_at_any_line_is_refused_or_that_of_the_run(workplace: Path) -> None:
    file = Path("runs/hurt/config.yaml")
    lines = file.read_text().splitlines(keepends=True)
    origin = lines.index("origin:\n")
    for end in range(0, origin, 5):
        file.write_text("".join(lines[:end]))
        with pytest.raises(ValueError, match=r"it (is cut short|holds no keys|has no verb)"):
            runfolder.whole_config(file.parent)
    file.write_text("".join(lines))
    assert runfolder.whole_config(file.parent)["verb"] == Verb.train


def test_a_file_that_may_not_be_read_is_named(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Path.open

    def refuse(self: Path, *args: object, **keys: object) -> object:
        if "hurt" in self.parts and self.name in refused:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", refuse)
    for name in ("config.yaml", "metrics.jsonl", "eval.jsonl", "status.json", "MANIFEST", "step_000002.jsonl"):
        refused = [name]
        for typed in LIGHT:
            code = cli.run(typed.split())
            told = capsys.readouterr()
            assert not list(workplace.glob("rlft_error_*")), f"{name}, {typed}: {told.err}"
            assert code in ((0,) if typed in WHATEVER_HAPPENS else (0, 2)), f"{name}, {typed}: {told.err}"
            if name == "metrics.jsonl" and typed == "diff runs/good runs/hurt":
                assert told.err.startswith("rlft: metrics.jsonl: cannot be read (Permission denied), got runs/hurt/")
