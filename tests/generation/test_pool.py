"""Several engines behind the interface of one: failures of every kind change no completion."""

import re
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from pool_engines import BUCKET, ThreadLauncher
from run_processes import happens

from rlft.generation import pool as engine_pool, sending
from rlft.generation.engine import FreshnessCheck, StaleEngineError
from rlft.generation.pool import EngineError, EnginePool, _Failed
from rlft.loop.freshness import Freshness, StaleAdapterError
from rlft.system.process.worker import WorkerSpec
from rlft.types import Adapter, EnvironmentFailure, Image, Prompt, Sampling, Turn, UserError

PROMPTS = [Prompt(id=f"p{i}", messages=(), answer="", token_ids=(1, 2), metadata={"kept": i}) for i in range(7)]
SEEDS = [10 * i for i in range(7)]
SAMPLING = Sampling(max_tokens=4, temperature=1.0)


def adapter(version):
    return Adapter(version=version, weights={"a": torch.full((2, 2), float(version))}, config={"r": 2})


VERSION_3 = adapter(3)


def checked(pool, freshness, version, *read_back):
    """Publishes the version and has it checked; the trainer's scores are those of a healthy engine."""
    pool.load(adapter(version))
    trainer = SimpleNamespace(score=lambda sequences: [[-float(version)] for _ in sequences])
    return freshness.check(version, pool, trainer, *read_back)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def open_pool(tmp_path, notes):
    def opened(*engines, replacements=(), timeout_s=30.0, first=VERSION_3, **more):
        """With `first` loaded."""
        launcher = ThreadLauncher(tmp_path, replacements)
        specs = [WorkerSpec(name=f"engine-{i}", factory="-", arguments=faults) for i, faults in enumerate(engines)]
        settings = {"unit": lambda n, num_prompts: 2, "max_restarts": 3, "note": notes.append, **more}
        pool = EnginePool(launcher, specs, timeout_s=timeout_s, **settings)
        pool.test_launcher = launcher
        if first is not None:
            pool.load(first)
        return pool

    return opened


def texts(groups):
    return [[rollout.completion.text for rollout in group.rollouts] for group in groups]


def sampled(pool):
    return texts(pool.sample(PROMPTS, 2, SEEDS, SAMPLING))


EXPECTED = [[f"p{i} 3 {10 * i}", f"p{i} 3 {10 * i + 1}"] for i in range(7)]


@pytest.mark.parametrize("num_engines", [1, 2, 5])
def test_groups_come_in_the_order_of_their_prompts(num_engines, open_pool):
    delays = [1.0 if i == 0 < num_engines - 1 else 0.03 * (num_engines - i) for i in range(num_engines)]
    engines = [{"delay_s": delay_s} for delay_s in delays]  # the first one is the slowest
    pool, told = open_pool(*engines), list[list[list[str]]]()
    pool.finished = lambda groups: told.append(texts(groups))
    groups = pool.sample(PROMPTS, 2, SEEDS, SAMPLING)
    assert texts(groups) == EXPECTED
    assert sorted(told) == sorted(EXPECTED[start : start + 2] for start in (0, 2, 4, 6))
    assert (told[0] == EXPECTED[:2]) == (num_engines == 1), "a unit is told as it finishes, whoever is slower"
    assert [group.prompt for group in groups] == PROMPTS  # with their metadata, which stays here
    assert {rollout.policy_version for group in groups for rollout in group.rollouts} == {3}
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    assert {(c.mask, c.turns) for c in completions} == {((True,), (Turn(end=1, reward=0.5),))}


def test_engines_get_the_content_of_images_since_their_machine_may_not_have_the_files(open_pool, tmp_path):
    (tmp_path / "a.png").write_bytes(b"of a file")
    images = (
        Image(digest="0", path=str(tmp_path / "a.png")),
        Image(digest="1", data=b"of the data"),
        Image(digest="2", path=str(tmp_path / "gone.png")),  # the engine says that it cannot be read
    )
    prompt = Prompt(id="p0", messages=(), answer="", token_ids=(1, 2), images=images)
    pool = open_pool({})
    engine = pool.test_launcher.workers[0].held
    for sample in (pool.sample, pool.sample_each):
        sample([prompt], 1, [0], SAMPLING)
        [got] = engine.prompts
        assert [image.data for image in got.images] == [b"of a file", b"of the data", b""]
        assert [(image.digest, image.path) for image in got.images] == [(image.digest, image.path) for image in images]
        engine.prompts = ()


def test_every_engine_samples_all_prompts_where_each_is_compared(open_pool):
    pool = open_pool({}, {"faults": {0: "die"}}, {})
    sampled = pool.sample_each(PROMPTS, 2, SEEDS, SAMPLING)
    assert [texts(groups) for groups in sampled] == [EXPECTED] * 3
    assert pool.num_restarts == 1


