"""The completions a run leaves behind, and that a resumed run leaves the same files."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from rlft.config.schema import RolloutsConfig
from rlft.logger.loggers import Rollouts
from rlft.runs.lines import completion_of, read_lines
from rlft.system import files
from rlft.types import Branch, ToolCall, Turn


def play(run, make_step, last, every=1, keep=None):
    """Steps run.step + 1 .. last as the loop hands them on."""
    rollouts = Rollouts(RolloutsConfig(every=every, keep=keep))
    rollouts.start(run)
    for step in range(run.step + 1, last + 1):
        rollouts.step(make_step(step))
    return rollouts


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "rollouts").glob("*"))}


def test_a_rollout_line_holds_everything_about_a_completion(make_run, make_step):
    play(make_run(step=2), make_step, 3)
    lines = read_lines(make_run().folder / "rollouts" / "step_000003.jsonl")
    assert lines[0] == {
        "step": 3, "prompt_id": "1+2", "index": 0, "prompt": [{"role": "user", "content": "What is 1+2?"}],
        "answer": "3", "completion": "2", "token_ids": [5, 6], "logprobs": [-0.5, -0.25],
        "rewards": {"custom": 0.25, "exact_match": 0.0}, "reward": 0.0, "advantage": -1.0, "policy_version": 2,
        "finish_reason": "stop",
    }  # fmt: skip
    assert [(line["index"], line["completion"], line["reward"], line["advantage"]) for line in lines] == [
        (0, "2", 0.0, -1.0),
        (1, "3", 1.0, 1.0),
    ]


def test_masks_turns_and_branches_are_written_and_read_back(make_run, make_step):
    step = make_step(3)
    call = ToolCall(name="add", arguments='{"a": "\u2028"}', answer="\x00 <|im_end|>", failed=True)
    turns = (Turn(end=1, text="1+1", answer="2", calls=(call,)), Turn(end=2, reward=0.5))
    first, second = step.groups[0].rollouts
    spoken = replace(first.completion, token_ids=(5, 6, 7), logprobs=(-0.5, 0.0, -1.0), mask=(True, False, True))
    spoken = replace(spoken, turns=turns, branches=(Branch(start=2, after=-1),))
    rollouts = (replace(first, completion=spoken), second)
    play(make_run(step=2), lambda _: replace(step, groups=[replace(step.groups[0], rollouts=rollouts)]), 3)
    lines = read_lines(make_run().folder / "rollouts" / "step_000003.jsonl")
    assert lines[0]["mask"] == [1, 0, 1]
    assert lines[0]["turns"][1] == {"end": 2, "text": "", "answer": "", "reward": 0.5, "calls": []}
    assert lines[0]["branches"] == [{"start": 2, "after": -1}]
    assert not {"mask", "turns", "branches"} & lines[1].keys()
    assert [completion_of(line) for line in lines] == [r.completion for r in rollouts]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (0, [])])
def test_rollouts_are_written_every_n_th_step(every, steps, make_run, make_step):
    rollouts = play(make_run(), make_step, 4, every)
    assert list(contents(make_run().folder)) == [f"step_{step:06d}.jsonl" for step in steps]
    assert [step for step in range(1, 5) if rollouts.config.writes(step)] == steps
    assert rollouts.config.most_files(4) == len(steps)


def test_a_step_without_completions_leaves_no_file(make_run, make_step):
    rollouts = play(make_run(), make_step, 0)
    rollouts.step(replace(make_step(1), groups=[]))
    assert contents(make_run().folder) == {}


def test_only_the_newest_files_stay(make_run, make_step):
    play(make_run(), make_step, 5, keep=2)
    assert list(contents(make_run().folder)) == ["step_000004.jsonl", "step_000005.jsonl"]
    assert RolloutsConfig(every=1, keep=2).most_files(5) == 3, "the newest, before the oldest goes"


@pytest.mark.parametrize("keys", [{}, {"keep": 2}, {"every": 2}])
@pytest.mark.parametrize(("checkpoint", "killed_after"), [(0, 0), (0, 3), (2, 2), (2, 5), (4, 6)])
def test_an_interrupted_run_leaves_the_files_of_an_uninterrupted_one(
    keys, checkpoint, killed_after, make_run, make_step, tmp_path
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    play(make_run(folder=whole), make_step, 6, **keys)
    play(make_run(folder=parts), make_step, killed_after, **keys)
    (parts / "rollouts").mkdir(parents=True, exist_ok=True)
    (parts / "rollouts" / "step_000001.jsonl.tmp").write_bytes(b"half")
    play(make_run(folder=parts, step=checkpoint), make_step, 6, **keys)
    assert contents(parts) == contents(whole)


def test_a_resume_removes_what_lies_beyond_the_checkpoint_before_it_goes_on(make_run, make_step):
    play(make_run(), make_step, 5)
    play(make_run(step=3), make_step, 3, every=0)
    assert list(contents(make_run().folder)) == [f"step_00000{k}.jsonl" for k in (1, 2, 3)]


def test_a_failed_write_leaves_no_half_file(make_run, make_step):
    rollouts = play(make_run(), make_step, 0)
    record = make_step(1)
    with pytest.raises(AttributeError):  # the second group is none, met after the first one is encoded
        rollouts.step(replace(record, groups=[*record.groups, None]))
    assert contents(make_run().folder) == {}


# -- load --------------------------------------------------------------------------------------------------------------
def test_the_rollouts_of_a_large_step_are_written_in_pieces(make_run, make_step, monkeypatch):
    record = make_step(1)
    rollouts = play(make_run(), make_step, 1)
    file = make_run().folder / "rollouts" / "step_000001.jsonl"
    whole = file.read_bytes()
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: pytest.fail("written at once"))
    rollouts.step(record)
    assert file.read_bytes() == whole
    with pytest.raises(AttributeError):
        rollouts.step(replace(make_step(2), groups=[*record.groups, None]))
    assert not list(file.parent.glob("step_000002*"))


def test_what_is_held_of_large_rollouts_is_a_piece(make_run, make_step, tmp_path):
    lines = (b"x" * 99_999 + b"\n" for _ in range(400))  # 40 MB
    tracemalloc.start()
    files.write_atomically(tmp_path / "large", lines, durable=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "large").stat().st_size == 40_000_000
    # The first two pieces, the second of which says that there is more, and one as parts and joined.
    assert peak < 4 * (files.PIECE_BYTES + 200_000) < 20_000_000
