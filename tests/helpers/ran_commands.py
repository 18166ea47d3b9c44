"""Commands in this process, of which tests look at what is printed, and a folder to run them in."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlft import cli


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `rlft` with these words, which ends with this code: what has been printed since it was last looked at.

    What fixtures of modules and sessions have printed is not of the test.
    """
    capsys.readouterr()

    def run(words: Sequence[str], ends: int = 0) -> Any:
        code, printed = cli.run(list(words)), capsys.readouterr()
        assert code == ends, (words, printed)
        return printed

    return run
