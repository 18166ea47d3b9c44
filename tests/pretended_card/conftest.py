"""`rlft` on the pretended card: processes of one thread, each of which tells at its end what it did on the card."""

import json
import os
from pathlib import Path

import card_library
import pytest
from run_processes import Nursery

HERE = Path(__file__).parent


class OnCard:
    """Runs commands on the card, one after the other, in processes that have imported all that they need."""

    def __init__(self, folder):
        self.report = folder / "report.jsonl"
        self.report.touch()
        self._nursery = Nursery(1, host=(str(HERE / "card_host.py"), str(card_library.library()), str(self.report)))

    def run(self, *arguments, cwd, events=(), ends=0, **variables):
        done = self._nursery.run(*arguments, cwd=cwd, events=events, variables=variables)
        assert ends is None or done.code == ends, f"{' '.join(arguments)}: {done.err}"
        return done

    def found(self, function, *names, **variables):
        """What a function of these files, `module:name`, returns for these names in a process on the card."""
        file = self.report.with_name("found.json")
        self.run("found", function, str(file), *names, cwd=file.parent, **variables)
        return json.loads(file.read_text())

    def counts(self):
        """What the last command did on the card."""
        return self._lines()[-1]

    def cards_of_workers(self):
        """{process that the last command has started: the cards that it made tensors on}"""
        found = {}
        *before, _ = self._lines()
        ended = [number for number, line in enumerate(before, start=1) if "process" not in line]
        for line in before[max(ended, default=0) :]:
            if "process" in line:
                found.setdefault(line["process"], set()).add(line["card"])
        return found

    def _lines(self):
        return [json.loads(line) for line in self.report.read_text().splitlines()]

    def close(self):
        self._nursery.close()


@pytest.fixture(scope="session")
def on_card(tmp_path_factory):
    """The card; where it cannot be built the test is skipped with the reason, except in CI."""
    if (reason := card_library.obstacle()) is not None:
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    card = OnCard(tmp_path_factory.mktemp("card"))
    yield card
    card.close()


@pytest.fixture(scope="session")
def half(half_folder):
    """The word that names the embedded model with half of its layers."""
    return f"model.path={half_folder}"