def large(version):
    """Five numbers and a tensor of one: three buckets of two numbers each."""
    weights = {"a": torch.arange(5.0) + version, "b": torch.full((1,), float(version))}
    return Adapter(version=version, weights=weights, config={"r": 2})


def check_holds(worker, version):
    assert worker.held.version == version
    loaded, expected = worker.held.loaded.weights, large(version).weights
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(sending, "BUCKET", 8)


def test_a_large_version_is_sent_in_buckets_each_once_for_all_engines(open_pool, small_buckets):
    pool = open_pool({}, {}, {}, first=None)
    for version in (3, 4):
        pool.load(large(version))
        for worker in pool.test_launcher.workers:
            check_holds(worker, version)
    assert len(pool.test_launcher.shared) == 2 * 3
    [methods] = {tuple(worker.methods) for worker in pool.test_launcher.workers}
    assert methods == ("started", "load_part", "load_part", "load") * 2


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_that_dies_in_a_publish_is_replaced_and_gets_it_from_its_beginning(
    number, open_pool, small_buckets, notes
):
    pool = open_pool({}, {"faults": {BUCKET - number: "die"}}, first=large(3))
    [note] = notes
    assert note.startswith("engine-1 is replaced: engine-1 was killed by SIGKILL; its log is ")
    first, _, new = pool.test_launcher.workers
    check_holds(first, 3)
    check_holds(new, 3)
    assert first.methods.count("load") == 1, "the others go on"


def test_an_engine_that_joins_while_others_sample_gets_the_version_bucket_by_bucket(open_pool, small_buckets):
    pool = open_pool({"delay_s": 0.1}, {"faults": {0: "die"}}, first=large(3))
    assert sampled(pool) == EXPECTED
    pool.sleep()  # which waits until it has joined
    check_holds(pool.test_launcher.workers[2], 3)


def test_a_version_that_comes_before_the_last_one_has_arrived_takes_its_place(open_pool, small_buckets):
    """The new engine has one bucket of version 3 when version 4 is published."""
    pool = open_pool({}, {"faults": {0: "die"}}, first=large(3))
    slot = pool._slots[1]
    pool._replace(slot, _Failed("the test's"))
    pool._finish([pool._join(slot)], lambda work, answers: None)
    assert (slot.sent, slot.ready) == (1, False)
    pool.load(large(4))
    check_holds(pool.test_launcher.workers[2], 4)


def test_a_damaged_bucket_replaces_the_engine_before_the_next_one_is_sent(open_pool, small_buckets, notes):
    pool = open_pool({}, {"corrupt": True}, first=large(3))
    assert re.search(r"engine-1 is replaced: engine-1 has loaded version 3 with the sha256 \w{16} instead of", notes[0])
    assert pool.test_launcher.workers[1].methods == ["started", "load_part"]
    check_holds(pool.test_launcher.workers[2], 3)


@pytest.mark.parametrize(("fault", "said"), [
    ("die", "engine-1 was killed by SIGKILL"),
    ("raise", "engine-1 raised ValueError: no such token"),
    ("hang", "engine-1 has not answered for 0.4 s (sample; cluster.timeout)"),
    ("old version", "engine-1 has sampled from version 2 instead of 3"),
])  # fmt: skip
def test_an_engine_that_fails_is_replaced_and_no_completion_differs(fault, said, open_pool, notes):
    pool = open_pool({"delay_s": 0.05}, {"faults": {1: fault}}, timeout_s=0.4)
    check = FreshnessCheck(sequences=[[5, 6]], accept=lambda scores: None if scores == [[-3.0]] else "stale")
    pool.verify(check, now=True)
    assert sampled(pool) == EXPECTED
    assert pool.num_restarts == 1
    assert notes[0].startswith(f"engine-1 is replaced: {said}")
    new = pool.test_launcher.workers[2]
    assert new.name == "engine-1.2"
    pool.sleep()  # which waits until it has joined
    assert new.methods[:3] == ["started", "load", "score"]


def test_a_finished_group_forgives_failures_and_some_without_one_in_between_stop_the_run(open_pool):
    sometimes = {"faults": {1: "raise"}}  # one unit each, then a failure: four units need three replacements
    pool = open_pool(sometimes, replacements=[sometimes] * 5, max_restarts=1)
    assert sampled(pool) == EXPECTED
    assert pool.num_restarts == 3
    broken = {"faults": {0: "raise", 1: "raise"}}
    pool = open_pool(broken, replacements=[broken] * 5, max_restarts=2)
    expected = r"^cluster\.max_engine_restarts: 3 engine failures .* the last one: engine-0 raised ValueError: no such"
    with pytest.raises(EngineError, match=expected):
        pool.sample(PROMPTS, 2, SEEDS, SAMPLING)


