"""Which folder model.path means, and what is refused of it before a library could read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlft.config.model import check_local, looks_local, resolve_path
from rlft.types import UserError


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "is empty"),
        ("embedded:big", "there is no such embedded model"),
        ("/nowhere", "there is no such folder"),
        ("./nowhere", "there is no such folder"),
    ],
)
def test_what_is_no_model_is_refused_by_its_key(path: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"^model.path: {problem}"):
        check_local(path)


def test_a_folder_with_a_config_an_embedded_model_and_a_hub_id_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path in (str(tmp_path), "embedded:tiny-arithmetic", "org/model"):
        check_local(path)
    assert looks_local(str(tmp_path))
    assert not looks_local("org/model")
    assert resolve_path("org/model") == "org/model"
