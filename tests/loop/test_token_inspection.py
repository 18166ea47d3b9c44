"""Values of single tokens: the networks' own, of whole groups, and without a trace in the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_one_test import each
from slow_cases import slow

from rlft import cli
from rlft.loop.token_inspection import Inspection, chosen_rows, pieces
from rlft.model.backbone import Backbone
from rlft.model.roles import POLICY, Roles
from rlft.types import Batch

TINY = (
    "steps=4", "prompts_per_step=3", "group_size=3", "generation=transformers", "generation.max_tokens=20",
    "lora.rank=2", "lora.alpha=4", "lora.dropout=0.1", "data.size=16", "data.held_out_size=8", "eval.every=0",
    "model.device=cpu", "scoring.workers=0", "console=null", "trainer.lr=1e-3",
)  # fmt: skip
ROWS = [(0, (5, 6), (7, 8, 9)), (0, (5, 6), (10, 11)), (1, (3, 4, 5), (6, 7)), (1, (3, 4, 5), (8, 9, 10, 11))]


def run(folder: Path, *words: str) -> dict[str, Any]:
    assert cli.run(["train", *TINY, *words, f"hydra.run.dir={folder}"]) == 0
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".safetensors":
            found[str(file.relative_to(folder))] = file.read_bytes()
        elif file.name == "metrics.jsonl" or file.parent.name == "rollouts":
            found[file.name] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


def without(lines: Any) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k != "tokens" and not k.startswith(("time/", "memory/"))} for line in lines
    ]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), slow(("algorithm=ppo", "critic.kind=adapter", "epochs=2", "snapshot.old=copy"))])
def test_looking_at_tokens_changes_nothing_of_the_run(words: tuple[str, ...], tmp_path: Path) -> None:
    looked, blind = (
        run(tmp_path / "a", *words, "token_values.every=2"),
        run(tmp_path / "b", *words, "token_values.every=0"),
    )
    assert looked.keys() == blind.keys()
    for name, found in looked.items():
        if isinstance(found, bytes):
            assert found == blind[name], name
        else:
            assert without(found) == without(blind[name]), name
    metrics = looked["metrics.jsonl"]
    assert ["time/inspect" in line for line in metrics] == [False, True, False, True]
    assert not any("time/inspect" in line for line in blind["metrics.jsonl"])
    for step, kept in ((1, 0), (2, 6), (3, 0), (4, 6)):
        assert sum("tokens" in line for line in looked[f"step_{step:06d}.jsonl"]) == kept, "two groups of three"


def test_a_runs_values_are_of_its_tokens(tmp_path: Path) -> None:
    found = run(tmp_path / "run", "token_values.every=4")["step_000004.jsonl"]
    kept = [line for line in found if "tokens" in line]
    assert kept
    for line in kept:
        tokens = line["tokens"]
        assert {name: len(values) for name, values in tokens.items()} == dict.fromkeys(tokens, len(line["token_ids"]))
        assert tokens["old"] == pytest.approx(line["logprobs"], abs=1e-4), "engine and trainer agree"
        assert "".join(tokens["text"]).startswith(line["completion"])
        assert tokens["advantage"] == pytest.approx([line["advantage"]] * len(tokens["old"]), abs=1e-5)
    assert any(line["tokens"]["after"] != line["tokens"]["old"] for line in kept), "an update moves them"


def dense(roles: Roles, row: int, batch: Batch) -> tuple[list[float], list[float]]:
    """Log-probs and entropies of a row's completion by the plain forward of one row."""
    ids = batch.token_ids[row][batch.attention_mask[row]]
    with torch.no_grad():
        logprobs = roles.model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    own = batch.loss_mask[row][: len(ids)].nonzero()[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[own - 1, ids[own]].tolist(), entropy[own - 1].tolist()


@pytest.mark.parametrize("reference", ["none", "base", "copy"])
def test_before_and_after_are_what_each_policy_says(
    reference: str, make_roles: Callable[..., Roles], make_batch: Callable[..., Batch], backbone: Backbone
) -> None:
    roles = make_roles(noise=0.05, reference=reference)
    batch = make_batch(ROWS)
    starts = [len(prompt) for _, prompt, _ in ROWS]
    inspection = Inspection(roles, batch, starts, torch.zeros(4, dtype=torch.bool), 2, backbone.decode_all)
    before = [dense(roles, row, batch)[0] for row in range(4)]
    with torch.no_grad(), roles.using(roles.reference_role):
        references = [dense(roles, row, batch)[0] for row in range(4)]
    for _, parameter in roles.named_parameters(POLICY):
        parameter.data += 0.02
    found = inspection.finish()
    assert list(found) == [0, 1, 2, 3]
    for row, values in found.items():
        after, entropy = dense(roles, row, batch)
        assert values.old == pytest.approx(before[row], abs=2e-5)
        assert values.after == pytest.approx(after, abs=2e-5)
        assert values.entropy == pytest.approx(entropy, abs=2e-5)
        assert values.reference == pytest.approx(references[row], abs=2e-5)
        assert values.after != values.old
        assert values.reference != values.old


def test_tokens_of_an_answer_are_shown_without_values(
    make_roles: Callable[..., Roles], make_batch: Callable[..., Batch], backbone: Backbone
) -> None:
    roles, decode = make_roles(), backbone.decode_all
    batch = make_batch([(0, (5, 6), (-11, 7, 8, -9, 10)), (0, (5, 6), (7,))])
    inspection = Inspection(roles, batch, [2, 2], torch.zeros(2, dtype=torch.bool), 1, decode)
    values = inspection.finish()[0]
    assert "".join(values.text) == decode([11, 7, 8, 9, 10])
    expected = dense(roles, 0, batch)[0]
    for own in (values.old, values.after, values.reference, values.entropy, values.advantage):
        assert [value is None for value in own] == [True, False, False, True, False]
    assert [value for value in values.old if value is not None] == pytest.approx(expected, abs=2e-5)


def test_whole_groups_are_chosen_those_that_teach_first() -> None:
    groups = torch.tensor([4, 4, 7, 7, 9, 9])
    zero_rows = torch.tensor([True, True, False, True, False, False])
    assert chosen_rows(groups, zero_rows, 1).tolist() == [2, 3]
    assert chosen_rows(groups, zero_rows, 2).tolist() == [2, 3, 4, 5]
    assert chosen_rows(groups, zero_rows, 9).tolist() == [0, 1, 2, 3, 4, 5]


@each("text", ["12+3=15", "n\u00e9 \u2192 \U0001f600!", "<think>7</think>\n\n x", "\u00e9\u00e9"])
def test_the_pieces_are_the_text(text: str, backbone: Backbone) -> None:
    ids = backbone.tokenizer(text)["input_ids"]
    found = pieces(ids, backbone.decode_all)
    assert "".join(found) == backbone.decode_all(ids) == text
    assert len(found) == len(ids)


def test_a_character_that_never_ends_is_shown_as_such(backbone: Backbone) -> None:
    ids = backbone.tokenizer("a\u00e9")["input_ids"][:-1]
    assert "".join(pieces(ids, backbone.decode_all)) == backbone.decode_all(ids)