def test_what_is_no_fault_of_the_engine_starts_none_again(open_pool, monkeypatch):
    pool, refused = open_pool({"faults": {0: "environment"}}), open_pool({}, first=None)
    with pytest.raises(EnvironmentFailure, match="repair its get_reward"):
        sampled(pool)
    mistake = UserError("generation.engine", "could not start", remedy="choose another one")
    monkeypatch.setattr(refused.test_launcher.workers[0].held, "started", Mock(side_effect=mistake))
    with pytest.raises(UserError, match=r"^generation\.engine: could not start"):
        refused.load(adapter(3))
    assert pool.num_restarts == refused.num_restarts == 0


def test_every_engine_is_checked_and_a_stale_one_is_replaced_once(open_pool, notes):
    pool, freshness = open_pool({}, {"stale": (3,)}, first=None), Freshness([[5, 6], [7, 8, 9]], 0.5, 1)
    assert [checked(pool, freshness, version) for version in (2, 3)] == [0.0, 0.0]
    assert [note.split(":")[0] for note in notes] == ["engine-1 is replaced"]
    assert "does not sample from policy version 3" in notes[0]
    assert pool.test_launcher.workers[2].held.version == 3
    again = open_pool({}, {"stale": (3,)}, replacements=[{"stale": (3,)}], first=None)
    with pytest.raises(StaleAdapterError, match=r"policy version 3: .*engine-1\.2.*stopped rather than train on stale"):
        checked(again, Freshness([[5, 6]], 0.5, 1), 3)


def test_every_engine_is_asked_what_it_holds_also_one_that_joins_later(open_pool, notes):
    """Log-probs of a stale engine differ by 1 here, which is allowed."""
    faults = {"faults": {0: "die"}}
    pool = open_pool(faults, {"stale": (3,)}, replacements=[{}, {"stale": (3,)}], first=None)
    freshness = Freshness([[5, 6]], 9.0, 1, notes.append)
    for version in (2, 3):
        checked(pool, freshness, version, adapter(version))
    [note] = notes
    assert note.startswith("engine-1 is replaced: freshness: the engine does not hold policy version 3: 1 of the 1 ")
    assert note.endswith("; it still holds version 2 (freshness.read_back=false compares log-probs alone)")

    def has_joined():
        assert sampled(pool) == EXPECTED
        return len(notes) > 2

    assert happens(has_joined, within_s=60.0), "the other engine alone may sample for a while"
    assert notes[1].startswith("engine-0 is replaced: engine-0 was killed")
    assert notes[2].startswith("engine-0 is replaced: freshness: the engine does not hold policy version 3")


def test_an_engine_that_joins_later_is_checked_also_where_no_check_is_due(open_pool):
    pool = open_pool({"faults": {0: "die"}}, replacements=[{"stale": (3,)}, {"stale": (3,)}], first=None)
    freshness = Freshness([[5, 6]], 0.5, 100)
    assert [checked(pool, freshness, version) for version in (2, 3)] == [0.0, None]
    with pytest.raises(StaleEngineError, match="does not sample from policy version 3"):
        pool.sample(PROMPTS, 2, SEEDS, SAMPLING)


def test_an_engine_that_never_starts_is_named_with_the_end_of_its_log(open_pool, monkeypatch):
    monkeypatch.setattr(engine_pool, "START_S", 0.3)
    pool = open_pool({}, timeout_s=0.1, max_restarts=0, first=None)
    monkeypatch.setattr(pool.test_launcher.workers[0].held, "started", lambda: time.sleep(1.0))
    begun = time.monotonic()
    said = r"(?s)engine-0 has not answered for 0\.4 s \(start and load; .*engine-0\.log; its last lines:\nengine-0 has"
    with pytest.raises(EngineError, match=said):
        pool.load(adapter(3))
    assert time.monotonic() - begun > 0.3


def test_an_engine_that_fails_in_the_rehearsal_is_replaced_and_all_are_closed_once(open_pool):
    pool = open_pool({"faults": {-1: "raise"}}, {})
    pool.rehearse([[1, 2]], 2, 4)
    workers = pool.test_launcher.workers
    assert [worker.methods.count("rehearse") for worker in workers] == [1, 1, 1]
    pool.close()
    pool.close()
    assert [worker.methods.count("close") for worker in workers if worker.name != "engine-0"] == [1, 1]
    assert all(worker.killed.is_set() for worker in workers)


def test_an_engine_that_does_not_close_is_killed(open_pool, monkeypatch):
    monkeypatch.setattr(engine_pool, "CLOSE_S", 0.1)
    pool = open_pool({"delay_s": 5.0})
    pool.test_launcher.workers[0].call("sample", PROMPTS, 2, SEEDS, SAMPLING)
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 4.0
    assert pool.test_launcher.workers[0].killed.is_set()
