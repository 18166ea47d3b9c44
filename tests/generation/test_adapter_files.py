"""Adapter folders: what is written, and that nothing stays behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlft.generation.adapter_files import PREFIX, AdapterFiles, memory_folder
from rlft.system.disk import DiskError
from rlft.system.locks import sweep
from rlft.types import Adapter

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapter(version: int, value: float) -> Adapter:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": {"q_proj", "k_proj"}}
    return Adapter(version=version, weights={NAME: torch.full((2, 3), value)}, config=config)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[AdapterFiles]:
    files = AdapterFiles(tmp_path)
    yield files
    files.close()


def test_an_adapter_is_written_under_the_names_peft_reads(files: AdapterFiles) -> None:
    folder = files.write(adapter(17, 0.5))
    torch.testing.assert_close(load_file(folder / "adapter_model.safetensors")[NAME], torch.full((2, 3), 0.5))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config == {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["k_proj", "q_proj"]}


def test_no_path_is_used_twice_even_for_the_same_version(files: AdapterFiles) -> None:
    first = files.write(adapter(0, 1.0))
    files.remove(first)
    assert files.write(adapter(0, 2.0)) != first


def test_views_of_one_storage_and_transposed_weights_can_be_written(files: AdapterFiles) -> None:
    storage = torch.arange(6.0)
    weights = {"a": storage.view(2, 3), "b": storage.view(2, 3).T}
    written = load_file(files.write(Adapter(version=0, weights=weights, config={})) / "adapter_model.safetensors")
    assert written["b"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_config_that_json_cannot_hold_is_named(files: AdapterFiles) -> None:
    with pytest.raises(TypeError, match=r"adapter_config\.json cannot hold a Tensor"):
        files.write(Adapter(version=0, weights={}, config={"r": torch.ones(2)}))


def test_close_removes_the_folder_and_may_be_called_twice(files: AdapterFiles, tmp_path: Path) -> None:
    files.write(adapter(0, 1.0))
    files.close()
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_goes_when_the_process_ends_with_an_exception(tmp_path: Path) -> None:
    process = run_holder(tmp_path, "raise RuntimeError")
    assert process.wait(timeout=60) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_uses_is_kept(tmp_path: Path) -> None:
    live, dead = run_holder(tmp_path, "sys.stdin.read()"), run_holder(tmp_path, "sys.stdin.read()")
    dead.send_signal(signal.SIGKILL)
    dead.wait(timeout=60)
    assert {folder.name.split("-")[2] for folder in tmp_path.iterdir()} == {str(live.pid), str(dead.pid)}
    sweep(PREFIX, tmp_path)
    assert [folder.name.split("-")[2] for folder in tmp_path.iterdir()] == [str(live.pid)]
    live.communicate("", timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    fork = "pid = os.fork(); pid or sys.exit(); os.waitpid(pid, 0); print('child gone', flush=True); sys.stdin.read()"
    process = run_holder(tmp_path, fork)
    assert process.stdout is not None
    assert process.stdout.readline() == "child gone\n"
    assert len(list(tmp_path.iterdir())) == 1
    process.communicate("", timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_folders_are_made_in_memory_where_there_is_a_memory_file_system() -> None:
    files = AdapterFiles()
    assert files.root.parent == memory_folder()
    assert files.root.name.startswith(f"{PREFIX}{os.getpid()}-")
    files.close()


def test_without_locks_adapters_are_written_and_nobody_elses_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = AdapterFiles(tmp_path)

    def refuse(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    files = AdapterFiles(tmp_path)
    assert load_file(files.write(adapter(1, 1.0)) / "adapter_model.safetensors")[NAME].sum() == 6
    sweep(PREFIX, tmp_path)
    assert other.root.is_dir()
    files.close()
    other.close()


def test_a_full_memory_file_system_is_named(files: AdapterFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's /dev/shm has 64 MB if nobody asks for more."""

    def full(*args: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(DiskError, match=f"the disk is full .*: {files.root} needs 13 kB for 1-v1 and has"):
        files.write(adapter(1, 1.0))  # 6 numbers and three blocks


def run_holder(parent: Path, then: str) -> subprocess.Popen[str]:
    """A process that holds adapter files under `parent` and goes on with `then`; it has made its folder on return."""
    code = f"""
import os, sys
from pathlib import Path
from rlft.generation.adapter_files import AdapterFiles
files = AdapterFiles(Path({str(parent)!r}))
print("ready", flush=True)
{then}
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process
