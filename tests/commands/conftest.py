"""A browser for the pages that commands make or serve, and a folder to type words in."""

from pathlib import Path

import pytest
from ran_commands import here, ran

from rlft import cli

__all__ = ["here", "ran"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        from report_figures import open_chromium
    found = open_chromium(str(tmp_path_factory.mktemp("profile")), width=1500, height=1100)
    yield found
    found.quit()


@pytest.fixture
def typed_in(here, monkeypatch):
    """The working directory, with a run and files of a user's; the cache is empty."""
    for file in ("qa/run.yaml", "qa/rows.csv", "runs/demo/11-00/config.yaml", "my model/config.json"):
        (here / file).parent.mkdir(parents=True, exist_ok=True)
        (here / file).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    return here
