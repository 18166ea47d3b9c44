"""Checkpoints: whole or not there, checked before they are trusted, nothing pickled."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rlft.model.adapter_folder import HEAD, check_adapter_folder, load_tensors
from rlft.runs import checkpoint
from rlft.runs.checkpoint import Checkpoint
from rlft.system.disk import DiskError
from rlft.types import UserError


def made(step):
    """Two adapters with a tensor each, and a head beside one and one alone; other values at each step."""
    return Checkpoint(
        step=step,
        adapters={role: {"a.weight": torch.arange(6.0).view(2, 3) * step} for role in ("policy", "reward")},
        adapter_config={"r": 2, "target_modules": ["q_proj"]},
        optimizer={"exp_avg/a": torch.full((2,), 0.1 * step), "step/a": torch.tensor(float(step))},
        state={"seed": 3, "base_fingerprint": "b"},
        heads={
            "reward": {"weight": torch.tensor([[1.0, -2.0]]) * step, "bias": torch.tensor([0.5])},
            "critic": {"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([0.25 * step])},
        },
    )


def names(root):
    return sorted(path.name for path in root.iterdir())


def values(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def newest(root, *said):
    """The newest checkpoint that can be read, of which this is said."""
    told = []
    loaded = checkpoint.load_newest(root, told.append)
    assert loaded is not None
    assert told == [*said]
    return loaded


def test_what_was_saved_is_loaded(tmp_path):
    saved = made(7)
    folder = checkpoint.save(tmp_path, saved, keep=2)
    assert folder == tmp_path / "step_000007"
    loaded = newest(tmp_path)
    assert (loaded.step, loaded.state, loaded.adapter_config) == (7, saved.state, saved.adapter_config)
    assert values(loaded.optimizer) == values(saved.optimizer)
    for mine, theirs in ((loaded.adapters, saved.adapters), (loaded.heads, saved.heads)):
        assert {role: values(tensors) for role, tensors in mine.items()} == {r: values(t) for r, t in theirs.items()}
    # Each role's folder says what it is and to which base it belongs, and is read by what starts a role from one.
    for role in ("policy", "reward", "critic"):
        said = json.loads((folder / role / "rlft.json").read_text())
        assert said == {"role": role, "step": 7, "base_fingerprint": "b"}
    reward = folder / "reward"
    assert values(load_tensors(reward, "critic.init")) == {"a.weight": [[0.0, 7.0, 14.0], [21.0, 28.0, 35.0]]}
    assert values(load_tensors(reward, "critic.init", HEAD)) == {"weight": [[7.0, -14.0]], "bias": [0.5]}
    assert check_adapter_folder(str(reward), "critic.init") == {"r": 2, "target_modules": ["q_proj"]}


def test_a_folder_that_somebody_else_writes_is_part_of_the_checkpoint(tmp_path):
    def write(folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")

    saved = Checkpoint(
        step=4, adapters={}, adapter_config={}, optimizer={}, state={"seed": 1}, write_folders={"model": write}
    )
    folder = checkpoint.save(tmp_path, saved, keep=1)
    assert (folder / "model" / "model.safetensors").read_bytes() == b"weights"
    assert checkpoint.find_damage(folder) is None
    found = checkpoint.load(folder)
    assert (found.step, found.folder, found.adapters, found.adapter_config) == (4, folder, {}, {})
    (folder / "model" / "model.safetensors").write_bytes(b"weighty")
    assert checkpoint.find_damage(folder) == "model/model.safetensors does not match its checksum"


def test_views_and_transposes_are_saved_by_value(tmp_path):
    """Safetensors refuses tensors that are not contiguous, and rows of one storage would share it."""
    base = torch.arange(6.0).view(2, 3)
    saved = Checkpoint(
        step=1, adapters={"policy": {"t": base.T}}, adapter_config={}, optimizer={"row": base[1]}, state={},
        heads={"critic": {"weight": base[:, 1:2].T}},
    )  # fmt: skip
    checkpoint.save(tmp_path, saved, keep=1)
    loaded = checkpoint.load(tmp_path / "step_000001")
    assert torch.equal(loaded.adapters["policy"]["t"], base.T)
    assert loaded.heads["critic"]["weight"].tolist() == [[1.0, 4.0]]
    assert torch.equal(loaded.optimizer["row"], base[1])


def test_the_newest_ones_stay(tmp_path):
    for step in (2, 4, 6, 8):
        checkpoint.save(tmp_path, made(step), keep=3)
    assert names(tmp_path) == ["step_000004", "step_000006", "step_000008"]
    checkpoint.save(tmp_path, made(10), keep=1)
    assert names(tmp_path) == ["step_000010"]
    # step_1000000 comes before step_999990 in the alphabet, and after it in the run.
    for step in (999_980, 999_990, 1_000_000):
        checkpoint.save(tmp_path, made(step), keep=2)
    assert [checkpoint.step_of(folder) for folder in checkpoint.finished(tmp_path)] == [999_990, 1_000_000]
    assert newest(tmp_path).step == 1_000_000
    checkpoint.save(tmp_path, made(1_000_010), keep=2)
    assert names(tmp_path) == ["step_1000000", "step_1000010"]


def test_only_json_safetensors_and_a_manifest_that_sha256sum_checks_are_written(tmp_path):
    """No pickle: every file is text or begins with the safetensors header's length and an opening brace."""
    folder = checkpoint.save(tmp_path, made(1), keep=1)
    files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    modes = {f.stat().st_mode & 0o777 for f in folder.rglob("*") if f.is_file()}
    assert modes == {folder.stat().st_mode & 0o666}, "whoever may read the folder may read all of it"
    assert sorted(files) == [
        "MANIFEST", "critic/head.safetensors", "critic/rlft.json", "optimizer.safetensors",
        "policy/adapter_config.json", "policy/adapter_model.safetensors", "policy/rlft.json",
        "reward/adapter_config.json", "reward/adapter_model.safetensors", "reward/head.safetensors",
        "reward/rlft.json", "state.json",
    ]  # fmt: skip
    for name, raw in files.items():
        if name.endswith(".safetensors"):
            json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        elif name.endswith(".json"):
            json.loads(raw)
    checked = subprocess.run(["sha256sum", "-c", "MANIFEST"], cwd=folder, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    listed = [line.removesuffix(": OK") for line in checked.stdout.splitlines()]
    assert {*listed} == files.keys() - {"MANIFEST"}


def flipped(name):
    """Changes the last byte of this file of a checkpoint."""

    def change(folder):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))

    return change


