"""What a run leaves behind, and that a resumed run leaves the same bytes."""

import json
from dataclasses import replace

import pytest

from rlft.logger.jsonl import Jsonl, encode, read_lines


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def play(run, make_step, make_evaluation, last, **keys):
    """Steps run.step + 1 .. last as the loop logs them, an evaluation before the first and after every second step."""
    logger = Jsonl(**({"rollouts_every": 1, "rollouts_max": None} | keys))
    logger.start(run)
    if run.step == 0:
        logger.evaluation(make_evaluation(0))
    for step in range(run.step + 1, last + 1):
        logger.step(make_step(step))
        if step % 2 == 0:
            logger.evaluation(make_evaluation(step))
    return logger


def test_a_step_leaves_one_line_of_metrics_in_name_order(make_run, make_step):
    logger = Jsonl(rollouts_every=0, rollouts_max=None)
    logger.start(make_run())
    logger.step(make_step(1, b=2.0, a=1))
    text = (make_run().folder / "metrics.jsonl").read_text()  # before finish: the line is flushed at once
    assert text == '{"step": 1, "a": 1, "b": 2.0}\n'


def test_nan_and_infinity_become_null(make_run, make_step):
    logger = Jsonl(rollouts_every=0, rollouts_max=None)
    logger.start(make_run())
    logger.step(make_step(1, loss__total=float("nan"), policy__grad_norm=float("inf")))
    assert read_lines(make_run().folder / "metrics.jsonl") == [
        {"step": 1, "loss/total": None, "policy/grad_norm": None}
    ]


def test_a_rollout_line_holds_everything_about_a_completion(make_run, make_step):
    logger = Jsonl(rollouts_every=1, rollouts_max=None)
    logger.start(make_run())
    logger.step(make_step(3))
    lines = read_lines(make_run().folder / "rollouts" / "step_000003.jsonl")
    assert lines[0] == {
        "step": 3,
        "prompt_id": "1+2",
        "index": 0,
        "prompt": [{"role": "user", "content": "What is 1+2?"}],
        "answer": "3",
        "completion": "2",
        "token_ids": [5, 6],
        "logprobs": [-0.5, -0.25],
        "rewards": {"custom": 0.25, "exact_match": 0.0},
        "reward": 0.0,
        "advantage": -1.0,
        "policy_version": 2,
        "finish_reason": "stop",
    }
    assert [(line["index"], line["completion"], line["reward"], line["advantage"]) for line in lines] == [
        (0, "2", 0.0, -1.0),
        (1, "3", 1.0, 1.0),
    ]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (0, [])])
def test_rollouts_are_written_every_n_th_step(every, steps, make_run, make_step, make_evaluation):
    play(make_run(), make_step, make_evaluation, 4, rollouts_every=every).finish("finished")
    names = sorted(path.name for path in (make_run().folder / "rollouts").glob("*"))
    assert names == [f"step_{step:06d}.jsonl" for step in steps]


def test_an_evaluation_line_holds_examples_with_question_answer_and_score(make_run, make_evaluation):
    logger = Jsonl(rollouts_every=1, rollouts_max=None)
    logger.start(make_run())
    logger.evaluation(make_evaluation(0, 0.5, ("4",)))
    assert read_lines(make_run().folder / "eval.jsonl") == [
        {
            "step": 0,
            "accuracy": 0.5,
            "accuracy_se": 0.01,
            "eval/exact_match": 0.5,
            "eval/pass@4": 0.75,
            "examples": [
                {
                    "prompt_id": "1+2+0*0",
                    "question": "What is 1+2+0*0?",
                    "answer": "3",
                    "completion": "4",
                    "score": 0.0,
                    "finish_reason": "stop",
                }
            ],
        }
    ]


