"""The run of all tests, exported once in each form."""

import pytest
from run_folders import files_of

from rlft.commands.export.command import export
from rlft.commands.export.model_card import prepare
from rlft.runs.find import find
from rlft.runs.lines import silent


@pytest.fixture(scope="session")
def exports(trained, tmp_path_factory):
    """{form: the folder of the trained run's export}; the run itself was only read."""
    before, folder = files_of(trained), tmp_path_factory.mktemp("exports")
    made = {
        kind: export(prepare(find(trained), str(folder / kind), kind, None, silent), silent)
        for kind in ("model", "adapter")
    }
    assert files_of(trained) == before
    return made
