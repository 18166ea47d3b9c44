"""Which completions and images of a run its report holds, and what becomes of them."""

import base64
import hashlib
import itertools
import json
import math
import tracemalloc
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from audited_runs import lines_of, write
from PIL import Image as pillow

from rlft.commands.watch import report_completions
from rlft.commands.watch.report_completions import HELD_OUT, MAX_EDGE, MAX_TEXT, TRAINED, choose, data_url, shown_images
from rlft.config.compose import compose
from rlft.data.shapes import Shapes, drawing, pixels_of
from rlft.runs.lines import TokenValues, rollout_files, token_fields
from rlft.types import Image, Split


# -- which completions -------------------------------------------------------------------------------------------------
def test_of_many_steps_few_are_shown_evenly_whole_groups_within_the_budget(make_run):
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


def test_groups_with_values_of_tokens_come_first(make_run):
    run = make_run("run", steps=1, groups=40, tokens_in=35)
    found = choose(run, 10**8)
    assert any("tokens" in row for group in found["groups"] for row in group["rows"])
    row = next(row for group in found["groups"] for row in group["rows"] if "tokens" in row)
    assert row["tokens"]["old"] == [-0.123]
    assert row["tokens"]["sampled"] == [-0.1]


def test_a_conversation_is_shown_turn_by_turn(make_run):
    run = make_run("run", steps=1, tokens_in=1)
    file = run / "rollouts" / "step_000001.jsonl"
    rows = lines_of(file)
    long = "7" * (MAX_TEXT + 1)
    call = {"name": "add\u202e", "arguments": "{}", "answer": long, "failed": True}
    turns = [{"end": 1, "text": "1+1?", "answer": "", "reward": 0.5, "calls": [call]}]
    rows[0] |= {"token_ids": [1, 2, 3], "logprobs": [-0.1, 0.0, 0.0], "mask": [1, 0, 0], "turns": turns}
    values = TokenValues(
        text=["1+1?", "7", "7"], old=[-0.2, None, None], after=[-0.1, None, None], reference=[-0.1, None, None],
        entropy=[0.5, None, None], advantage=[1.0, None, None],
    )  # fmt: skip
    rows[0]["tokens"] = token_fields(values)
    write(file, rows)
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
    lines = lines_of(run / "eval.jsonl")
    lines[-1]["examples"][0]["turns"] = [{"end": 1, "text": "1+1?", "answer": "No.", "reward": None, "calls": []}]
    write(run / "eval.jsonl", lines)
    rows = [row for group in choose(run, 10**6)["groups"] if group["kind"] == HELD_OUT for row in group["rows"]]
    [shown] = [row["turns"] for row in rows if "turns" in row]
    assert shown == [{"said": {"text": "1+1?"}, "answer": {"text": "No."}, "reward": None, "calls": []}]


def test_a_group_too_large_for_the_budget_hides_no_other(make_run):
    run = make_run("run", steps=9, groups=2, tokens_in=0)
    file = run / "rollouts" / "step_000009.jsonl"  # which is looked at second
    rows = lines_of(file)
    rows[0]["tokens"] = {name: (["x"] if name == "text" else [0.5]) * 20_000 for name in rows[0]["tokens"]}
    write(file, rows)
    found = choose(run, 60_000)
    assert found["steps"] == 9
    last = next(group for group in found["groups"] if group["step"] == 9 and group["id"] == "p9.0")
    assert not any("tokens" in row for row in last["rows"])
    assert sum("tokens" in row for group in found["groups"] for row in group["rows"]) == 16


def test_a_broken_number_of_a_token_is_no_number_and_stops_nothing(make_run):
    values = TokenValues(text=["a"], old=[math.nan], after=[0.5], reference=[-math.inf], entropy=[1.0], advantage=[0.0])
    assert token_fields(values) == {
        "text": ["a"], "old": [None], "after": [0.5], "reference": [None], "entropy": [1.0], "advantage": [0.0],
    }  # fmt: skip
    run = make_run("run", steps=1, tokens_in=0)
    file = run / "rollouts" / "step_000001.jsonl"
    rows = lines_of(file)
    rows[0] |= {"tokens": token_fields(values), "reward": None, "logprobs": [None]}
    write(file, rows)
    row = next(group for group in choose(run, 10**6)["groups"] if group["id"] == "again")["rows"][0]
    assert (row["tokens"]["old"], row["tokens"]["sampled"], row["reward"]) == ([None], [None], None)


