"""The run that is audited."""

import json
import shutil

import pytest
from audited_runs import WORDS

from rlft import cli


@pytest.fixture(scope="session")
def honest(tmp_path_factory, tiny_path):
    """The folder of a run of four steps, all saved, beside its data and its base."""
    place = tmp_path_factory.mktemp("audited")
    shutil.copytree(tiny_path, place / "base")
    rows = [{"prompt": f"{a} + {b}", "answer": str(a + b)} for a in range(12, 20) for b in range(31, 35)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = (f"data.path={place / 'data.jsonl'}", f"model.path={place / 'base'}")
    assert cli.run(["train", *WORDS, *inputs, f"hydra.run.dir={place / 'run'}"]) == 0
    return place / "run"


@pytest.fixture
def copies(honest, tmp_path):
    """Gives a new copy of the run at each call, with data and base beside it: a moved run uses those."""

    def copy():
        place = tmp_path / "copy"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(honest.parent, place)
        return place / "run"

    return copy
