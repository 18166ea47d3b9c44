"""config.yaml, read as a whole and by sections that many runs have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from slow_cases import slow

from rlft.config.compose import compose
from rlft.runs import config_file
from rlft.runs.config_file import by_section, whole_config
from rlft.runs.run_folder import write_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {**compose(["+recipe=ppo_arithmetic", "lora.target_modules=[q_proj,v_proj]"]), "token_budget": 512}
    write_config(tmp_path, config, {"data_fingerprint": "a" * 64})
    return tmp_path


def test_sections_are_what_the_whole_file_says(folder: Path) -> None:
    content = (folder / config_file.CONFIG).read_bytes()
    assert by_section(content) == yaml.safe_load(content)
    assert whole_config(folder, shared=True) == whole_config(folder)


DAMAGES: dict[str, Any] = {
    "cut in a line": lambda content: content[:700],
    "cut between lines": lambda content: b"".join(content.splitlines(keepends=True)[:20]),
    "zeros": lambda content: content[:200] + bytes(200) + content[400:],
    "a quote": lambda content: content.replace(b"seed: 0", b"seed: '0"),
    "a key twice": lambda content: content + b"seed: 3\n",
    "a bracket": lambda content: content.replace(b"lora:", b"lora: ["),
    "an alias": lambda content: content.replace(b"seed: 0", b"seed: *a"),
    "an anchor": lambda content: content.replace(b"seed: 0", b"seed: &a 0").replace(b"steps: ", b"steps: *a #"),
    "two documents": lambda content: content + b"---\n" + content,
    "nothing": lambda content: b"",
    "a list": lambda content: b"- 1\n",
    "another order of bytes": lambda content: content.decode().encode("utf-16"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damage_is_told_in_the_same_words_by_sections_as_by_the_whole(damage: Any, folder: Path) -> None:
    def said(shared: bool) -> Any:
        try:
            return whole_config(folder, shared=shared)
        except (OSError, ValueError) as error:
            return type(error), str(error)

    file = folder / config_file.CONFIG
    file.write_bytes(damage(file.read_bytes()))
    assert said(True) == said(False)


def test_equal_sections_of_many_runs_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    load = yaml.load
    monkeypatch.setattr(yaml, "load", lambda content, Loader: read.append(content) or load(content, Loader=Loader))
    config_file._section_of.cache_clear()
    file = folder / config_file.CONFIG
    for seed in range(50):
        file.write_bytes(file.read_bytes().replace(f"seed: {seed}\n".encode(), f"seed: {seed + 1}\n".encode(), 1))
        assert whole_config(folder, shared=True)["seed"] == seed + 1
    number = len(read)
    assert number == len(yaml.safe_load(file.read_bytes())) + 49, "all of the first, and the seed of each of the others"


@pytest.mark.parametrize(
    "content", [slow("[" * 100_000), slow("a: " + "{" * 50_000), "a:\n" + " -" * 50_000, "? " * 50_000]
)
def test_what_is_nested_too_deeply_is_damage_and_no_crash(content: str, folder: Path) -> None:
    """libyaml's loader overflows the stack there, so this is asked in a process of its own."""
    (folder / config_file.CONFIG).write_text(content)
    asked = "import sys; from pathlib import Path; from rlft.runs.config_file import whole_config\n"
    asked += "for shared in (False, True):\n  try: whole_config(Path(sys.argv[1]), shared=shared)\n"
    asked += "  except ValueError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", asked, str(folder)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "it is no YAML\n" * 2), done.stderr
