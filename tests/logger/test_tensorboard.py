"""TensorBoard, read back by its own reader."""

import math
import resource
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer import event_file_writer

from rlft.logger.tensorboard import Tensorboard


@pytest.fixture(autouse=True)
def first_files(monkeypatch):
    """Readers order files by name: the tenth of one process and second would come before the ninth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def read(folder):
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return reader


def points(reader, name):
    return [(event.step, event.value) for event in reader.Scalars(name)]


def start(run):
    logger = Tensorboard(flush_seconds=60)
    logger.start(run)
    return logger


def test_steps_and_evaluations_are_read_back(make_run, make_step, make_evaluation, capfd):
    logger = start(make_run())
    logger.evaluation(make_evaluation(0))
    logger.step(make_step(1, a=0.5, b=float("nan"), c=float("inf")))
    logger.step(make_step(2, a=0.25))
    logger.finish("finished")
    reader = read(make_run().folder)
    assert points(reader, "a") == [(1, 0.5), (2, 0.25)]
    assert math.isnan(points(reader, "b")[0][1])
    assert points(reader, "c") == [(1, math.inf)]
    assert points(reader, "eval/pass@4") == [(0, 0.75)]
    assert points(reader, "eval/accuracy") == [(0, 0.5)]
    said = metadata.parse_session_start_info_plugin_data(
        reader.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    )
    assert said.hparams["seed"].number_value == 0  # the config, as make_run has it
    told = f"tensorboard: look at it with `tensorboard --logdir {make_run().folder}/tensorboard`\n"
    assert capfd.readouterr() == ("", told)


@pytest.mark.parametrize(("step", "last"), [(2, 3), (0, 3), (2, 2)])
def test_a_resumed_run_has_each_step_once_with_the_later_numbers(step, last, make_run, make_step, make_evaluation):
    logger = start(make_run())
    logger.evaluation(make_evaluation(0, 0.125))
    for k in (1, 2, 3):
        logger.step(make_step(k, a=k))
    logger.stage("checkpoint")  # and is killed: never finished
    logger = start(make_run(step=step))
    if step == 0:
        logger.evaluation(make_evaluation(0, 0.25))
    for k in range(step + 1, last + 1):
        logger.step(make_step(k, a=10 * k))
    logger.finish("finished")
    reader = read(make_run().folder)
    assert points(reader, "a") == [(k, k if k <= step else 10 * k) for k in range(1, last + 1)]
    assert points(reader, "eval/accuracy") == [(0, 0.25 if step == 0 else 0.125)]


def test_what_a_checkpoint_comes_after_is_in_the_file(make_run, make_step):
    logger = start(make_run())
    logger.step(make_step(1, a=1.0))
    logger.stage("checkpoint")
    assert points(read(make_run().folder), "a") == [(1, 1.0)]
    logger.finish("finished")


def test_a_file_that_cannot_grow_stops_nothing(make_run, make_step, capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # of the library's own thread
    logger = start(make_run())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    logger.step(make_step(1, a=1.0))
    logger.stage("checkpoint")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))  # the signal is ignored by Python: EFBIG
    try:
        for step in (2, 3, 4):
            logger.step(make_step(step, a=1.0))
            logger.stage("checkpoint")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.finish("finished")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tensorboard: stopped")]
    assert len(told) == 1
    assert "File too large); training goes on. What to do: check that tensorboard/" in told[0]
    assert points(read(make_run().folder), "a") == [(1, 1.0)]
