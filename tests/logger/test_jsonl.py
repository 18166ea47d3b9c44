"""What a run leaves behind, and that a resumed run leaves the same bytes."""

from dataclasses import replace

import pytest

from rlft.logger.loggers import Jsonl
from rlft.runs import lines
from rlft.runs.lines import evaluation_line, read_lines
from rlft.types import Turn


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def play(run, make_step, make_evaluation, last):
    """Steps run.step + 1 .. last as the loop logs them, an evaluation before the first and after every second step."""
    logger = Jsonl()
    logger.start(run)
    if run.step == 0:
        logger.evaluation(make_evaluation(0))
    for step in range(run.step + 1, last + 1):
        logger.step(make_step(step))
        if step % 2 == 0:
            logger.evaluation(make_evaluation(step))
    return logger


def test_a_step_leaves_one_line_of_metrics_in_name_order(make_run, make_step):
    logger = Jsonl()
    logger.start(make_run())
    logger.step(make_step(1, b=2.0, a=1))
    text = (make_run().folder / "metrics.jsonl").read_text()  # before finish: the line is flushed at once
    assert text == '{"step": 1, "a": 1, "b": 2.0}\n'


def test_nan_and_infinity_become_null(make_run, make_step):
    logger = Jsonl()
    logger.start(make_run())
    logger.step(make_step(1, loss__total=float("nan"), policy__grad_norm=float("inf")))
    assert read_lines(make_run().folder / "metrics.jsonl") == [
        {"step": 1, "loss/total": None, "policy/grad_norm": None}
    ]


def test_an_evaluation_line_holds_examples_with_question_answer_and_score(make_run, make_evaluation):
    logger = Jsonl()
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


def test_examples_of_an_evaluation_have_their_turns(make_run, make_evaluation):
    evaluation = make_evaluation(0, 0.5, ("4",))
    turn = Turn(end=1, text="4", answer="wrong", reward=0.5)
    rollout = replace(evaluation.examples[0], completion=replace(evaluation.examples[0].completion, turns=(turn,)))
    [example] = evaluation_line(replace(evaluation, examples=(rollout,)))["examples"]
    assert example["turns"] == [{"end": 1, "text": "4", "answer": "wrong", "reward": 0.5, "calls": ()}]


@pytest.mark.parametrize(("checkpoint", "killed_after"), [(0, 0), (0, 3), (2, 2), (2, 5), (4, 6)])
def test_an_interrupted_run_leaves_the_files_of_an_uninterrupted_one(
    checkpoint, killed_after, make_run, make_step, make_evaluation, tmp_path
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    play(make_run(folder=whole), make_step, make_evaluation, 6).finish("finished")
    play(make_run(folder=parts), make_step, make_evaluation, killed_after)  # killed: never finished
    with (parts / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "rewa')
    play(make_run(folder=parts, step=checkpoint), make_step, make_evaluation, 6).finish("finished")
    assert files_of(parts) == files_of(whole)


def test_a_repeated_evaluation_takes_the_place_of_the_first(make_run, make_evaluation):
    for accuracy in (0.25, 0.5):  # a run that died before its first checkpoint starts at 0 again
        logger = Jsonl()
        logger.start(make_run())
        logger.evaluation(make_evaluation(0, accuracy))
        logger.finish("interrupted")
    assert [line["accuracy"] for line in read_lines(make_run().folder / "eval.jsonl")] == [0.5]


def test_a_resume_drops_what_lies_beyond_the_checkpoint_before_it_goes_on(make_run, make_step, make_evaluation):
    play(make_run(), make_step, make_evaluation, 5)
    Jsonl().start(make_run(step=3))
    folder = make_run().folder
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3]


def test_finish_before_start_and_twice_does_no_harm(make_run):
    logger = Jsonl()
    logger.finish("failed early")
    logger.start(make_run())
    logger.finish("finished")
    logger.finish("finished")


def damage(file, number, old=b"}", new=b"\xff"):
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(old, new)
    file.write_bytes(b"".join(lines))


def test_a_resume_keeps_the_lines_behind_a_damaged_one_and_says_which_it_was(
    make_run, make_step, make_evaluation, capsys
):
    folder = make_run().folder
    play(make_run(), make_step, make_evaluation, 6).finish("killed")
    damage(folder / "metrics.jsonl", 3)
    damage(folder / "eval.jsonl", 2)  # evaluations after 0, 2, 4 and 6 steps
    play(replace(make_run(), step=6), make_step, make_evaluation, 8).finish("finished")
    assert capsys.readouterr().err.splitlines() == [
        f"{folder}/metrics.jsonl: line 3 (step 3) is damaged and left out",
        f"{folder}/eval.jsonl: line 2 (step 2) is damaged and left out",
    ]
    for name, steps in (("metrics.jsonl", [1, 2, 4, 5, 6, 7, 8]), ("eval.jsonl", [0, 4, 6, 8])):
        assert [line["step"] for line in read_lines(folder / name)] == steps


@pytest.mark.parametrize(
    ("number", "step", "told"),
    [
        (6, 6, ["line 6 (step 6) is damaged and left out", "there is no line of step 6"]),
        (6, 5, []),  # is done again
        (4, 2, []),
        (1, 2, ["line 1 (step 1) is damaged and left out"]),
    ],
)
def test_what_is_done_again_was_not_lost(number, step, told, make_run, make_step, make_evaluation, capsys):
    folder = make_run().folder
    play(make_run(), make_step, make_evaluation, 6).finish("killed")
    damage(folder / "metrics.jsonl", number)
    play(replace(make_run(), step=step), make_step, make_evaluation, 6).finish("finished")
    assert capsys.readouterr().err.splitlines() == [f"{folder}/metrics.jsonl: {line}" for line in told]


def test_lines_that_a_power_cut_took_are_missed(make_run, make_step, make_evaluation, capsys):
    folder = make_run().folder
    play(make_run(), make_step, make_evaluation, 3).finish("killed")
    play(replace(make_run(), step=6), make_step, make_evaluation, 7).finish("finished")
    assert capsys.readouterr().err == f"{folder}/metrics.jsonl: there is no line of steps 4 to 6\n"


def test_what_a_checkpoint_comes_after_is_on_disk_before_it(make_run, make_step, make_evaluation, monkeypatch):
    logger = play(make_run(), make_step, make_evaluation, 1)
    flushed = []
    monkeypatch.setattr("rlft.logger.loggers.flush", flushed.append)
    logger.stage("evaluate")
    assert flushed == []
    logger.stage("checkpoint")
    assert [path.name for path in flushed] == ["metrics.jsonl", "eval.jsonl", "alarms.jsonl"]


# -- load --------------------------------------------------------------------------------------------------------------
def test_evaluations_of_later_steps_do_not_read_the_file_again(make_run, make_step, make_evaluation, monkeypatch):
    read = []
    before = lines.open_after
    monkeypatch.setattr(lines, "open_after", lambda path, *rest: read.append(path.name) or before(path, *rest))
    play(make_run(), make_step, make_evaluation, 8).finish("finished")
    # The three files at the start, and the evaluation before the first step, which a run that starts again repeats.
    assert read == ["metrics.jsonl", "eval.jsonl", "alarms.jsonl", "eval.jsonl"]