@pytest.mark.parametrize("keys", [{}, {"rollouts_max": 2}, {"rollouts_every": 2}])
@pytest.mark.parametrize(("checkpoint", "killed_after"), [(0, 0), (0, 3), (2, 2), (2, 5), (4, 6)])
def test_an_interrupted_run_leaves_the_files_of_an_uninterrupted_one(
    keys, checkpoint, killed_after, make_run, make_step, make_evaluation, tmp_path
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    play(make_run(folder=whole), make_step, make_evaluation, 6, **keys).finish("finished")
    play(make_run(folder=parts), make_step, make_evaluation, killed_after, **keys)  # killed: never finished
    with (parts / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "rewa')
    (parts / "rollouts").mkdir(exist_ok=True)
    (parts / "rollouts" / "step_000001.jsonl.tmp").write_bytes(b"half")
    play(make_run(folder=parts, step=checkpoint), make_step, make_evaluation, 6, **keys).finish("finished")
    assert files_of(parts) == files_of(whole)


def test_a_repeated_evaluation_takes_the_place_of_the_first(make_run, make_evaluation):
    for accuracy in (0.25, 0.5):  # a run that died before its first checkpoint starts at 0 again
        logger = Jsonl(rollouts_every=1, rollouts_max=None)
        logger.start(make_run())
        logger.evaluation(make_evaluation(0, accuracy))
        logger.finish("interrupted")
    assert [line["accuracy"] for line in read_lines(make_run().folder / "eval.jsonl")] == [0.5]


def test_an_evaluation_at_the_checkpoint_survives_a_resume(make_run, make_step, make_evaluation):
    play(make_run(), make_step, make_evaluation, 4).finish("interrupted")
    Jsonl(rollouts_every=1, rollouts_max=None).start(make_run(step=2))
    assert [line["step"] for line in read_lines(make_run().folder / "eval.jsonl")] == [0, 2]


def test_a_resume_drops_what_lies_beyond_the_checkpoint_before_it_goes_on(make_run, make_step, make_evaluation):
    play(make_run(), make_step, make_evaluation, 5)
    Jsonl(rollouts_every=1, rollouts_max=None).start(make_run(step=3))
    folder = make_run().folder
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3]
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == [f"step_00000{k}.jsonl" for k in (1, 2, 3)]


def test_only_the_newest_rollout_files_are_kept(make_run, make_step, make_evaluation):
    play(make_run(), make_step, make_evaluation, 5, rollouts_max=2).finish("finished")
    names = sorted(path.name for path in (make_run().folder / "rollouts").iterdir())
    assert names == ["step_000004.jsonl", "step_000005.jsonl"]


def test_a_line_without_its_newline_counts_as_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_lines(path) == [{"step": 1}]


@pytest.mark.parametrize("nasty", ["\u2028", "\x85", "\u202e", "\ud800", "\x1b[2J", "\x00", "\n"])
def test_no_character_breaks_a_line_or_survives_unescaped(nasty):
    data = encode({"text": f"a{nasty}b 答"})
    assert data.count(b"\n") == 1
    assert len(data.decode("utf-8").splitlines()) == 1
    assert nasty not in data.decode("utf-8").rstrip("\n")
    assert json.loads(data)["text"] == f"a{nasty}b 答"
    assert "答".encode() in data


def test_a_failed_rollout_write_leaves_no_half_file(make_run, make_step):
    logger = Jsonl(rollouts_every=1, rollouts_max=None)
    logger.start(make_run())
    record = make_step(1)
    with pytest.raises(AttributeError):  # the second group is none, met after the first one is encoded
        logger.step(replace(record, groups=[*record.groups, None]))
    assert not list((make_run().folder / "rollouts").glob("*.jsonl"))
    assert (make_run().folder / "metrics.jsonl").read_bytes() == b""


def test_finish_before_start_and_twice_does_no_harm(make_run):
    logger = Jsonl(rollouts_every=1, rollouts_max=None)
    logger.finish("failed early")
    logger.start(make_run())
    logger.finish("finished")
    logger.finish("finished")
