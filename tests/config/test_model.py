"""Which folder model.path means, and what is refused of it before a library could read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rlft.config.model import check_local, looks_local, resolve_path
from rlft.types import UserError


def test_a_recipes_folder_that_nothing_brings_is_refused_with_the_page_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    repository = Path(__file__).parents[2]
    texts = {file.name: yaml.safe_load(file.read_text()) for file in (repository / "recipes").glob("*.yaml")}
    paths = {path for text in texts.values() if (path := text.get("model", {}).get("path")) and looks_local(path)}
    assert paths == {"./models/SmolLM2-135M-Instruct"}
    for path in paths:
        with pytest.raises(UserError, match=r"^model.path: .*; make it as in docs/tutorials/\w+\.md, or") as refused:
            check_local(path)
        [page] = re.findall(r"docs/tutorials/\w+\.md", str(refused.value))
        assert str(Path(path)) in (repository / page).read_text()


def test_a_folder_with_a_config_an_embedded_model_and_a_hub_id_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path in (str(tmp_path), "embedded:tiny-arithmetic", "org/model"):
        check_local(path)
    assert looks_local(str(tmp_path))
    assert not looks_local("org/model")
    assert resolve_path("org/model") == "org/model"
