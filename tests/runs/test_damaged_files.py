"""Whatever happened to the files of a run: every command ends in one line at most, and other runs are still listed."""

import copy
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from in_one_test import each
from slow_cases import slow

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.runs import checkpoint, run_folder
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.lines import encode

SAVED = "checkpoints/step_000002"
FILES = [
    "config.yaml", "status.json", "metrics.jsonl", "eval.jsonl", "alarms.jsonl", "rollouts/step_000002.jsonl",
    *(f"{SAVED}/{name}" for name in ("state.json", "MANIFEST", "optimizer.safetensors")),
    *(f"{SAVED}/policy/{name}" for name in ("adapter_config.json", "adapter_model.safetensors", "rlft.json")),
]  # fmt: skip


def without_its_end(content):
    """Cut where a line ends: what is left is YAML."""
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: len(lines) // 4])


def with_values(**values):
    """Replaces values of JSON; None takes one out."""
    changed = lambda content: {**json.loads(content), **values}  # noqa: E731
    return lambda content: json.dumps({k: v for k, v in changed(content).items() if v is not None}).encode()


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "garbage": lambda _: bytes(range(256)) * 4,
    "a folder": None,
    "nested": lambda _: b"[" * 100_000 + b"\n",
    "other JSON": lambda _: b'[1]\n{"step": "x", "status": ["y"], "steps": 1e999}\n',
}


def damage(file, change):
    if change is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(change(file.read_bytes()))


