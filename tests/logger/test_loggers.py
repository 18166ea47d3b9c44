"""What a run leaves behind, which a resumed run leaves the same byte for byte, and that trackers stop nothing."""

import signal
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_one_test import each
from run_folders import contents

from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.config.schema import RolloutsConfig
from rlft.logger.loggers import Jsonl, Loggers, Rollouts, Tracker, loggers_of, own_loggers
from rlft.runs import lines as run_lines
from rlft.runs.lines import completion_of, evaluation_line, read_lines
from rlft.system import files
from rlft.types import Branch, ToolCall, Turn, UserError

CUTS = [(0, 0), (0, 3), (2, 2), (2, 5), (4, 6)]
"""(step of the checkpoint that a run of six steps is resumed from, steps it had done when it was killed)."""


# -- several loggers ---------------------------------------------------------------------------------------------------
class Diary:
    """Writes down its calls in a list shared by all."""

    def __init__(self, name, calls, fails_in=()):
        self.name, self.calls, self.fails_in = name, calls, fails_in

    def __getattr__(self, method):
        def call(*arguments):
            self.calls.append((self.name, method, *arguments))
            if method in self.fails_in:
                raise RuntimeError(f"{self.name} fails")

        return call


def test_calls_reach_every_logger_in_order_and_the_end_once():
    calls, said = [], []
    loggers = Loggers([Diary("a", calls), Diary("b", calls)], said.append)
    loggers.note("early")
    assert (said, calls) == (["early"], [])
    methods = [("start", "run"), ("stage", "sample"), ("step", "record"), ("evaluation", "evaluation")]
    methods += [("note", "text"), ("finish", "finished")]
    for method, argument in (*methods, methods[-1]):
        getattr(loggers, method)(argument)
    assert calls == [(name, *call) for call in methods for name in "ab"]


@pytest.mark.parametrize(("fails_in", "name"), [("finish", "a"), ("start", "b")])
def test_what_was_begun_is_closed_even_if_one_raises(fails_in, name):
    calls = []
    loggers = Loggers([Diary(other, calls, fails_in=[fails_in] if other == name else ()) for other in "abc"], print)
    for method in ("start", "finish"):
        with pytest.raises(RuntimeError, match=f"{name} fails") if method == fails_in else nullcontext():
            getattr(loggers, method)("x")
    closed = [name for name, method, _ in calls if method == "finish"]
    assert closed == (["a", "b", "c"] if fails_in == "finish" else ["a", "b"])


# -- a run's own loggers, and its trackers ----------------------------------------------------------------------------
def test_every_run_writes_its_files_and_only_the_console_can_be_left_out():
    names = [
        [type(logger).__name__ for logger in own_loggers(build(compose(words)))] for words in ([], ["console=null"])
    ]
    assert names == [["Rollouts", "Jsonl", "Console"], ["Rollouts", "Jsonl"]]
    assert [type(logger) for logger in own_loggers(SimpleNamespace())] == [Jsonl], "of a command without these sections"


def test_sections_that_are_equal_are_one_tracker_whatever_they_are_called():
    named = {"mine": [1], "other": [2], "again": [1]}
    sections = {name: {"_target_": f"{__name__}.Diary", "name": "a", "calls": calls} for name, calls in named.items()}
    assert [made.logger.calls for made in loggers_of(sections)] == [[1], [2]]


@each("fails_in", ["start", "stage", "step", "evaluation", "note", "finish"])
def test_a_tracker_that_fails_is_told_of_once_closed_and_stops_nothing(fails_in, capsys):
    calls = []
    tracker = Tracker("logger.mine", Diary("a", calls, fails_in=(fails_in, "finish")))
    for method in ("start", "stage", "step", "evaluation", "note", "stage", "step", "evaluation", "note", "finish"):
        getattr(tracker, method)("x")
    said = f"logger.mine: {fails_in} failed (RuntimeError: a fails); the run continues without it\n"
    assert capsys.readouterr().err == said
    methods = [method for _, method, _ in calls]
    assert (methods.count(fails_in), methods[-2:]) == (1, [fails_in, "finish"]) or fails_in == "finish"


