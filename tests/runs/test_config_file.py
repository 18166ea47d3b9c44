"""config.yaml of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slow_cases import slow

from rlft.runs.config_file import CONFIG


@pytest.mark.parametrize(
    "content", [slow("[" * 100_000), slow("a: " + "{" * 50_000), "a:\n" + " -" * 50_000, "? " * 50_000]
)
def test_what_is_nested_too_deeply_is_damage_and_no_crash(content: str, tmp_path: Path) -> None:
    """libyaml's loader overflows the stack there, so this is asked in a process of its own."""
    (tmp_path / CONFIG).write_text(content)
    asked = "import sys; from pathlib import Path; from rlft.runs.config_file import whole_config\n"
    asked += "try: whole_config(Path(sys.argv[1]))\nexcept ValueError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", asked, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "it is no YAML\n"), done.stderr