def make_run(place):
    """A run of two steps as it is on disk, with one checkpoint."""
    place.mkdir(parents=True)
    plain = compose(["steps=2", "name=made", "data.size=16", "data.held_out_size=4"])
    run_folder.write_config(place, plain, {"base_fingerprint": "0"})
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


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    """Python's YAML parser takes a third of a second to give deep nesting up, and every command reads the same text."""
    seen = {}
    parse = run_folder._load

    def load(content):
        if content not in seen:
            try:
                seen[content] = parse(content), None
            except Exception as error:
                seen[content] = None, error
        value, error = seen[content]
        if error is not None:
            raise error.with_traceback(None)
        return copy.deepcopy(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_load", load)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    make_run(place / "runs" / "good")
    make_run(place / "runs" / "hurt")
    return place


@pytest.fixture
def workplace(made, here, monkeypatch):
    shutil.copytree(made, here, dirs_exist_ok=True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlft.system.crash.tempfile.tempdir", str(here))
    return here


LIGHT = ["runs", "runs --json", "watch runs/hurt", "diff runs/good runs/hurt", "report runs/hurt", "report runs"]
PLANNING = [
    "resume runs/hurt", "eval runs/hurt", "sample run=runs/hurt", "chat runs/hurt", "export runs/hurt out=out",
    "train lora.path=runs/hurt", "train resume=runs/hurt", "train hydra.run.dir=runs/hurt resume=auto", "eval latest",
]  # fmt: skip
READ_FIRST = ("config.yaml", f"{SAVED}/state.json", f"{SAVED}/policy/adapter_config.json")
WHATEVER_HAPPENS = ("runs", "runs --json", "report runs")
"""Commands of many runs: the other run is still shown."""


def ends_in_a_line(commands, workplace, capsys):
    """Runs these on the damaged run."""
    for typed in commands:
        before = {*Path("runs/hurt").rglob("*")}
        code = cli.run(typed.split())
        told = capsys.readouterr()
        lines = [line for line in told.err.splitlines() if line.startswith("rlft: ")]
        assert not list(workplace.glob("rlft_error_*")), f"{typed}: {told.err}"
        assert code in ((0,) if typed in WHATEVER_HAPPENS else (0, 2)), f"{typed}: {told.err}"
        assert len(lines) == (1 if code == 2 else 0), f"{typed}: {told.err}"
        assert {"good", "hurt"} <= {*re.findall(r"\w+", told.out)} or not typed.startswith("runs")
        assert {new.name for new in {*Path("runs/hurt").rglob("*")} - before} <= {"report.html"}


QUICK = ("status.json", "metrics.jsonl", "rollouts/step_000002.jsonl", f"{SAVED}/MANIFEST")


@pytest.mark.parametrize("name", [file if file in QUICK else slow(file) for file in FILES])
def test_no_command_ends_in_a_traceback(name, workplace, capsys):
    file = Path("runs/hurt") / name
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    for number, change in enumerate(DAMAGES.values()):
        if file.is_dir():
            file.rmdir()
        for path, content in before.items():
            path.write_bytes(content)
        damage(file, change)
        # Commands that plan a run take longer: all damages of what they read first, else a kind each file.
        heavy = name in READ_FIRST or number == FILES.index(name) % len(DAMAGES)
        ends_in_a_line([*LIGHT, *(PLANNING if heavy else ())], workplace, capsys)


@pytest.mark.parametrize(("change", "said"), [
    (DAMAGES["cut"], "is damaged (it "),  # in the middle of a line: YAML or not, as the paths in it are long
    (without_its_end, "it has no command"),
    (DAMAGES["empty"], "it holds no keys"),
    *((DAMAGES[name], "it is no YAML") for name in ("garbage", "nested", "other JSON")),
    (None, "cannot be read (Is a directory)"),
], ids=["cut", "without its end", "empty", "garbage", "nested", "other JSON", "a folder"])  # fmt: skip
def test_a_damaged_config_is_named(change, said, workplace, ran):
    damage(Path("runs/hurt/config.yaml"), change)
    told = ran(["resume", "runs/hurt"], ends=2).err
    assert told.startswith("rlft: resume: config.yaml in that folder ")
    assert said in told
    rows = {row["folder"]: row for row in json.loads(ran(["runs", "--json"]).out)}
    assert [rows[f"runs/{name}"]["status"] for name in ("good", "hurt")] == ["finished", "damaged"]
    assert "config.yaml" in rows["runs/hurt"]["reason"]
    assert "hurt" in ran(["runs", "status=damaged"]).out


def test_a_config_cut_at_any_line_is_refused_or_that_of_the_run(workplace):
    """Inside its origin, too: else a fingerprint would be gone, and with it the refusal of changed data."""
    file = Path("runs/hurt/config.yaml")
    lines = file.read_text().splitlines(keepends=True)
    origin = lines.index("origin:\n")
    for end in (*range(0, origin, 5), *range(origin + 2, len(lines))):
        file.write_text("".join(lines[:end]))
        message = r"it (is cut short|holds no keys|has no command)" if end < origin else "end of its origin is missing"
        with pytest.raises(ValueError, match=message):
            run_folder.whole_config(file.parent)
    file.write_text("".join(lines))
    assert run_folder.whole_config(file.parent)["command"] == "train"


def test_a_file_that_may_not_be_read_is_named(workplace, monkeypatch, capsys):
    opened = Path.open

    def refuse(self, *args, **keys):
        if "hurt" in self.parts and self.name in refused:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **keys)

    monkeypatch.setattr(Path, "open", refuse)
    for name in ("config.yaml", "eval.jsonl", "status.json", "MANIFEST", "step_000002.jsonl", "metrics.jsonl"):
        refused = [name]
        ends_in_a_line(LIGHT, workplace, capsys)
    assert cli.run(["diff", "runs/good", "runs/hurt"]) == 2
    said = "rlft: metrics.jsonl: cannot be read (Permission denied), got runs/hurt/"
    assert capsys.readouterr().err.startswith(said)


READERS = {
    "runs": ("metrics.jsonl", "eval.jsonl", "alarms.jsonl"),
    "watch runs/hurt": ("metrics.jsonl", "eval.jsonl"),
    "diff runs/good runs/hurt": ("metrics.jsonl", "eval.jsonl"),
    "report runs/hurt": ("metrics.jsonl", "eval.jsonl", "alarms.jsonl", "rollouts/step_000002.jsonl"),
    "report runs": ("metrics.jsonl", "eval.jsonl", "alarms.jsonl", "rollouts/step_000002.jsonl"),
}
"""Commands, and the files that they read."""


@pytest.mark.parametrize("typed", READERS)
def test_every_reader_names_the_lines_that_are_damaged(typed, workplace, ran):
    for name in READERS[typed]:
        file = Path("runs/hurt") / name
        first, *others = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(first.replace(b"}", b"\xff") + b"".join(others))
    told = [line for line in ran(typed.split()).err.splitlines() if "damaged" in line]
    steps = {name: 2 if name.startswith("rollouts") else 1 for name in READERS[typed]}
    assert told == [f"runs/hurt/{name}: line 1 (step {step}) is damaged and left out" for name, step in steps.items()]


def test_a_config_of_a_newer_version_is_named_as_such(workplace, ran):
    file = Path("runs/hurt/config.yaml")
    file.write_text(file.read_text().replace("format: 1\n", "format: 2\n"))
    said = "was written by a newer rlft (format 2, this one reads up to 1), got runs/hurt; update rlft"
    for typed in (word for word in PLANNING if word not in ("eval latest", "train lora.path=runs/hurt")):
        [told] = [line for line in ran(typed.split(), ends=2).err.splitlines() if line.startswith("rlft: ")]
        assert told.endswith(said), typed
    row = next(row for row in json.loads(ran(["runs", "--json"]).out) if row["folder"] == "runs/hurt")
    assert row["reason"].startswith("config.yaml was written by ")


def test_a_checkpoint_of_a_newer_version_is_named_and_not_passed_over(workplace, ran):
    saved = Path("runs/hurt") / SAVED
    checkpoint.change_state(saved, {"format": 2})
    said = "its state.json was written by a newer rlft (format 2, this one reads up to 1), got runs/hurt/checkpoints"
    for typed in ("resume runs/hurt", "export runs/hurt out=out", f"resume {saved}", "train lora.path=runs/hurt"):
        [told] = [line for line in ran(typed.split(), ends=2).err.splitlines() if line.startswith("rlft: ")]
        assert said in told, typed


WRONG = [{"step": None}, {"bytes": -1}, {"kept": "3"}, {"rewards": {"x": "y"}}, {"rewards": [1.0]}, {"sampled": 0}]
SAMPLED = ["n=2", "num_prompts=4", "prompts_per_step=2", "data.size=16", "data.held_out_size=4", "name=sampled"]


REFUSED = [
    *(
        ("progress.json", change, "progress.json in that folder is damaged")
        for change in (*filter(None, DAMAGES.values()), *(with_values(**values) for values in WRONG))
    ),
    ("progress.json", None, "its progress.json is a folder instead of a file"),
    ("samples.jsonl", DAMAGES["cut"], "samples.jsonl is shorter than progress.json says"),
    ("samples.jsonl", DAMAGES["empty"], "samples.jsonl is shorter than progress.json says"),
    ("samples.jsonl", None, "its samples.jsonl is a folder instead of a file"),
]


@pytest.fixture(scope="module")
def half_sampled(tmp_path_factory):
    """A run of `rlft sample` that was stopped after its first step."""
    run = tmp_path_factory.mktemp("half") / "sampled"
    run.mkdir()
    plain = compose(SAMPLED, command="sample")
    run_folder.write_config(run, plain, resolve(plain).plan().fingerprints)
    (run / "samples.jsonl").write_bytes(encode({"reward": 1.0}) * 3)
    size = (run / "samples.jsonl").stat().st_size
    done = {"step": 1, "bytes": size, "sampled": 4, "kept": 3, "prompts_kept": 2, "rewards": {"exact_match": 3.0}}
    (run / "progress.json").write_text(json.dumps(done))
    return run


@each(("name", "change", "said"), REFUSED)
def test_damaged_samples_are_refused_before_weights_are_loaded(
    name, change, said, half_sampled, here, monkeypatch, ran, capsys
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlft.model.backbone.load_backbone", lambda *args: pytest.fail("weights were loaded"))
    shutil.rmtree("runs", ignore_errors=True)
    shutil.copytree(half_sampled, "runs/sampled")
    damage(Path("runs/sampled") / name, change)
    capsys.readouterr()
    assert cli.run(["resume", "runs/sampled"]) == 2
    told = ran(["runs", "--json"])
    assert [said in line for line in told.err.splitlines()] == [True]
    assert json.loads(told.out)[0]["folder"] == "runs/sampled"