def test_a_file_that_a_living_run_has_just_removed_is_no_error(make_run, monkeypatch):
    run = make_run("run", steps=5)
    listed = rollout_files(run)
    (run / "rollouts" / "step_000001.jsonl").unlink()
    monkeypatch.setattr(report_completions.lines, "rollout_files", lambda folder: listed)
    assert choose(run, 10**6)["steps"] == 4


# -- load --------------------------------------------------------------------------------------------------------------
def large_step(file, groups, characters):
    """Groups of four, the last of them with values of tokens."""
    line = {"step": 1, "prompt": [{"role": "user", "content": "?"}], "answer": "1", "completion": "x" * characters}
    line |= {"token_ids": [1] * 10, "logprobs": [-1.0] * 10, "rewards": {}, "reward": 1.0, "advantage": 0.0}
    line |= {"policy_version": 0, "finish_reason": "stop"}
    with file.open("w") as lines:
        for g, i in itertools.product(range(groups), range(4)):
            values = {"tokens": {"text": ["x"], "reference": [0.5]}} if g == groups - 1 else {}
            lines.write(json.dumps({**line, "prompt_id": f"p{g}", "index": i, **values}) + "\n")


def test_a_step_of_many_completions_is_read_without_holding_them(tmp_path):
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


SHAPES = {"most": 9, "size": 12, "held_out_size": 4, "seed": 1}


def decoded(url):
    start = "data:image/jpeg;base64,"
    assert url.startswith(start)
    return pillow.open(BytesIO(base64.b64decode(url.removeprefix(start))))


@pytest.fixture
def config():
    return {"data": {"_target_": "rlft.data.shapes.Shapes", **SHAPES}}


def test_those_of_both_splits_are_shown_and_what_the_data_lack_is_not(config):
    trained, held_out = (Shapes(**SHAPES).load(split)[-1] for split in (Split.train, Split.held_out))
    wanted = [trained.images[0].digest, "0" * 16, held_out.images[0].digest]
    shown = shown_images(config, [{"images": wanted}], 10**6)
    assert list(shown) == [wanted[0], wanted[2]]
    for prompt, url in zip((trained, held_out), shown.values(), strict=True):
        # JPEG rounds: the colours of a picture of nine cells are hit on average, and those of another are not.
        gap = np.abs(np.asarray(decoded(url), dtype=float) - pixels_of(prompt.id)).mean()
        other = np.abs(np.asarray(decoded(url), dtype=float) - pixels_of("9-other")).mean()
        assert gap < 6 < other


def test_they_take_no_more_bytes_than_they_may_and_the_first_come_first(config):
    images = [prompt.images[0] for prompt in Shapes(**SHAPES).load(Split.train)]
    sizes = [len(data_url(image)) for image in images]
    wanted = [image.digest for image in images]
    assert list(shown_images(config, [{"images": wanted}], sum(sizes[:3])))[:3] == wanted[:3]
    assert shown_images(config, [{"images": wanted}], min(sizes) - 1) == {}
    assert sum(map(len, shown_images(config, [{"images": wanted}], 3000).values())) <= 3000


def test_a_large_image_is_made_small():
    file = BytesIO()
    pillow.new("RGBA", (1000, 500), (255, 0, 0, 255)).save(file, "PNG")
    assert decoded(data_url(Image(digest="", data=file.getvalue()))).size == (MAX_EDGE, MAX_EDGE // 2)


def test_data_that_are_gone_or_damaged_are_no_error(here, capsys):
    good, rows = drawing("3-good"), here / "rows.jsonl"
    (here / "good.png").write_bytes(good.data or b"")
    row = {"answer": "3", "image": "good.png"}
    rows.write_text("".join(json.dumps({**row, "prompt": f"How many? {i}"}) + "\n" for i in range(20)))
    config = compose(["data=jsonl", f"data.path={rows}", "data.image_field=image"])
    digest = hashlib.sha256(good.data or b"").hexdigest()[:16]
    assert list(shown_images(config, [{"images": [digest]}], 10**6)) == [digest]
    for gone in (here / "good.png", rows):
        gone.unlink()
        assert shown_images(config, [{"images": [digest]}], 10**6) == {}
        assert "the report lacks images, since the run's data cannot be read" in capsys.readouterr().err
    assert shown_images({}, [{"prompt": []}], 10**6) == {}
    assert capsys.readouterr().err == "", "data of a run without images are not read"