def lost(name):
    return lambda folder: (folder / name).unlink()


def manifest(content):
    return lambda folder: (folder / "MANIFEST").write_bytes(content)


def cut(name, share):
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def cut_between_lines(folder):
    """And what it then does not list is damaged: nobody would look."""
    file = folder / "MANIFEST"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    (folder / "state.json").write_text('{"step": 4, "seed": 99}')


def cut_between_lines_and_lost(folder):
    cut_between_lines(folder)
    (folder / "state.json").unlink()


UNLIKE = "does not match its checksum"
DAMAGES = {
    "a byte": (flipped("optimizer.safetensors"), f"optimizer.safetensors {UNLIKE}"),
    "a byte of a head": (flipped("critic/head.safetensors"), f"critic/head.safetensors {UNLIKE}"),
    "a cut file": (cut("reward/adapter_model.safetensors", 0.99), f"reward/adapter_model.safetensors {UNLIKE}"),
    "a lost file": (lost("policy/adapter_model.safetensors"), "policy/adapter_model.safetensors is missing"),
    "a lost head": (lost("reward/head.safetensors"), "reward/head.safetensors is missing"),
    "a lost role": (lambda folder: shutil.rmtree(folder / "reward"), "reward/adapter_config.json is missing"),
    "an empty manifest": (manifest(b""), "MANIFEST does not list critic/head.safetensors"),
    "no manifest": (lost("MANIFEST"), "MANIFEST cannot be read"),
    "a manifest of zeros": (manifest(bytes(300)), "MANIFEST does not list critic/head.safetensors"),
    "a manifest that is no text": (manifest(b"\xff\xfe"), "MANIFEST cannot be read"),
    # 977 bytes, 66 and a newline beside each name: the middle is in the checksum of the sixth file.
    "a manifest cut in a line": (cut("MANIFEST", 0.5), "MANIFEST does not list policy/rlft.json"),
    "a manifest cut between lines": (cut_between_lines, "MANIFEST does not list state.json"),
    "a manifest cut and its file lost": (cut_between_lines_and_lost, "MANIFEST does not list state.json"),
}
flip_a_byte = DAMAGES["a byte"][0]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(name, tmp_path):
    damage, words = DAMAGES[name]
    for step in (2, 4):
        checkpoint.save(tmp_path, made(step), keep=2)
    damage(tmp_path / "step_000004")
    said = f"checkpoint step_000004 is damaged ({words}); going back to the one before"
    assert newest(tmp_path, said).step == 2


