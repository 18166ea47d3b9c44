"""The script that measures claims: what it runs and repeats, how gradients are compared, what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import claim_gradients
import claims
import pytest
import torch
import yaml
from in_one_test import each

from rlft.config.catalog import choices
from rlft.config.command import OWN

SCRIPT = Path(claims.__file__)
DOCS = SCRIPT.parents[1] / "docs"
SMALL = (
    "train +recipe=grpo_arithmetic steps=1 prompts_per_step=2 group_size=2 generation.max_tokens=8 eval.every=1 "
    "eval.num_prompts=2 eval.num_samples=1 console=null scoring.workers=0 reward=[exact_match,{out}/long.py:long]"
)
TINY: dict[str, Any] = {
    "intro": "# Claims measured",
    "words": {"small": SMALL},
    "files": {"long.py": "def long(group):\n    return [1.0 for _ in group.rollouts]\n"},
    "claims": {
        "rate": {
            "title": "A rate decides",
            "says": "It does.",
            "found": "no",
            "drawn": "accuracy",
            "seeds": 2,
            "arms": {"low": ["{small} trainer.lr=1e-9"], "high": ["{small} trainer.lr=1e-3"]},
            "quantities": {
                "accuracy": ["eval", "eval/exact_match", "last"],
                "rewards": ["metrics", "reward/mean", "each"],
                "planned": ["plan", "peak"],
            },
            "checks": [["low", "accuracy", "~", "high"]],
        },
        "variance": {
            "title": "A mean lowers it",
            "says": "It does.",
            "found": "yes",
            "drawn": "variance",
            "seeds": 2,
            "samples": "sample n=2 num_prompts=32 dedupe=false generation.max_tokens=24 scoring.workers=0",
            "gradients": {
                "leave-one-out": ["reinforce", {"baseline": "leave_one_out"}],
                "group": ["reinforce", {"baseline": "group"}],
            },
            "checks": [["group", "length", "~", 0.5]],
        },
    },
}


@pytest.mark.slow
def test_claims_are_measured_once_and_the_page_is_written_from_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    words = ["--definitions", str(tmp_path / "claims.yaml"), "--out", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    assert claims.main([*words, "variance"]) == 0
    assert "A rate decides (`scripts/claims.py rate`)" in (tmp_path / "claims.md").read_text()
    assert claims.main(words) == 0
    found = json.loads((tmp_path / "claims.json").read_text())
    # With two completions a prompt the mean of both halves what leave-one-out makes of them: exactly half the gradient.
    for values in found["variance"]["group"].values():
        assert values["length"] == pytest.approx(0.5, abs=1e-4)
        assert values["variance"] == pytest.approx(0.25, abs=1e-4)
        assert values["error"] == pytest.approx(0.25, abs=1e-4)
    assert {seed: len(values["rewards"]) for seed, values in found["rate"]["low"].items()} == {"0": 1, "1": 1}
    assert found["rate"]["low"]["0"]["planned"] > 1e8
    text, picture = (tmp_path / "claims.md").read_text(), (tmp_path / "claims.png").read_bytes()
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["A rate decides", "A mean lowers it"]
    assert "Not measured" not in text

    def refused(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(claims.Commands, "run", refused)
    assert claims.main(words) == 0
    assert claims.main([*words, "--page"]) == 0
    assert (tmp_path / "claims.md").read_text() == text
    assert (tmp_path / "claims.png").read_bytes() == picture


@pytest.mark.slow
def test_a_command_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = TINY | {"words": {"small": "train +recipe=grpo_arithmetic stepz=1"}}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(wrong))
    words = ["--definitions", str(tmp_path / "claims.yaml"), "--out", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    assert claims.main([*words, "rate"]) == 1
    assert "stepz: there is no such key" in capsys.readouterr().err


def test_an_unknown_claim_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert claims.main(["lamda"]) == 2
    assert "got lamda; choose of baseline, lambda" in capsys.readouterr().err


def test_gradients_are_compared_by_hand() -> None:
    # Two batches of one number each: 3 and 1, and half of them. Mean 2, squared distances 1 + 1 over n - 1 = 1.
    halves = {"a": [torch.tensor([3.0]), torch.tensor([1.0])], "b": [torch.tensor([1.5]), torch.tensor([0.5])]}
    found = claim_gradients.compared({"a": 10.0, "b": 2.5}, halves, 2)
    assert found["a"] == {"variance": 1.0, "length": 1.0, "error": 0.0}
    assert found["b"] == {"variance": 0.25, "length": 0.5, "error": 0.25}


@each(
    ("sign", "other", "values", "holds"),
    [
        ("<", 1.0, [0.1, 0.8], False),  # -0.55, and half of the interval is 12.706 x 0.35 = 4.4
        ("<", 1.0, [0.1, 0.11], True),
        (">", 0.0, [0.1, 0.11], True),
        (">", "b", [0.1, 0.11], False),
        ("~", "b", [0.5, 0.6], True),
        ("~", "b", [0.1, 0.11], False),
        ("not below", "b", [0.5, 0.4], True),
        ("not below", "b", [0.1, 0.11], False),
        ("not above", "b", [0.1, 0.11], True),
        ("not above", 0.0, [0.1, 0.11], False),
    ],
)
def test_a_check_is_an_interval_on_the_right_side(
    sign: str, other: str | float, values: list[float], holds: bool
) -> None:
    found = {"a": dict(enumerate({"x": v} for v in values)), "b": {0: {"x": 0.5}, 1: {"x": 0.52}}}
    assert claims.checked(found, ("a", "x", sign, other)).holds is holds


def test_every_claim_names_arms_quantities_recipes_and_commands_that_exist() -> None:
    for name, claim in claims.read_claims(yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())).items():
        own = set(claim.quantities) or {"variance", "length", "error"}
        assert claim.drawn in own, name
        for arm, quantity, _, other in claim.checks:
            named = {arm} if isinstance(other, float) else {arm, other}
            assert named <= {*claim.names, *own}, (name, named)
            assert quantity in own, (name, quantity)
        for line in [line for lines in claim.arms.values() for line in lines] or [claim.samples]:
            assert line.split()[0] in OWN, line
            assert set(re.findall(r"\+recipe=(\S+)", line)) <= set(choices("recipe")), line
            assert set(re.findall(r"\{(\w+)\}", line)) <= {"run", "out", "seed"}, line
        for script in claim.made_by:
            assert SCRIPT.with_name(script).is_file()


def test_the_page_is_the_one_of_the_recorded_numbers() -> None:
    definitions = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    found = claims.read_results(DOCS / "claims.json")
    assert claims.page(claims.read_claims(definitions), found, definitions["intro"]) == (DOCS / "claims.md").read_text()
