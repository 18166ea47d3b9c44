"""The pretended card itself: what it shares with a real one (card_checks.py), in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path


def test_the_card_does_what_a_card_does(on_card, tmp_path: Path) -> None:
    on_card.run("checks", "found.json", cwd=tmp_path, CUDA_VISIBLE_DEVICES="7,5")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 7
    assert not any(found.values()), "\n".join(filter(None, found.values()))


def test_a_base_is_one_copy(on_card, tmp_path: Path) -> None:
    on_card.run("shared", "found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("freed") == found.pop("model")
    assert all(found.values()), found


def test_a_publish_into_an_engines_own_matrices_takes_as_many_launches_for_any_number_of_layers(
    on_card, tmp_path: Path
) -> None:
    """11 for each of the four shapes of a model of Qwen2's; its check reads the adapter back as well."""
    on_card.run("copied", "found.json", cwd=tmp_path)
    few, many = json.loads((tmp_path / "found.json").read_text()).values()
    assert few == many
    assert not any(few["wrong"])
    assert few["load"] == [45, 1]
    assert few["check"][0] < 100
    assert few["check"][1] == 2
