"""`rlft report`: what a page holds of one run or several, and the images of their prompts."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import json
import math
import re
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow

from rlft import cli
from rlft.commands.watch import report, report_completions
from rlft.commands.watch.report import MAX_POINTS, report_of, thinned
from rlft.commands.watch.report_completions import (
    HELD_OUT,
    MAX_EDGE,
    MAX_TEXT,
    TRAINED,
    choose,
    data_url,
    fitting,
    shown_images,
)
from rlft.commands.watch.runs import same_settings
from rlft.config.compose import compose
from rlft.config.keys import keys_of
from rlft.config.schema import RunConfig
from rlft.data.shapes import Shapes, drawing, pixels_of
from rlft.runs.lines import TokenValues, encode, rollout_files, token_fields
from rlft.types import Image, Split

HOSTILE = {
    "script": "</script><script>document.title='owned'</script>",
    "handler": "<img src=x onerror=\"document.title='owned'\">",
    "link": "[a](javascript:document.title='owned') <a href='javascript:alert(1)'>b</a>",
    "bidi": "safe\u202egnihton\u202c",
    "zero width": "a\u200bb\u200dc\ufeffd",
    "escape": "\x1b[31mred\x1b]0;owned\x07",
    "blanks": "a\u3164b\u2800c\ufe0fd\u034f",
    "surrogate": "half \ud83d of one",
    "long": "x" * 2**20,
}


def read_page(file: Path) -> dict[str, Any]:
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', file.read_text())
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


# -- of a real run -----------------------------------------------------------------------------------------------------
def test_a_report_holds_what_the_run_left(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    out = tmp_path / "page.html"
    assert cli.run(["report", str(trained), f"out={out}"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    [run] = read_page(out)["runs"]
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert run["steps"] == [line["step"] for line in lines]
    assert run["metrics"]["reward/mean"] == pytest.approx([line["reward/mean"] for line in lines], rel=1e-4)
    assert run["config"]["algorithm._target_"] == "rlft.algorithm.grpo.GRPO"
    assert run["config"]["origin.commit"]
    assert run["status"] == "finished"
    groups = run["completions"]["groups"]
    assert {group["kind"] for group in groups} == {TRAINED, HELD_OUT}
    shown = [
        (g["step"], g["id"], row["text"], row["reward"]) for g in groups if g["kind"] == TRAINED for row in g["rows"]
    ]
    left = []
    for file in sorted((trained / "rollouts").iterdir()):
        for line in map(json.loads, file.read_text().splitlines()):
            left.append((line["step"], line["prompt_id"], line["completion"], line["reward"]))
    assert sorted(shown) == sorted(left), "a small run is shown whole"
    assert run["completions"]["completions"] == len(left)


def test_the_default_place_is_the_runs_folder_and_of_several_the_current_one(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_run("first"), make_run("second")
    monkeypatch.chdir(tmp_path)
    assert report.report([str(first)]) == first / "report.html"
    assert report.report([str(first), str(second)]) == Path("report.html")
    assert len(read_page(tmp_path / "report.html")["runs"]) == 2


def test_a_folder_that_is_named_as_sweeps_name_theirs_is_no_word(make_run: Callable[..., Path]) -> None:
    run = make_run("lr=1e-05,seed=0")
    assert report.report([str(run)]) == run / "report.html"
    assert report.report([f"run={run}"]) == run / "report.html"


def test_a_run_without_metrics_and_a_place_that_cannot_be_written_are_refused(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("run")
    for out, problem in (
        ("page.pdf", "must be an HTML file, got page.pdf"),
        ("/proc/p.html", "cannot be wri"),
    ):
        assert cli.run(["report", str(run), f"out={out}"]) == 2
        assert capsys.readouterr().err.startswith(f"rlft: out: {problem}")
    for name in ("metrics.jsonl", "eval.jsonl"):
        (run / name).unlink()
    assert cli.run(["report", str(run)]) == 2
    assert "the run has no metrics.jsonl" in capsys.readouterr().err
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("command: train", "command: sample"))
    assert cli.run(["report", str(run)]) == 2
    assert "a run of rlft sample writes no metrics.jsonl, which a report needs" in capsys.readouterr().err


def test_a_group_that_is_too_large_hides_none_behind_it() -> None:
    small, large = {"rows": [{"text": "a"}]}, {"rows": [{"text": "a" * 1000}]}
    assert list(fitting([small, large, small], 200)) == [small, small]


# -- curves, alarms, configs -------------------------------------------------------------------------------------------
def test_long_series_are_averaged_and_that_is_said() -> None:
    lines = [{"step": n, "a": float(n), "b": None if n % 2 else 1.0} for n in range(1, 5 * MAX_POINTS + 1)]
    found = thinned(lines)
    assert len(found) == MAX_POINTS
    assert found[0] == {"step": 5, "a": 3.0, "b": 1.0}
    assert found[-1]["step"] == 5 * MAX_POINTS
    assert thinned(lines[:MAX_POINTS]) == lines[:MAX_POINTS]


def test_alarms_are_told_with_their_words_and_marks_without_words_are_not_lost(make_run: Callable[..., Path]) -> None:
    run = make_run("run", steps=4, marks={2: "kl", 3: "clipped"})
    (run / "alarms.jsonl").write_bytes(encode({"step": 2, "name": "kl", "text": "too far\x1b[0m"}))
    found = report_of([run], 10**6)["runs"][0]
    assert found["alarms"] == [
        {"step": 2, "name": "kl", "text": "too far\\x1b[0m"},
        {"step": 3, "name": "clipped", "text": ""},
    ]
    assert not any(name.startswith("alarm/") for name in found["metrics"])


def test_runs_that_differ_by_their_seed_alone_are_one_band(make_run: Callable[..., Path]) -> None:
    runs = [make_run(f"s{i}", seed=i) for i in range(3)] + [make_run("other", lr=0.5)]
    found = report_of(runs, 10**6)
    assert found["seeds"] == [[0, 1, 2]]
    assert [row["key"] for row in found["differences"]] == ["name", "seed", "trainer.lr"]
    assert found["runs"][0]["label"] == "trainer.lr=0.01, seed=0"
    assert found["runs"][3]["setting"] == "trainer.lr=0.5"


def test_seeds_may_differ_in_what_a_resume_may_change_and_in_nothing_else() -> None:
    """Every key of the schema, one at a time: a resumed seed stays in its band, and another experiment is in none."""
    plain = compose(["+recipe=grpo_arithmetic"])
    for key, known in keys_of(RunConfig).items():
        section, _, name = key.rpartition(".")
        inside, other = (plain.get(section) if section else plain), copy.deepcopy(plain)
        if key in ("seed", "command", "steps") or not isinstance(inside, dict) or isinstance(inside.get(name), dict):
            continue
        (other[section] if section else other)[name] = "another"
        is_path = name == "path" or known.roles
        free = bool(known.free and not is_path) or known.measured is False
        assert (same_settings([plain, other]) == [[0, 1]]) == free, key
    cosine = {**plain, "trainer": {**plain["trainer"], "schedule": "cosine"}}
    longer = [{**config, "steps": 80} for config in (plain, cosine)]
    assert same_settings([plain, longer[0]]) == [[0, 1]]
    assert same_settings([cosine, longer[1]]) == [], "the schedule ends with the steps"


def test_a_folder_above_runs_stands_for_all_of_them(make_run: Callable[..., Path]) -> None:
    first, second = make_run("a"), make_run("b")
    assert report.folders_of([str(first.parent), str(second)]) == [first, second]


def test_the_table_of_a_sweep_is_told_beside_its_runs(make_run: Callable[..., Path]) -> None:
    run = make_run("a")
    (run.parent / "sweep.csv").write_text(
        "trial,state,trainer.lr,accuracy\n1,complete,0.000123456789,0.5\n0,<b>,0.01,\n"
    )
    assert report.report_of([run], 1000, ["nowhere", str(run)])["sweeps"] == []
    [sweep] = report.report_of([run], 1000, [str(run.parent)])["sweeps"]
    assert sweep == {
        "name": str(run.parent),
        "columns": ["trial", "state", "trainer.lr", "accuracy"],
        "rows": [["1", "complete", "0.00012346", "0.5"], ["0", "<b>", "0.01", ""]],
    }
    above = report.report_of([run], 1000, [str(run.parent.parent)])["sweeps"]
    assert above == [sweep], "of a folder above sweeps each has its table"


# -- which completions -------------------------------------------------------------------------------------------------
def test_of_many_steps_few_are_shown_evenly_whole_groups_within_the_budget(make_run: Callable[..., Path]) -> None:
    run = make_run("run", steps=200)
    everything = choose(run, 10**8)
    assert everything["steps_on_disk"] == 200
    assert everything["steps"] == report_completions.MAX_STEPS
    steps = sorted({group["step"] for group in everything["groups"] if group["kind"] == TRAINED})
    assert steps[0] == 1
    assert steps[-1] == 200
    assert max(b - a for a, b in pairwise(steps)) <= 6
    few = choose(run, 20_000)
    assert len(json.dumps(few["groups"], ensure_ascii=False)) < 21_000
    assert 0 < few["steps"] < everything["steps"]
    assert all(len(group["rows"]) == 2 for group in few["groups"] if group["kind"] == TRAINED)


def test_groups_with_values_of_tokens_come_first(make_run: Callable[..., Path]) -> None:
    run = make_run("run", steps=1, groups=40, tokens_in=35)
    found = choose(run, 10**8)
    assert any("tokens" in row for group in found["groups"] for row in group["rows"])
    row = next(row for group in found["groups"] for row in group["rows"] if "tokens" in row)
    assert row["tokens"]["old"] == [-0.123]
    assert row["tokens"]["sampled"] == [-0.1]


def test_a_conversation_is_shown_turn_by_turn(make_run: Callable[..., Path]) -> None:
    run = make_run("run", steps=1, tokens_in=1)
    file = run / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    long = "7" * (MAX_TEXT + 1)
    call = {"name": "add\u202e", "arguments": "{}", "answer": long, "failed": True}
    turns = [{"end": 1, "text": "1+1?", "answer": "", "reward": 0.5, "calls": [call]}]
    rows[0] |= {"token_ids": [1, 2, 3], "logprobs": [-0.1, 0.0, 0.0], "mask": [1, 0, 0], "turns": turns}
    values = TokenValues(
        text=["1+1?", "7", "7"], old=[-0.2, None, None], after=[-0.1, None, None], reference=[-0.1, None, None],
        entropy=[0.5, None, None], advantage=[1.0, None, None],
    )  # fmt: skip
    rows[0]["tokens"] = token_fields(values)
    file.write_bytes(b"".join(map(encode, rows)))
    group = next(group for group in choose(run, 10**6)["groups"] if any("turns" in row for row in group["rows"]))
    row = next(row for row in group["rows"] if "turns" in row)
    assert row["length"] == 1, "of three tokens one was sampled"
    assert row["mask"] == [1, 0, 0]
    assert row["tokens"]["old"] == [-0.2, None, None]
    [shown] = row["turns"]
    assert (shown["said"], shown["reward"]) == ({"text": "1+1?"}, 0.5)
    [shown_call] = shown["calls"]
    assert shown_call["answer"] == {"text": long[:MAX_TEXT], "cut": MAX_TEXT + 1}
    assert "\u202e" not in shown_call["name"]
    assert shown_call["failed"]


def test_a_held_out_conversation_is_shown_turn_by_turn(make_run: Callable[..., Path]) -> None:
    run = make_run("run", steps=1)
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    turn = {"end": 1, "text": "1+1?", "answer": "No.", "reward": None, "calls": []}
    lines[-1]["examples"][0]["turns"] = [turn]
    (run / "eval.jsonl").write_bytes(b"".join(map(encode, lines)))
    rows = [row for group in choose(run, 10**6)["groups"] if group["kind"] == HELD_OUT for row in group["rows"]]
    [shown] = [row["turns"] for row in rows if "turns" in row]
    assert shown == [{"said": {"text": "1+1?"}, "answer": {"text": "No."}, "reward": None, "calls": []}]


def test_a_group_too_large_for_the_budget_hides_no_other(make_run: Callable[..., Path]) -> None:
    run = make_run("run", steps=9, groups=2, tokens_in=0)
    file = run / "rollouts" / "step_000009.jsonl"  # which is looked at second
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["tokens"] = {name: (["x"] if name == "text" else [0.5]) * 20_000 for name in rows[0]["tokens"]}
    file.write_bytes(b"".join(map(encode, rows)))
    found = choose(run, 60_000)
    assert found["steps"] == 9
    last = next(group for group in found["groups"] if group["step"] == 9 and group["id"] == "p9.0")
    assert not any("tokens" in row for row in last["rows"])
    assert sum("tokens" in row for group in found["groups"] for row in group["rows"]) == 16


def test_a_broken_number_of_a_token_is_no_number_and_stops_nothing(make_run: Callable[..., Path]) -> None:
    values = TokenValues(text=["a"], old=[math.nan], after=[0.5], reference=[-math.inf], entropy=[1.0], advantage=[0.0])
    assert token_fields(values) == {
        "text": ["a"], "old": [None], "after": [0.5], "reference": [None], "entropy": [1.0], "advantage": [0.0],
    }  # fmt: skip
    run = make_run("run", steps=1, tokens_in=0)
    file = run / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0] |= {"tokens": token_fields(values), "reward": None, "logprobs": [None]}
    file.write_bytes(b"".join(map(encode, rows)))
    row = next(group for group in choose(run, 10**6)["groups"] if group["id"] == "again")["rows"][0]
    assert (row["tokens"]["old"], row["tokens"]["sampled"], row["reward"]) == ([None], [None], None)


def test_a_file_that_a_living_run_has_just_removed_is_no_error(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("run", steps=5)
    listed = rollout_files(run)
    (run / "rollouts" / "step_000001.jsonl").unlink()
    monkeypatch.setattr(report_completions.lines, "rollout_files", lambda folder: listed)
    assert choose(run, 10**6)["steps"] == 4


def test_of_a_folder_above_runs_those_without_metrics_are_left_out(make_run: Callable[..., Path]) -> None:
    good, bad = make_run("good"), make_run("loading")
    for name in ("metrics.jsonl", "eval.jsonl"):
        (bad / name).unlink()
    assert report.folders_of([str(good.parent)]) == [good]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_a_model_writes_is_hidden_or_markup(text: str, make_run: Callable[..., Path]) -> None:
    run = make_run("run", steps=1, completion=text)
    page = (report.report([str(run)])).read_text()
    assert "owned" not in page, "all of it is packed"
    assert page.count("<script") == 4
    row = next(row for group in choose(run, 10**7)["groups"] for row in group["rows"])
    assert all(char.isprintable() or char == "\n" for char in row["text"])
    assert not set(row["text"]) & set("\u3164\u2800\ufe0f\u034f")
    assert len(row["text"]) <= 2 * MAX_TEXT
    assert row.get("cut") == (len(text) if len(text) > MAX_TEXT else None)


def test_only_the_pages_own_scripts_and_styles_may_run(make_run: Callable[..., Path]) -> None:
    page = report.report([str(make_run("run"))]).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert policy[1].count("sha256-") == 5
    assert not re.search(r"https?://(?!github\.com/leeoniya)", page), "nothing is fetched"


# -- load --------------------------------------------------------------------------------------------------------------
def large_step(file: Path, groups: int, characters: int) -> None:
    """Groups of four, the last of them with values of tokens, the one before it of the prompt `again`."""
    with file.open("w") as lines:
        for g in range(groups):
            for i in range(4):
                line: dict[str, Any] = {"step": 1, "prompt_id": f"p{g}", "index": i}
                line |= {"prompt": [{"role": "user", "content": "?"}], "answer": "1", "completion": "x" * characters}
                line |= {"token_ids": [1] * 10, "logprobs": [-1.0] * 10, "rewards": {}, "reward": 1.0, "advantage": 0.0}
                line |= {"policy_version": 0, "finish_reason": "stop"}
                if g == groups - 1:
                    line["tokens"] = {"text": ["x"], "reference": [0.5]}
                lines.write(json.dumps(line) + "\n")


def test_a_step_of_many_completions_is_read_without_holding_them(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    large_step(file, 300, 20_000)  # 24 MB
    tracemalloc.start()
    found = report_completions.groups_of(file, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    wanted = ["p299", *(f"p{g}" for g in range(report_completions.MAX_GROUPS_PER_STEP - 1))]
    assert [group["id"] for group in found] == wanted
    assert [len(group["rows"]) for group in found] == [4] * len(wanted)
    # 16 groups and two, one of them being read, of 4 x 20,000 characters, and a line being parsed.
    assert peak < 18 * 4 * 20_000 + 1_000_000 < file.stat().st_size / 8


def test_a_completion_of_a_megabyte_is_shown_by_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    large_step(file, 2, 10**6)
    rows = [row for group in report_completions.groups_of(file, 1) for row in group["rows"]]
    assert {(len(row["text"]), row["cut"]) for row in rows} == {(report_completions.MAX_TEXT, 10**6)}


SHAPES: dict[str, Any] = {"most": 9, "size": 12, "held_out_size": 4, "seed": 1}


def decoded(url: str) -> pillow.Image:
    start = "data:image/jpeg;base64,"
    assert url.startswith(start)
    return pillow.open(BytesIO(base64.b64decode(url.removeprefix(start))))


@pytest.fixture
def config() -> dict[str, Any]:
    return {"data": {"_target_": "rlft.data.shapes.Shapes", **SHAPES}}


def test_those_of_both_splits_are_shown_and_what_the_data_lack_is_not(config: dict[str, Any]) -> None:
    trained, held_out = (Shapes(**SHAPES).load(split)[-1] for split in (Split.train, Split.held_out))
    wanted = [trained.images[0].digest, "0" * 16, held_out.images[0].digest]
    shown = shown_images(config, [{"images": wanted}], 10**6)
    assert list(shown) == [wanted[0], wanted[2]]
    for prompt, url in zip((trained, held_out), shown.values(), strict=True):
        # JPEG rounds: the colours of a picture of nine cells are hit on average, and those of another are not.
        gap = np.abs(np.asarray(decoded(url), dtype=float) - pixels_of(prompt.id)).mean()
        other = np.abs(np.asarray(decoded(url), dtype=float) - pixels_of("9-other")).mean()
        assert gap < 6 < other


def test_they_take_no_more_bytes_than_they_may_and_the_first_come_first(config: dict[str, Any]) -> None:
    images = [prompt.images[0] for prompt in Shapes(**SHAPES).load(Split.train)]
    sizes = [len(data_url(image)) for image in images]
    wanted = [image.digest for image in images]
    assert list(shown_images(config, [{"images": wanted}], sum(sizes[:3])))[:3] == wanted[:3]
    assert shown_images(config, [{"images": wanted}], min(sizes) - 1) == {}
    assert sum(map(len, shown_images(config, [{"images": wanted}], 3000).values())) <= 3000


def test_a_large_image_is_made_small() -> None:
    file = BytesIO()
    pillow.new("RGBA", (1000, 500), (255, 0, 0, 255)).save(file, "PNG")
    assert decoded(data_url(Image(digest="", data=file.getvalue()))).size == (MAX_EDGE, MAX_EDGE // 2)


def test_data_that_are_gone_or_damaged_are_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good, rows = drawing("3-good"), tmp_path / "rows.jsonl"
    (tmp_path / "good.png").write_bytes(good.data or b"")
    row = {"answer": "3", "image": "good.png"}
    rows.write_text("".join(json.dumps({**row, "prompt": f"How many? {i}"}) + "\n" for i in range(20)))
    config = compose(["data=jsonl", f"data.path={rows}", "data.image_field=image"])
    digest = hashlib.sha256(good.data or b"").hexdigest()[:16]
    assert list(shown_images(config, [{"images": [digest]}], 10**6)) == [digest]
    (tmp_path / "good.png").unlink()
    assert shown_images(config, [{"images": [digest]}], 10**6) == {}
    assert "the report lacks images, since the run's data cannot be read" in capsys.readouterr().err
    rows.unlink()
    assert shown_images(config, [{"images": [digest]}], 10**6) == {}
    assert "the report lacks images, since the run's data cannot be read" in capsys.readouterr().err


def test_data_of_a_run_without_images_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_images({}, [{"prompt": []}], 10**6) == {}
    assert capsys.readouterr().err == ""
