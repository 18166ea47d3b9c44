"""Decoding in CUDA graphs on the pretended card: the bits of the steps that they record, a launch a token, no waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import card_decoding
import card_graphs
import pytest

CASES = [
    "qwen2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("no biases", "norms over heads", "few adapters")),
]


def found(on_card, folder: Path, command: str, *names: str) -> dict[str, Any]:
    on_card.run(command, "found.json", *names, cwd=folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_replay_gives_the_bits_of_the_step_that_it_replaces(on_card, tmp_path: Path, name: str) -> None:
    """For chunks of 12, 8 and 20 rows, versions of the adapter, and ways of sampling; rows end at different times."""
    ways = found(on_card, tmp_path, "graphs", "same", name)[name]
    assert len(ways) == len(card_graphs.WAYS) + 2
    for way, (is_same, lengths, replays, problem) in ways.items():
        assert is_same, way
        assert problem is None, way
        assert replays > 8, way
        assert len(lengths) > 4 or "greedy" in way, way


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_one_launch_and_the_host_waits_once_for_several(on_card, tmp_path: Path, name: str) -> None:
    counts = found(on_card, tmp_path, "graphs", "counted", name)[name]
    launches, waits, uploads = counts["graphs"]
    assert launches["graph"] == card_decoding.TOKENS
    assert sum(launches.values()) <= card_decoding.TOKENS + 2, launches
    assert list(waits.values()) == [1]
    assert not uploads
    one_by_one, *others = counts["without"]
    assert sum(one_by_one.values()) > 40 * card_decoding.TOKENS
    assert others == [waits, {}], "nothing is read in between there either"


def test_what_would_make_replays_wrong_is_seen(on_card, tmp_path: Path) -> None:
    """A fault gives other results, unless the engine notices it and computes the steps without graphs."""
    differs = "a replay of 16 rows differs from the step that was recorded"
    waits = "operation not permitted when stream is capturing: _local_scalar_dense"
    expected = {
        "none": (True, None),
        "a place of the host": (True, differs),
        "a place of the host, trusted": (False, None),
        "keys that moved": (True, None),
        "keys that moved, unwatched": (False, None),
        "more room": (True, None),
        "other ways": (True, None),
        "weights that moved": (True, None),
        "copies that move": (True, None),
        "copies that move, unwatched": (False, None),
        "another scale": (True, None),
        "no memory": (True, "CUDA out of memory. Tried to allocate 2.00 GiB."),
        "a step that waits": (True, waits),
        "a step that waits, torch 2.13": (True, waits),
        "a step that waits, torch 2.14": (True, waits),
        "a step that waits, not ended": (True, waits, False, True),
        "a step that waits, torch 2.13, not ended": (True, waits, False, True),
        "no wait for what is read": (True, None, True),
        "no wait for what is written": (True, None, True),
    }
    faults = found(on_card, tmp_path, "graph faults")
    seen = {name: (same, said and said.partition(" @ ")[0], *more) for name, (same, said, *more) in faults.items()}
    assert seen == {name: (*known, False, False)[:4] for name, known in expected.items()}


def test_memory_of_graphs_is_lost_with_the_next_replay_of_another_one_and_with_the_graph(on_card, tmp_path) -> None:
    on_card.run("graph stand-in", "found.json", cwd=tmp_path)
    assert json.loads((tmp_path / "found.json").read_text()) == [[9, 9], [2, 9], [9, 3], [2, 9], [9, 9]]


@pytest.mark.parametrize("name", card_graphs.DECODINGS)
def test_the_plan_has_the_memory_that_graphs_hold(on_card, tmp_path: Path, name: str) -> None:
    [(planned, counted)] = found(on_card, tmp_path, "graph memory", name).values()
    assert set(planned) == {"keys and values for graphs", "CUDA graphs"}
    assert 0.9 < sum(planned.values()) / counted < 1.15, (planned, counted)


EAGER = {
    "all weights": ("no", "its keys and values are not those of flash kernels"),
    "attention sinks": ("no", "hooks of its modules have to run"),
    "experts": ("no", "hooks of its modules have to run"),
    "a window": ("no", "completions move through a sliding window"),
    "a window that some rows exceed": ("for some rows", "completions move through a sliding window"),
    "short convolutions": ("no", "its keys and values are not those of flash kernels"),
    "float32": ("no", "its keys and values are not those of flash kernels"),
    "plain kernels": ("no", "its keys and values are not those of flash kernels"),
}


def test_each_kind_of_model_has_graphs_or_says_why_not(on_card, tmp_path: Path) -> None:
    for name, (*row, same, replays, problem, uncovered) in found(
        on_card, tmp_path, "graph kinds", *card_graphs.KINDS
    ).items():
        value, why = EAGER.get(name, ("yes", "a launch for a token of all rows"))
        assert (row, same, problem, uncovered) == ([value, why], True, None, 0), name
        assert (replays > 8) == (value != "no"), name