def test_what_is_no_error_of_a_tracker_ends_the_run():
    tracker = Tracker("logger.mine", Diary("a", []))
    tracker.logger.step = lambda record: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        tracker.step("record")


@each("name", ["rlft.logger.loggers:Jsonl", "rlft.logger.loggers:Rollouts", "rlft.logger.console:Console"])
def test_a_runs_own_logger_is_no_tracker_by_whatever_name_it_is_imported(tmp_path, name):
    module, _, own = name.partition(":")
    file = tmp_path / f"{own}.py"
    file.write_text(f"from {module} import {own} as Mine\nclass Derived(Mine): ...\n")
    with pytest.raises(UserError, match=r"^logger\.mine\._target_: every run has it already"):
        loggers_of({"mine": {"_target_": f"{file}:Mine"}})
    if own == "Jsonl":
        assert len(loggers_of({"mine": {"_target_": f"{file}:Derived"}})) == 1


# -- metrics and evaluations -------------------------------------------------------------------------------------------
@pytest.fixture
def play(make_step, make_evaluation):
    """Steps run.step + 1 .. last as the loop logs them, an evaluation before the first and after every second step."""

    def play(run, last):
        logger = Jsonl()
        logger.start(run)
        if run.step == 0:
            logger.evaluation(make_evaluation(0))
        for step in range(run.step + 1, last + 1):
            logger.step(make_step(step))
            if step % 2 == 0:
                logger.evaluation(make_evaluation(step))
        return logger

    return play


def steps_of(file):
    return [line["step"] for line in read_lines(file)]


def test_a_step_leaves_one_line_of_metrics_in_name_order_without_nan_or_infinity(make_run, make_step):
    logger = Jsonl()
    logger.finish("failed early")  # does no harm before the start
    logger.start(make_run())
    logger.step(make_step(1, b=2.0, a=1, c=float("nan"), loss__total=float("inf")))
    text = (make_run().folder / "metrics.jsonl").read_text()  # before finish: the line is flushed at once
    assert text == '{"step": 1, "a": 1, "b": 2.0, "c": null, "loss/total": null}\n'


def test_an_evaluation_line_holds_examples_with_question_answer_and_score(make_run, make_evaluation):
    logger = Jsonl()
    for accuracy in (0.25, 0.5):  # a run that died before its first checkpoint starts at 0 again, in the same place
        logger.start(make_run())
        logger.evaluation(make_evaluation(0, accuracy, ("4",)))
        logger.finish("interrupted")
        logger.finish("interrupted")
    example = {
        "prompt_id": "1+2+0*0", "question": "What is 1+2+0*0?", "answer": "3", "completion": "4", "score": 0.0,
        "finish_reason": "stop",
    }  # fmt: skip
    told = {"step": 0, "accuracy": 0.5, "accuracy_se": 0.01, "eval/exact_match": 0.5, "eval/pass@4": 0.75}
    assert read_lines(make_run().folder / "eval.jsonl") == [{**told, "examples": [example]}]
    evaluation = make_evaluation(0, 0.5, ("4",))
    turn = Turn(end=1, text="4", answer="wrong", reward=0.5)
    rollout = replace(evaluation.examples[0], completion=replace(evaluation.examples[0].completion, turns=(turn,)))
    [with_turns] = evaluation_line(replace(evaluation, examples=(rollout,)))["examples"]
    turns = [{"end": 1, "text": "4", "answer": "wrong", "reward": 0.5, "calls": ()}]
    assert with_turns == {**example, "turns": turns}


