"""The script that measures claims: what it runs and repeats, its statistics, and what the page says."""

import json
import math
import re
from pathlib import Path
from typing import Any

import claim_gradients
import claims
import pytest
import significance
import torch
import yaml

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


def words_for(folder, definitions):
    (folder / "claims.yaml").write_text(yaml.safe_dump(definitions, sort_keys=False))
    return ["--definitions", str(folder / "claims.yaml"), "--out", str(folder / "runs"), "--docs", str(folder)]


@pytest.mark.slow
def test_claims_are_measured_once_and_the_page_is_written_from_what_is_recorded(tmp_path, monkeypatch):
    words = words_for(tmp_path, TINY)
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
    monkeypatch.setattr(claims.Commands, "run", lambda *_: pytest.fail("measured again"))
    assert claims.main(words) == 0
    assert claims.main([*words, "--page"]) == 0
    assert (tmp_path / "claims.md").read_text() == text
    assert (tmp_path / "claims.png").read_bytes() == picture


@pytest.mark.slow
def test_a_command_that_fails_and_an_unknown_claim_are_named(tmp_path, capsys):
    wrong = TINY | {"words": {"small": "train +recipe=grpo_arithmetic stepz=1"}}
    assert claims.main([*words_for(tmp_path, wrong), "rate"]) == 1
    assert "stepz: there is no such key" in capsys.readouterr().err
    assert claims.main(["lamda"]) == 2
    assert "got lamda; choose of baseline, lambda" in capsys.readouterr().err


def test_gradients_are_compared_by_hand():
    # Two batches of one number each: 3 and 1, and half of them. Mean 2, squared distances 1 + 1 over n - 1 = 1.
    halves = {"a": [torch.tensor([3.0]), torch.tensor([1.0])], "b": [torch.tensor([1.5]), torch.tensor([0.5])]}
    found = claim_gradients.compared({"a": 10.0, "b": 2.5}, halves, 2)
    assert found["a"] == {"variance": 1.0, "length": 1.0, "error": 0.0}
    assert found["b"] == {"variance": 0.25, "length": 0.5, "error": 0.25}


def test_a_check_is_an_interval_on_the_right_side():
    for sign, other, values, holds in [
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
    ]:
        found = {"a": dict(enumerate({"x": v} for v in values)), "b": {0: {"x": 0.5}, 1: {"x": 0.52}}}
        assert claims.checked(found, ("a", "x", sign, other)).holds is holds, (sign, other, values)


def test_every_claim_names_arms_quantities_recipes_and_commands_that_exist():
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


def test_the_page_is_the_one_of_the_recorded_numbers():
    definitions = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    found = claims.read_results(DOCS / "claims.json")
    assert claims.page(claims.read_claims(definitions), found, definitions["intro"]) == (DOCS / "claims.md").read_text()


# -- Student's t -------------------------------------------------------------------------------------------------------
def test_quantiles_p_values_and_intervals_are_those_of_tables_and_closed_forms():
    # Abramowitz and Stegun, table 26.10.
    for share, dof, quantile in [
        (0.975, 1, 12.706205), (0.975, 2, 4.302653), (0.975, 4, 2.776445), (0.975, 30, 2.042272), (0.95, 9, 1.833113),
        (0.995, 4, 4.604095),
    ]:  # fmt: skip
        assert significance.t_quantile(share, dof) == pytest.approx(quantile, abs=1e-6)
    for t in (0.0, 0.3, -1.0, 2.776445, 40.0):
        # 1 degree of freedom is Cauchy's distribution: P(|T| >= t) = 1 - 2 atan(t) / pi.
        assert significance.two_sided_p(t, 1) == pytest.approx(1 - 2 * math.atan(abs(t)) / math.pi, abs=1e-12)
        # 2: P(|T| < t) = t / sqrt(2 + t^2). 4: with s = t / sqrt(4 + t^2), P(|T| < t) = s (1 + (1 - s^2) / 2).
        assert significance.two_sided_p(t, 2) == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t), abs=1e-12)
        s = abs(t) / math.sqrt(4 + t * t)
        assert significance.two_sided_p(t, 4) == pytest.approx(1 - s * (1 + (1 - s * s) / 2), abs=1e-12)
    # 1 .. 5: standard deviation sqrt(10 / 4) = 1.581139, error / sqrt(5) = 0.707107; 2.776445 x 0.707107 = 1.963243.
    assert significance.half_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.963243, abs=1e-6)
    # Two values: 12.706205 x (1 / sqrt(2)) / sqrt(2).
    assert significance.half_interval([0.0, 1.0]) == pytest.approx(6.353102, abs=1e-6)
    assert significance.half_interval([0.25]) is None
