"""trackio, read back from its own database."""

import math

import pytest

from rlft.logger.trackio import Trackio


@pytest.fixture(scope="module", autouse=True)
def storage(trackio_folder):
    """Its storage, in a folder of the tests'."""
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    assert trackio_folder == utils.TRACKIO_DIR, "it was imported before"
    return SQLiteStorage


@pytest.fixture
def start(request):
    """Opens a logger of a project that is this test's."""

    def start(run):
        logger = Trackio(project=request.node.name, seconds=300.0)
        logger.start(run)
        return logger

    return start


@pytest.fixture
def runs(request):
    """The test's runs as trackio's own interface gives them."""
    import trackio

    return lambda: list(trackio.Api().runs(request.node.name))


def points(storage, run, name):
    return [(row["step"], row[name]) for row in storage.get_logs(run.project, run.name) if name in row]


def test_steps_evaluations_and_the_config_are_read_back(
    storage, start, runs, make_run, make_step, make_evaluation, capfd
):
    logger = start(make_run())
    logger.evaluation(make_evaluation(0))
    logger.step(make_step(1, a=0.5, b=float("nan"), c=float("inf")))
    logger.step(make_step(2, a=0.25))
    logger.finish("finished")
    (entry,) = runs()
    assert entry.name == (make_run().folder / "trackio_name.txt").read_text().strip()
    assert points(storage, entry, "a") == [(1, 0.5), (2, 0.25)]
    assert math.isnan(points(storage, entry, "b")[0][1])
    assert points(storage, entry, "c") == [(1, math.inf)]
    assert points(storage, entry, "eval/pass@4") == [(0, 0.75)]
    assert points(storage, entry, "eval/accuracy") == [(0, 0.5)]
    assert entry.config["seed"] == 0
    told = f"trackio: run {entry.name}; look at it with `trackio show --project {entry.project}`\n"
    assert capfd.readouterr() == ("", told)


def test_a_resumed_run_goes_on_with_each_step_once(storage, start, runs, make_run, make_step, make_evaluation):
    logger = start(make_run())
    logger.evaluation(make_evaluation(0))
    for step in (1, 2, 3):
        logger.step(make_step(step, a=step))
    logger.finish("interrupted")
    logger = start(make_run(step=2))
    for step in (3, 4):
        logger.step(make_step(step, a=step, late=1.0))
        logger.evaluation(make_evaluation(step))
    logger.finish("finished")
    (entry,) = runs()
    assert points(storage, entry, "a") == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert points(storage, entry, "late") == [(3, 1), (4, 1)]
    assert [step for step, _ in points(storage, entry, "eval/accuracy")] == [0, 3, 4]


def test_jobs_of_a_sweep_have_a_run_each_and_two_at_a_time_do_not_mix(
    storage, start, runs, make_run, make_step, tmp_path
):
    both = [start(make_run(folder=tmp_path / job)) for job in ("0", "1")]
    for i, logger in enumerate(both):
        logger.step(make_step(1, a=i))
    for logger in both:
        logger.finish("finished")
    assert sorted(points(storage, run, "a") for run in runs()) == [[(1, 0)], [(1, 1)]]


@pytest.mark.filterwarnings("ignore:trackio failed to flush")
def test_a_database_that_is_gone_stops_nothing(storage, start, make_run, make_step, request):
    logger = start(make_run())
    path = storage.get_project_db_path(request.node.name)
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)  # where the database is to be
    for step in (1, 2):
        logger.step(make_step(step))
    logger.finish("finished")
    assert path.is_dir()


def test_a_project_that_trackio_refuses_is_told_and_stops_nothing(make_run, make_step, capsys):
    logger = Trackio(project="registry-mine", seconds=300.0)
    logger.start(make_run())
    logger.step(make_step(1))
    logger.finish("finished")
    assert capsys.readouterr().err.startswith("trackio: could not start (ValueError: ")
