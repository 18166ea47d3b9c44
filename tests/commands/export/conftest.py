"""The run of all tests, exported once in each form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from run_folders import files_of

from rlft.commands.export.command import export
from rlft.commands.export.model_card import prepare
from rlft.runs.find import find
from rlft.runs.lines import silent


@pytest.fixture(scope="session")
def exports(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """{form: the folder of the trained run's export}; the run itself was only read."""
    before, folder = files_of(trained), tmp_path_factory.mktemp("exports")
    made = {
        kind: export(prepare(find(trained), str(folder / kind), kind, None, silent), silent)
        for kind in ("model", "adapter")
    }
    assert files_of(trained) == before
    return made