@pytest.mark.parametrize(("checkpoint", "killed_after"), CUTS)
def test_an_interrupted_run_leaves_the_files_of_an_uninterrupted_one(
    checkpoint, killed_after, make_run, play, tmp_path
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    play(make_run(folder=whole), 6).finish("finished")
    play(make_run(folder=parts), killed_after)  # killed: never finished
    with (parts / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "rewa')
    begun = play(make_run(folder=parts, step=checkpoint), checkpoint)
    assert steps_of(parts / "metrics.jsonl") == [*range(1, checkpoint + 1)], "what lies beyond is dropped at once"
    begun.finish("killed")
    play(make_run(folder=parts, step=checkpoint), 6).finish("finished")
    assert contents(parts) == contents(whole)


def damage(file, number):
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b"}", b"\xff")
    file.write_bytes(b"".join(lines))


def test_a_resume_keeps_the_lines_behind_a_damaged_one_and_says_which_it_was(make_run, play, capsys):
    folder = make_run().folder
    play(make_run(), 6).finish("killed")
    damage(folder / "metrics.jsonl", 3)
    damage(folder / "eval.jsonl", 2)  # evaluations after 0, 2, 4 and 6 steps
    play(make_run(step=6), 8).finish("finished")
    assert capsys.readouterr().err.splitlines() == [
        f"{folder}/metrics.jsonl: line 3 (step 3) is damaged and left out",
        f"{folder}/eval.jsonl: line 2 (step 2) is damaged and left out",
    ]
    assert steps_of(folder / "metrics.jsonl") == [1, 2, 4, 5, 6, 7, 8]
    assert steps_of(folder / "eval.jsonl") == [0, 4, 6, 8]


@pytest.mark.parametrize(("number", "step", "told"), [
    (6, 6, ["line 6 (step 6) is damaged and left out", "there is no line of step 6"]),
    (6, 5, []),  # is done again
    (4, 2, []),
    (1, 2, ["line 1 (step 1) is damaged and left out"]),
    (None, 9, ["there is no line of steps 7 to 9"]),  # which a power cut took
])  # fmt: skip
def test_what_is_done_again_was_not_lost(number, step, told, make_run, play, capsys):
    folder = make_run().folder
    play(make_run(), 6).finish("killed")
    if number:
        damage(folder / "metrics.jsonl", number)
    play(make_run(step=step), 6).finish("finished")
    assert capsys.readouterr().err.splitlines() == [f"{folder}/metrics.jsonl: {line}" for line in told]


def test_what_a_checkpoint_comes_after_is_on_disk_before_it_and_no_file_is_read_again(make_run, play, monkeypatch):
    flushed, read = [], []
    before = run_lines.open_after
    monkeypatch.setattr(run_lines, "open_after", lambda path, *rest: read.append(path.name) or before(path, *rest))
    monkeypatch.setattr("rlft.logger.loggers.flush", flushed.append)
    logger = play(make_run(), 8)
    logger.stage("evaluate")
    assert flushed == []
    logger.stage("checkpoint")
    assert [path.name for path in flushed] == ["metrics.jsonl", "eval.jsonl", "alarms.jsonl"]
    # The three files at the start, and the evaluation before the first step, which a run that starts again repeats.
    assert read == ["metrics.jsonl", "eval.jsonl", "alarms.jsonl", "eval.jsonl"]


# -- rollouts ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def roll(make_step):
    """Steps run.step + 1 .. last as the loop hands them on."""

    def roll(run, last, every=1, keep=None, make=make_step):
        rollouts = Rollouts(RolloutsConfig(every=every, keep=keep))
        rollouts.start(run)
        for step in range(run.step + 1, last + 1):
            rollouts.step(make(step))
        return rollouts

    return roll


def names(folder):
    return [path.name for path in sorted((folder / "rollouts").glob("*"))]


def named(*steps):
    return [f"step_{step:06d}.jsonl" for step in steps]


def test_a_rollout_line_holds_everything_about_a_completion(make_run, roll):
    roll(make_run(step=2), 3)
    lines = read_lines(make_run().folder / "rollouts" / "step_000003.jsonl")
    assert lines[0] == {
        "step": 3, "prompt_id": "1+2", "index": 0, "prompt": [{"role": "user", "content": "What is 1+2?"}],
        "answer": "3", "completion": "2", "token_ids": [5, 6], "logprobs": [-0.5, -0.25],
        "rewards": {"custom": 0.25, "exact_match": 0.0}, "reward": 0.0, "advantage": -1.0, "policy_version": 2,
        "finish_reason": "stop",
    }  # fmt: skip
    assert [lines[1][name] for name in ("index", "completion", "reward", "advantage")] == [1, "3", 1.0, 1.0]


def test_masks_turns_and_branches_are_written_and_read_back(make_run, make_step, roll):
    step = make_step(3)
    call = ToolCall(name="add", arguments='{"a": "\u2028"}', answer="\x00 <|im_end|>", failed=True)
    turns = (Turn(end=1, text="1+1", answer="2", calls=(call,)), Turn(end=2, reward=0.5))
    first, second = step.groups[0].rollouts
    spoken = replace(first.completion, token_ids=(5, 6, 7), logprobs=(-0.5, 0.0, -1.0), mask=(True, False, True))
    spoken = replace(spoken, turns=turns, branches=(Branch(start=2, after=-1),))
    rollouts = (replace(first, completion=spoken), second)
    roll(make_run(step=2), 3, make=lambda _: replace(step, groups=[replace(step.groups[0], rollouts=rollouts)]))
    lines = read_lines(make_run().folder / "rollouts" / "step_000003.jsonl")
    assert lines[0]["mask"] == [1, 0, 1]
    assert lines[0]["turns"][1] == {"end": 2, "text": "", "answer": "", "reward": 0.5, "calls": []}
    assert lines[0]["branches"] == [{"start": 2, "after": -1}]
    assert not {"mask", "turns", "branches"} & lines[1].keys()
    assert [completion_of(line) for line in lines] == [r.completion for r in rollouts]


@each(
    ("every", "keep", "steps"),
    [(1, None, [1, 2, 3, 4]), (2, None, [2, 4]), (3, None, [3]), (0, None, []), (1, 2, [3, 4])],
)
def test_rollouts_are_written_every_n_th_step_and_the_newest_stay(every, keep, steps, make_run, roll, tmp_path):
    folder = tmp_path / f"{every} {keep}"
    config = roll(make_run(folder=folder), 4, every, keep).config
    assert names(folder) == named(*steps)
    assert config.most_files(4) == len(steps) + bool(keep), "of a limited number the newest, before the oldest goes"
    assert keep or [step for step in range(1, 5) if config.writes(step)] == steps


@pytest.mark.parametrize("keys", [{}, {"keep": 2}, {"every": 2}], ids=str)
def test_interrupted_rollouts_are_those_of_an_uninterrupted_run(keys, make_run, roll, tmp_path):
    roll(make_run(folder=tmp_path / "whole"), 6, **keys)
    for number, (checkpoint, killed_after) in enumerate(CUTS):
        parts = tmp_path / str(number)
        roll(make_run(folder=parts), killed_after, **keys)
        (parts / "rollouts").mkdir(parents=True, exist_ok=True)
        (parts / "rollouts" / "step_000001.jsonl.tmp").write_bytes(b"half")
        roll(make_run(folder=parts, step=checkpoint), checkpoint, **keys)
        assert {*names(parts)} <= {*named(*range(checkpoint + 1))}, "what lies beyond the checkpoint goes at once"
        roll(make_run(folder=parts, step=checkpoint), 6, **keys)
        assert contents(parts) == contents(tmp_path / "whole")


def test_rollouts_are_written_in_pieces_and_a_failed_write_leaves_no_half_file(make_run, make_step, roll, monkeypatch):
    record = make_step(1)
    rollouts = roll(make_run(), 1)
    file = make_run().folder / "rollouts" / "step_000001.jsonl"
    whole = file.read_bytes()
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: pytest.fail("written at once"))
    rollouts.step(record)
    assert file.read_bytes() == whole
    with pytest.raises(AttributeError):  # the second group is none, met after the first one is encoded
        rollouts.step(replace(make_step(2), groups=[*record.groups, None]))
    rollouts.step(replace(make_step(3), groups=[]))
    assert names(make_run().folder) == named(1), "nor does a step without completions leave a file"


def test_what_is_held_of_large_rollouts_is_a_piece(tmp_path):
    lines = (b"x" * 99_999 + b"\n" for _ in range(400))  # 40 MB
    tracemalloc.start()
    files.write_atomically(tmp_path / "large", lines, durable=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "large").stat().st_size == 40_000_000
    # The first two pieces, the second of which says that there is more, and one as parts and joined.
    assert peak < 4 * (files.PIECE_BYTES + 200_000) < 20_000_000