def test_when_all_are_damaged_the_run_is_refused_and_when_there_is_none_there_is_none(tmp_path):
    assert checkpoint.load_newest(tmp_path / "nowhere", pytest.fail) is None
    for step in (2, 4):
        flip_a_byte(checkpoint.save(tmp_path, made(step), keep=2))
    said = []
    with pytest.raises(UserError, match="resume: every checkpoint of this run is damaged"):
        checkpoint.load_newest(tmp_path, said.append)
    assert len(said) == 2


def test_a_damaged_checkpoint_does_not_push_out_a_good_one_and_is_replaced(tmp_path):
    """keep=1; a kill left 2 beside the new 4, which was damaged later. Going on from 2, 3 must not yield to 4."""
    for step in (2, 4):
        checkpoint.save(tmp_path, made(step), keep=2)
    flip_a_byte(tmp_path / "step_000004")
    checkpoint.save(tmp_path, made(3), keep=1)
    assert names(tmp_path) == ["step_000003"]
    assert newest(tmp_path).step == 3
    flip_a_byte(tmp_path / "step_000003")
    checkpoint.save(tmp_path, made(3), keep=2)  # a step that is done again replaces it
    assert checkpoint.find_damage(tmp_path / "step_000003") is None


def test_what_a_kill_left_half_written_is_no_checkpoint_and_goes_with_the_next_save(tmp_path):
    checkpoint.save(tmp_path, made(2), keep=2)
    half = tmp_path / ".writing_step_000004"
    (half / "policy").mkdir(parents=True)
    (half / "policy/adapter_model.safetensors").write_bytes(b"half")
    assert newest(tmp_path).step == 2
    checkpoint.save(tmp_path, made(3), keep=2)  # checkpoint.every was changed: 4 itself does not come again
    assert names(tmp_path) == ["step_000002", "step_000003"]


@pytest.mark.parametrize(
    "broken", ["safetensors.torch.save_file", f"{checkpoint.__name__}._write_json", "rlft.system.files.flush"]
)
def test_a_save_that_fails_leaves_the_ones_before_as_they_were(broken, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, made(2), keep=1)
    before = {f: f.read_bytes() for f in (tmp_path / "step_000002").rglob("*") if f.is_file()}

    def full(*args, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, full)
    with pytest.raises(DiskError, match="No space left"):
        checkpoint.save(tmp_path, made(4), keep=1)
    assert names(tmp_path) == ["step_000002"]
    assert {f: f.read_bytes() for f in before} == before


def test_everything_is_on_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """A power cut after the rename must not find empty files behind it."""
    flushed = []
    monkeypatch.setattr("rlft.system.files.flush", flushed.append)
    rename = Path.rename

    def renamed(self, target):
        everything = {self, *self.rglob("*")}
        assert everything <= set(flushed)
        flushed.clear()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    checkpoint.save(tmp_path, made(1), keep=1)
    assert flushed == [tmp_path]  # the new name itself
