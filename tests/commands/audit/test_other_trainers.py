"""`rlft audit of=trl|verl` of lines, tables and dumps: what agrees, what is named, what is skipped, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from in_one_test import each
from plain_grpo import BUGS, Plain, written
from slow_cases import slow, slow_but

from rlft import cli

Capture = pytest.CaptureFixture[str]


def audited(path: Path, capsys: Capture, *words: str, of: str = "trl") -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, {name of the row: the row}) of the JSON."""
    capsys.readouterr()
    code = cli.run(["audit", str(path), f"of={of}", *words, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len({row["name"] for row in rows}) == len(rows)
    return code, {row["name"]: row for row in rows}


def statuses(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


# -- a recording of TRL ------------------------------------------------------------------------------------------------
RECORDED = Path(__file__).with_name("trl_1_16.jsonl")
"""Of TRL 1.16: 16 completions of the embedded model, two steps of 8, the first with two updates (test_real_trl.py)."""


def test_what_trl_has_logged_agrees_to_a_millionth(capsys: Capture) -> None:
    code, rows = audited(RECORDED, capsys)
    assert code == 0
    # Of each update a loss, a KL and the two shares of clipped tokens.
    numbers = {name: row["numbers"]["numbers"] for name, row in rows.items() if row["status"] == "ok"}
    assert numbers == {"advantages": 16, "masks": 16, "ratios": 9, "losses": 3}
    assert all(0 <= row["numbers"].get("furthest", 0) <= 1e-6 for row in rows.values())
    assert rows["losses"]["numbers"]["furthest"] > 0, "float32 and float64 are not the same"


@each(
    ("claimed", "kind", "explanation"),
    [
        ("scale_rewards=batch", "advantages", "scale_rewards=group"),
        ("std=population", "advantages", "std=sample"),
        ("eps=1e-6", "advantages", "eps=0.0001"),
        ("reward_weights=[0.5,0.5]", "advantages", None),
        ("mask_truncated_completions=true", "masks", "mask_truncated_completions=false"),
        ("loss_type=dapo", "losses", "loss_type=grpo"),
        ("epsilon=0.1", "losses", "epsilon=0.2 epsilon_high=null"),
        ("kl_estimator=k3", "losses", "kl_estimator=k3_unbiased"),
        ("kl_estimator=k3", "ratios", "kl_estimator=k3_unbiased"),
        ("beta=0.05", "losses", None),
        ("divide_by_micro_batches=false", "losses", "divide_by_micro_batches=true"),
    ],
)
def test_what_trl_was_told_is_found_from_what_it_has_logged(
    claimed: str, kind: str, explanation: str | None, capsys: Capture
) -> None:
    code, rows = audited(RECORDED, capsys, claimed)
    assert code == 1
    expected = f"all numbers agree with {explanation}" if explanation else "and no single setting explains them"
    assert rows[kind]["value"].endswith(expected), rows[kind]["value"]


# -- recorded lines ----------------------------------------------------------------------------------------------------
def test_plain_grpo_agrees(tmp_path: Path, capsys: Capture) -> None:
    code, rows = audited(written(tmp_path / "run.jsonl", Plain().lines()), capsys)
    assert code == 0
    assert statuses(rows) == {
        "rewards": "skipped", "advantages": "ok", "masks": "ok", "ratios": "skipped", "losses": "ok"
    }  # fmt: skip
    # Two steps of 12 completions and two updates; both compute in float64.
    assert {name: row["numbers"].get("numbers") for name, row in rows.items() if row["status"] == "ok"} == {
        "advantages": 24, "masks": 24, "losses": 4
    }  # fmt: skip
    assert all(row["numbers"].get("furthest", 0) < 1e-10 for row in rows.values())


OF_EACH_KIND = (
    "scale_rewards=batch", "groups of rows that do not stand together", "padding counted", "loss_type=bnpo",
    "kl_estimator=k1", "old_logprobs of the row before",
)  # fmt: skip
EXPLANATIONS = [name if name in OF_EACH_KIND else slow(name) for name in BUGS]


@pytest.mark.parametrize("explanation", EXPLANATIONS)
def test_a_bug_in_plain_grpo_is_named(explanation: str, tmp_path: Path, capsys: Capture) -> None:
    changed, kind = BUGS[explanation]
    file = written(tmp_path / "run.jsonl", Plain(**changed, writes_wrong_mask=kind == "masks").lines())
    code, rows = audited(file, capsys)
    assert code == 1
    assert rows[kind]["status"] == "wrong"
    assert rows[kind]["value"].endswith(f"; all numbers agree with {explanation}"), rows[kind]["value"]


@pytest.mark.parametrize(
    "explanation", slow_but("padding counted", [name for name, (_, kind) in BUGS.items() if kind == "masks"])
)
def test_a_wrong_mask_is_named_by_the_loss_alone(explanation: str, tmp_path: Path, capsys: Capture) -> None:
    """Whether the right mask was recorded, or none."""
    for has_mask in (True, False):
        lines = Plain(**BUGS[explanation][0]).lines()
        for line in lines:
            if not has_mask:
                line.pop("mask", None)
        code, rows = audited(written(tmp_path / "run.jsonl", lines), capsys)
        assert code == 1
        assert statuses(rows)["masks"] == ("ok" if has_mask else "skipped")
        assert rows["losses"]["value"].endswith(f"; all numbers agree with {explanation}"), rows["losses"]["value"]


def edited(change: Callable[[dict[str, Any]], object], name: str, number: int = 0) -> list[dict[str, Any]]:
    """The lines, of which the one with this number among those that have this key is changed."""
    lines = Plain().lines()
    change([line for line in lines if name in line][number])
    return lines


def test_the_first_number_that_differs_has_its_line_and_both_values(tmp_path: Path, capsys: Capture) -> None:
    lines = edited(lambda line: line.update(advantage=0.25), "advantage", 13)
    code, rows = audited(written(tmp_path / "run.jsonl", lines), capsys)
    assert code == 1
    # One line of settings, 12 completions and 2 updates of step 1; the 14th completion is the 2nd of step 2.
    expected = [line for line in Plain().lines() if "advantage" in line][13]["advantage"]
    start = f"{tmp_path / 'run.jsonl'}:17: advantage is 0.25, recomputed {expected:.9g}; "
    assert rows["advantages"]["value"] == start + "1 of 24 numbers differ, and no single setting explains them"
    assert statuses(rows)["losses"] == "wrong", "its loss was computed with the right one"


@each(("name", "factor"), [("advantage", 1 + 1e-5), ("loss", 1 + 1e-5), ("loss", 1 - 1e-5), ("advantage", -1.0)])
def test_bounds_hide_no_difference_of_a_hundred_thousandth(
    name: str, factor: float, tmp_path: Path, capsys: Capture
) -> None:
    lines = edited(lambda line: line.update({name: line[name] * factor}), name, 1)
    assert audited(written(tmp_path / "run.jsonl", lines), capsys)[0] == 1


def without(*names: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in names} for line in Plain().lines()]


@each(
    ("names", "kind", "why"),
    [
        (["advantage"], "advantages", "advantage is not recorded of all completions"),
        (["mask"], "masks", "mask is not recorded of all completions"),
        (["length"], "masks", "neither completion_ids nor length are recorded of all completions"),
        (["truncated"], "masks", "truncated is not recorded of all completions"),
        (["mask", "length"], "losses", "neither completion_ids nor length are recorded of all completions"),
        (["logprobs"], "losses", "logprobs are not recorded of all completions"),
        (["old_logprobs"], "losses", "old_logprobs are not recorded of all completions"),
        (["ref_logprobs"], "losses", "ref_logprobs are not recorded of all completions, and beta is not 0"),
        (["loss"], "losses", "no loss is recorded"),
    ],
)
def test_what_is_not_recorded_is_skipped_by_its_name(
    names: list[str], kind: str, why: str, tmp_path: Path, capsys: Capture
) -> None:
    code, rows = audited(written(tmp_path / "run.jsonl", without(*names)), capsys)
    assert code == 0
    assert rows[kind]["status"] == "skipped"
    assert rows[kind]["value"] == f"steps 1, 2: {why}"


@each(
    ("settings", "why"),
    [
        (['also_in_loss=["entropy bonus"]'], "the loss has entropy bonus, which are not recorded"),
        (["loss_type=dr_grpo", "max_completion_length=null"], "max_completion_length is not given"),
        (["kl_estimator=k3_unbiased", "importance_sampling_level=sequence"], "weighed by the ratios of whole"),
        (["delta=1.1"], "dual_clip: must lie above the clip range"),
    ],
)
def test_losses_that_cannot_be_recomputed_are_skipped(
    settings: list[str], why: str, tmp_path: Path, capsys: Capture
) -> None:
    code, rows = audited(written(tmp_path / "run.jsonl", Plain().lines()), capsys, *settings)
    assert code == 0
    assert rows["losses"]["status"] == "skipped"
    assert why in rows["losses"]["value"]


def test_of_several_explanations_the_closest_comes_first(tmp_path: Path, capsys: Capture) -> None:
    # Rewards 1 and 0 whose std sqrt(1/2) has 1e-8 added: 0 changes less than float32 can show, and 1e-6 more.
    advantage = 0.5 / (0.5**0.5 + 1e-8)
    lines = [
        {"step": 0, "group": 0, "reward": reward, "advantage": right}
        for reward, right in ((1.0, advantage), (0.0, -advantage))
    ]
    rows = audited(written(tmp_path / "run.jsonl", lines), capsys)[1]
    assert rows["advantages"]["value"].endswith("; all numbers agree with eps=1e-08 or eps=0")


def test_settings_of_the_command_line_come_before_those_of_the_file(tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path / "run.jsonl", Plain().lines())
    code, rows = audited(file, capsys, "scale_rewards=none", "epsilon=0.3")
    assert code == 1
    assert rows["advantages"]["value"].endswith("; all numbers agree with scale_rewards=group")
    assert rows["losses"]["value"].endswith("; all numbers agree with epsilon=0.2 epsilon_high=null")


def test_totals_are_the_weighted_sums_of_rewards(tmp_path: Path, capsys: Capture) -> None:
    def totals(first: float, second: float) -> list[dict[str, Any]]:
        lines = Plain().lines()
        for line in (line for line in lines if "rewards" in line):
            line["reward"] = first * line["rewards"]["right"] + second * line["rewards"]["short"]
        return lines

    assert statuses(audited(written(tmp_path / "run.jsonl", totals(1, 0.5)), capsys)[1])["rewards"] == "ok"
    code, rows = audited(written(tmp_path / "run.jsonl", totals(1, 1)), capsys)
    assert code == 1
    assert rows["rewards"]["value"].endswith("; all numbers agree with reward_weights=null")


def test_a_completion_that_no_reward_scored_has_no_advantage_and_no_part_in_its_group(
    tmp_path: Path, capsys: Capture
) -> None:
    # Of rewards 1, 0 and none, the mean is 0.5 and the sample's std sqrt(1/2): advantages +-0.5 / (0.7072 + 1e-4).
    advantage = 0.5 / (0.5**0.5 + 1e-4)
    lines = [
        {"step": 0, "group": 0, "rewards": {"a": reward}, "advantage": right}
        for reward, right in ((1.0, advantage), (0.0, -advantage), (None, 0.0))
    ]
    code, rows = audited(written(tmp_path / "run.jsonl", lines), capsys)
    assert (code, statuses(rows)["advantages"]) == (0, "ok")


def test_updates_of_the_first_pass_have_the_current_policy_as_the_old_one(tmp_path: Path, capsys: Capture) -> None:
    # Ratios of 1 and advantages +-1 / (sqrt(2) + 1e-4) x 1: of lengths 1 and 3 the mean over completions is 0, over
    # tokens (-a + 3 a) / 4 = a / 2.
    a = 0.5 / (0.5**0.5 + 1e-4)
    lines: list[dict[str, Any]] = [
        {
            "step": 5, "group": 0, "reward": reward, "advantage": sign * a, "completion_ids": [7] * size,
            "old_logprobs": "current", "logprobs": [-1.0] * size,
        }
        for reward, sign, size in ((1.0, 1, 1), (0.0, -1, 3))
    ]  # fmt: skip
    file = tmp_path / "run.jsonl"
    assert audited(written(file, [*lines, {"step": 5, "loss": a / 2}]), capsys)[0] == 0
    assert audited(written(file, [*lines, {"step": 5, "loss": 0.0}]), capsys, "loss_type=grpo")[0] == 0
    code, rows = audited(written(file, [*lines, {"step": 5, "loss": 0.0}]), capsys)
    assert code == 1
    assert "loss_type=grpo" in rows["losses"]["value"]


# -- TRL's tables ------------------------------------------------------------------------------------------------------
def table(file: Path, prompts: str, rewards: list[float], advantages: list[float], **columns: list[Any]) -> Path:
    file.parent.mkdir(exist_ok=True)
    chat = [[{"role": "user", "content": prompt}] for prompt in prompts]
    base = {"step": [3] * len(chat), "prompt": chat, "completion": ["x"] * len(chat), "right": rewards}
    pyarrow.parquet.write_table(pyarrow.table({**base, **columns, "advantage": advantages}), file)
    return file


A = 0.5 / (0.5**0.5 + 1e-4)


def test_the_tables_of_trl_are_read_from_its_output_folder(tmp_path: Path, capsys: Capture) -> None:
    table(tmp_path / "completions" / "completions_00003.parquet", "aabb", [1, 0, 0, 1], [A, -A, -A, A])
    code, rows = audited(tmp_path, capsys)
    assert code == 0
    assert statuses(rows) == {
        "rewards": "skipped", "advantages": "ok", "masks": "skipped", "ratios": "skipped", "losses": "skipped"
    }  # fmt: skip
    file = table(tmp_path / "t.parquet", "aabb", [1, 0, 0, 1], [A, -A, A, -A])
    code, rows = audited(file, capsys)
    assert code == 1
    assert rows["advantages"]["value"].startswith(f"{file}, row 2: advantage is {A:.9g}, recomputed {-A:.9g}; ")


def test_groups_of_a_table_are_not_guessed(tmp_path: Path, capsys: Capture) -> None:
    file = table(tmp_path / "t.parquet", "aaaabb", [1, 0, 0, 1, 1, 0], [A, -A, -A, A, A, -A])
    code, rows = audited(file, capsys)
    assert code == 0
    why = f"step 3: {file}, row 0: its groups are not known, as a prompt has 2 to 4 rows in a row; give num_generations"
    assert rows["advantages"]["value"] == why
    code, rows = audited(file, capsys, "num_generations=2")
    assert (code, statuses(rows)["advantages"]) == (0, "ok")
    for size, problem in (
        ("4", "does not divide the 6 rows of step 3"),
        ("3", f"{file}, row 4: has another prompt than"),
    ):
        assert cli.run(["audit", str(file), "of=trl", f"num_generations={size}"]) == 2
        assert capsys.readouterr().err.startswith(f"rlft: num_generations: {problem}")
    alike = table(tmp_path / "u.parquet", "aaaa", [1, 0, 0, 1], [A, -A, -A, A])
    assert audited(alike, capsys)[1]["advantages"]["value"].endswith("; all numbers agree with num_generations=2")


def test_other_columns_of_a_table_are_no_rewards(tmp_path: Path, capsys: Capture) -> None:
    file = table(tmp_path / "t.parquet", "aa", [1, 0], [A, -A], note=["p", "q"], seconds=[3.5, 1.25])
    assert audited(file, capsys)[0] == 1
    code, rows = audited(file, capsys, 'reward_columns=["right"]')
    assert (code, statuses(rows)["advantages"]) == (0, "ok")


# -- verl's dumps ------------------------------------------------------------------------------------------------------
def dump(folder: Path, inputs: str, scores: list[float], **metrics: float) -> Path:
    lines = [
        {"input": i, "output": "o", "gts": None, "score": s, "step": 10, "acc": True}
        for i, s in zip(inputs, scores, strict=True)
    ]
    written(folder / "10.jsonl", lines)
    data = {name.replace("_", "/"): value for name, value in metrics.items()}
    written(
        folder / "metrics.jsonl",
        [{"step": 10, "elapsed_seconds": 2.5, "data": {f"critic/{n}": v for n, v in data.items()}}],
    )
    return folder


def test_dumps_of_verl_are_compared_with_the_metrics_of_its_file_logger(tmp_path: Path, capsys: Capture) -> None:
    # Groups (1, 0) and (0, 0, ) of two; the std of (1, 0) is sqrt(1/2), and verl adds 1e-6 to it.
    a = 0.5 / (0.5**0.5 + 1e-6)
    right = {"score_mean": 0.25, "score_max": 1.0, "score_min": 0.0, "advantages_max": a, "advantages_min": -a}
    code, rows = audited(dump(tmp_path, "abab", [1, 0, 0, 0], **right), capsys, of="verl")
    assert code == 0
    assert {name: row["numbers"].get("numbers") for name, row in rows.items() if row["status"] == "ok"} == {
        "rewards": 3, "advantages": 2
    }  # fmt: skip
    not_scaled = right | {"advantages_max": 0.5, "advantages_min": -0.5}
    code, rows = audited(dump(tmp_path, "abab", [1, 0, 0, 0], **not_scaled), capsys, of="verl")
    assert code == 1
    assert rows["advantages"]["value"].startswith(f"{tmp_path / 'metrics.jsonl'}:1: critic/advantages/max is 0.5, ")
    assert rows["advantages"]["value"].endswith("; all numbers agree with scale_rewards=none")
    code, rows = audited(dump(tmp_path, "aaab", [1, 0, 0, 0], **right), capsys, of="verl")
    assert rows["advantages"]["value"] == (
        f"step 10: {tmp_path / '10.jsonl'}:1: its groups are not known, as an input has 1 to 3 outputs: "
        "some prompts are equal"
    )


def test_a_dump_alone_has_nothing_to_compare(tmp_path: Path, capsys: Capture) -> None:
    dump(tmp_path, "aa", [1, 0])
    (tmp_path / "metrics.jsonl").unlink()
    code, rows = audited(tmp_path, capsys, of="verl")
    assert code == 0
    assert set(statuses(rows).values()) == {"skipped"}


# -- refusals ----------------------------------------------------------------------------------------------------------
def completion(**fields: Any) -> dict[str, Any]:
    return {"step": 1, "group": 0, "reward": 1.0, **fields}


@each(
    ("lines", "expected"),
    [
        ([], "audit: has no lines, got {file}"),
        ([{"settings": {}}], "audit: has no completions, got {file}"),
        ([{"settings": {"scale_reward": 1}}], "{file}:1.settings.scale_reward: there is no such key, got 1; "),
        (
            [{"settings": {"eps": -1}}],
            "{file}:1.settings.eps: must be greater than or equal to 0, got -1; docs/audit.md",
        ),
        ([{"settings": {}, "step": 1}], "{file}:1.settings: stands on a line of its own"),
        ([{"step": 1, "score": 2}], "{file}:1: is neither a completion (group), nor an update (loss), nor settings"),
        ([completion(), {"step": 1, "group": 0}], "{file}:2.reward: is missing, and there are no rewards"),
        ([completion(advantge=1.0)], "{file}:1.advantge: there is no such key, got 1.0; did you mean"),
        ([completion(advantage="1")], "{file}:1.advantage: must be a number, got '1'; docs/audit.md"),
        ([completion(mask=[0, 2], length=2)], "{file}:1.mask: must be 0 or 1, got [0, 2]; docs/audit.md"),
        (
            [completion(mask=[1], logprobs=[-1.0, -2.0])],
            "{file}:1.mask: must be as long as the line's other lists, got 1",
        ),
        ([completion(length=3, mask=[1, 1])], "{file}:1.mask: has no entry for each of the 3 tokens"),
        ([completion(length=3, completion_ids=[1])], "{file}:1.length: is not that of completion_ids, got 3"),
        ([completion(), {"step": 2, "loss": 1.0}], "{file}:2.step: has no completions before or after it, got 2"),
        (
            [completion(), completion(step=2), completion()],
            "{file}:3.step: its completions do not stand together, got 1",
        ),
        ([completion(), {"step": 1, "loss": 1.0, "rows": [[1]]}], "{file}:2.rows: the step has 1 completion, got 1"),
        (
            [completion(), {"step": 1, "loss": 1.0, "logprobs": [[]]}],
            "{file}:2.logprobs: must have a list for each row",
        ),
        (
            [completion(length=2), {"step": 1, "loss": 1.0, "logprobs": [[[-1.0]]]}],
            "{file}:2.logprobs: completion 0 has 2 to 2 entries, got 1",
        ),
        (
            [completion(rewards={"a": 1.0}), completion(rewards={"b": 1.0})],
            "{file}:2.rewards: are not those of the step's first completion, in its order, got b",
        ),
    ],
)
def test_malformed_lines_are_refused_by_their_key(
    lines: list[dict[str, Any]], expected: str, tmp_path: Path, capsys: Capture
) -> None:
    file = written(tmp_path / "run.jsonl", lines)
    assert cli.run(["audit", str(file), "of=trl"]) == 2
    assert capsys.readouterr().err.startswith(f"rlft: {expected.format(file=file)}")


@each(
    ("words", "expected"),
    [
        (["x", "--of", "trl"], "audit: has no such option, got --of; write of=trl or of=verl"),
        (["x", "--of=verl"], "audit: has no such option, got --of=verl; write of=trl or of=verl"),
        (["x", "--jsn"], "audit: has no such option, got --jsn; the only one is --json"),
        (["x", "of=trlx"], "of: must name a trainer, got trlx; use of=trl or of=verl"),
        (["x", "of="], "of: must name a trainer; use of=trl or of=verl"),
        (["of=trl"], "audit: takes one file or folder; write rlft audit <file or folder> of=trl"),
        (["x", "y", "of=trl"], "audit: takes one file or folder, got x y; write rlft audit"),
        (["nowhere", "of=trl"], "audit: there is no such file or folder, got nowhere; name what the run has logged"),
        (["{file}", "of=trl", "loss_typ=grpo"], "loss_typ: there is no such key, got 'grpo'; did you mean loss_type"),
        (["{file}", "of=trl", "loss_type=grp"], "loss_type: is not one of its choices, got 'grp'; did you mean grpo"),
        (["{file}", "of=trl", "eps=x"], "eps: must be a number, got 'x'; docs/audit.md has the form"),
        (["{file}", "of=trl", "replay=1"], "replay: there is no such key, got 1"),
        (["{file}", "of=trl", "reward_weights=[1]"], "reward_weights: there must be one for each of right, short"),
    ],
)
def test_mistakes_on_the_command_line_are_refused(
    words: list[str], expected: str, tmp_path: Path, capsys: Capture
) -> None:
    file = written(tmp_path / "run.jsonl", Plain().lines())
    assert cli.run(["audit", *[word.format(file=file) for word in words]]) == 2
    assert capsys.readouterr().err.startswith(f"rlft: {expected}")


def test_a_table_without_its_columns_is_refused(tmp_path: Path, capsys: Capture) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"step": [1], "text": ["a"]}), tmp_path / "t.parquet")
    assert cli.run(["audit", str(tmp_path / "t.parquet"), "of=trl"]) == 2
    assert f"rlft: {tmp_path / 't.parquet'}, row 0.prompt: is missing in the table" in capsys.readouterr().err
    assert (
        cli.run(["audit", str(table(tmp_path / "u.parquet", "aa", [1, 0], [A, -A])), "of=trl", 'reward_columns=["a"]'])
        == 2
    )
    assert "rlft: reward_columns: the table has no such column, only step, prompt" in capsys.readouterr().err


def test_a_folder_with_an_equals_sign_is_a_path(tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "lr=0.1"
    place.mkdir()
    assert audited(written(place / "run.jsonl", Plain().lines()), capsys)[0] == 0
