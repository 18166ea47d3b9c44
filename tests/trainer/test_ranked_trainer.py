"""Ranks that share the lanes of a trainer: the same bits however many there are, and whichever of them dies."""

from __future__ import annotations

import os
import re
import signal
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from slow_cases import slow, slow_but
from torch import Tensor
from warm_python import WarmProcesses

import rlft
from rlft.loop.driver import deterministic_on_cpu
from rlft.loop.workers import opened_trainer
from rlft.model.packing import prompt_lengths
from rlft.model.roles import Roles
from rlft.system.process.launcher import ProcessWorker
from rlft.system.process.worker import WorkerError, WorkerSpec
from rlft.trainer import ranked_trainer
from rlft.trainer.local import LocalTrainer
from rlft.trainer.ranked_trainer import RankedTrainer, RankError
from rlft.trainer.ranks import Exchange, LaneShare
from rlft.types import Rollouts, Scores, UserError

LANES = 4
LANES_OF_ALL_WEIGHTS = 6
COMMON = (
    "model.device=cpu", "prompts_per_step=4", "group_size=3", "generation.max_tokens=9", "trainer.lr=0.01",
    "lora.rank=2", "lora.dropout=0.1", "steps=3", "token_budget=512",
)  # fmt: skip
CASES = {
    "grpo, a reference by ema, epochs and minibatches": (
        "grpo",
        ("algorithm.kl_coef=0.1", "snapshot.reference=ema", "snapshot.ema_decay=0.5", "epochs=2", "minibatches=2"),
    ),
    "gspo, a copied reference, old copied": (
        "gspo",
        ("algorithm=gspo", "algorithm.kl_coef=0.1", "snapshot.reference=copy", "snapshot.refresh_every=2",
         "snapshot.old=copy"),
    ),
    "ppo, a critic with an adapter": (
        "ppo", ("algorithm=ppo", "critic.kind=adapter", "critic.warmup_steps=1", "minibatches=2"),
    ),
    "ppo, a critic that shares the policy's": ("ppo", ("algorithm=ppo", "critic.kind=shared", "epochs=2")),
    "ppo with pretraining text": ("ppo_ptx", ("algorithm=ppo_ptx", "critic.kind=adapter", "minibatches=2")),
    "opd, the base with a hint": (
        "opd", ("algorithm=opd", "snapshot.teacher=base", "snapshot.teacher_hint=x", "epochs=2", "minibatches=2"),
    ),
    "opd, a separate model with a hint in the loss": (
        "opd", ("algorithm=opd", "snapshot.teacher=embedded:tiny-student", "snapshot.teacher_hint=x",
                "algorithm.teacher_in=loss", "algorithm.top_k=4", "minibatches=2"),
    ),
}  # fmt: skip
AGAIN = "rlft resume some/run"
OF_ALL_WEIGHTS = {
    "all weights, grpo, a reference by ema, old copied": (
        "grpo", ("algorithm.kl_coef=0.1", "snapshot.reference=ema", "snapshot.ema_decay=0.5", "snapshot.old=copy",
                 "minibatches=2"),
    ),
    "all weights, ppo, a critic that begins": (
        "ppo", ("algorithm=ppo", "critic.kind=shared", "critic.warmup_steps=1", "minibatches=2"),
    ),
    "all weights, muon": ("grpo", ("trainer.optimizer=muon", "epochs=2")),
}  # fmt: skip
"""Cases of lora=null."""
GRPO_OF_ALL, PPO_OF_ALL, MUON_OF_ALL = OF_ALL_WEIGHTS
IN_LOSS = {"teacher_in": "loss", "top_k": 4}
GRPO = next(iter(CASES))
SHARDED = ("cluster.ranks=2", "cluster.shard_base=true", "cluster.engines=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a few steps left. metrics: of each step. tensors: of adapters, heads and optimizers."""

    metrics: list[dict[str, float]]
    tensors: dict[str, Tensor]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = WarmProcesses(tmp_path_factory.mktemp("run"))
    yield launcher
    launcher.close()


class Texts:
    """Short texts that differ from update to update."""

    def __init__(self, batches):
        self.batches = batches

    def batch(self, seed, step, update):
        return self.batches[(2 * step + update) % len(self.batches)]


@pytest.fixture
def texts(make_batch):
    rows = [(i, [7 + i], list(range(20, 24 + 3 * i))) for i in range(6)]
    whole = make_batch(rows)
    return Texts([whole.select(torch.tensor(chosen)) for chosen in ([0, 1, 5], [2, 3], [4, 0, 2])])


def keys_of(case):
    if case in CASES:
        return (*COMMON, *CASES[case][1])
    return (*(key for key in COMMON if not key.startswith("lora.")), "lora=null", *OF_ALL_WEIGHTS[case][1])


def train(trainer, local, case, batches, first=0):
    """The steps from `first` on as the loop makes them, without sampling and scoring."""
    metrics, tensors = [], {}
    for step, batch in list(enumerate(batches))[first:]:
        algorithm = rlft.load_algorithm((CASES | OF_ALL_WEIGHTS)[case][0], **(IN_LOSS if "in the loss" in case else {}))
        if "with a hint" in case:
            batch = replace(batch, teacher_prompts=hinted(batch))
        zero_gradient_B = algorithm.zero_gradient_rows(batch)
        credited = algorithm.credit(trainer.annotate(batch, zero_gradient_B))
        metrics.append(trainer.update(algorithm, credited, zero_gradient_B, step))
        local.roles.publish(step + 1)
        trainer.refresh(step + 1, Rollouts(groups=[], scores=Scores(total=torch.zeros(0), by_reward={}), num_sampled=0))
        tensors = flat(local, trainer.state())
    return Trained(metrics=metrics, tensors=tensors)


def hinted(batch):
    """The prompts with two more tokens at their ends, as a teacher with a hint reads them."""
    lengths_B = prompt_lengths(batch)
    prompts_BP = torch.full((len(lengths_B), int(lengths_B.max()) + 2), -1)
    for b, length in enumerate(lengths_B.tolist()):
        prompts_BP[b, : length + 2] = torch.tensor([*batch.token_ids[b, :length].tolist(), 61, 62])
    return prompts_BP


def flat(local, state):
    """Copies of the weights of rank 0, and of the moments that a checkpoint would have."""
    return {name: tensor.clone() for name, tensor in (local.weights() | dict(state.optimizer)).items()}


def assert_same(found, expected):
    assert found.metrics == expected.metrics
    assert found.tensors.keys() == expected.tensors.keys()
    assert any(name.partition("/")[0] in ("exp_avg", "momentum_buffer") for name in found.tensors)
    unlike = [name for name, tensor in expected.tensors.items() if not torch.equal(found.tensors[name], tensor)]
    assert not unlike


class Bench:
    """Trainers of the cases, of one process or of several ranks, and the batches and texts on which they train."""

    def __init__(self, run_config, batches, texts, launcher, known):
        self.run_config, self.batches, self.texts = run_config, batches, texts
        self.launcher, self.known = launcher, known

    @contextmanager
    def opened(self, case, *keys, ranks=1, timeout=60.0, launcher=None, sequence=1):
        """A trainer of so many ranks, and rank 0's own. launcher: starts the ranks, instead of processes."""
        config, started_by = self.run_config(*keys_of(case), *keys), launcher or self.launcher
        lanes = LANES if case in CASES else LANES_OF_ALL_WEIGHTS
        alike = {"needs_old": True, "teacher_top_k": IN_LOSS["top_k"] if "in the loss" in case else 0}
        with deterministic_on_cpu(torch.device("cpu")), opened_trainer(config, **alike) as local:
            local.text = self.texts.batch
            if ranks == 1:
                local.share = LaneShare(lanes=lanes)
                yield local, local
                return
            factory, given = "rlft.loop.workers:RankWorker", {"config": config, "lanes": lanes, **alike}
            specs = [
                WorkerSpec(name=f"rank-{rank}", factory=factory, arguments=given | {"rank": rank})
                for rank in range(1, ranks)
            ]
            workers = [started_by.start(spec) for spec in specs]
            limits = {"timeout": timeout, "note": print, "again": AGAIN, "lanes": lanes, "sequence": sequence}
            try:
                yield RankedTrainer(local, started_by, specs, workers, **limits), local
            finally:
                self.launcher.release()

    def alone(self, case):
        """What one process leaves that does all lanes, computed once; it has learned something."""
        if case in self.known:
            return self.known[case]
        with self.opened(case) as (trainer, local):
            before = flat(local, local.state())
            trained = train(trainer, local, case, self.batches)
        assert not all(torch.equal(t, trained.tensors[n]) for n, t in before.items() if n.startswith("policy/"))
        assert all(step["kl/teacher"] > 1e-4 for step in trained.metrics if case.startswith("opd"))
        self.known[case] = trained
        return trained

    def check(self, case, *keys, ranks=2, timeout=60.0, before=lambda: None):
        """So many ranks leave what one process leaves, if `before` is called once they are there."""
        expected = self.alone(case)
        with self.opened(case, *keys, ranks=ranks, timeout=timeout) as (trainer, local):
            if keys:
                held = [p.untyped_storage().data_ptr() for p in local.roles.backbone.model.parameters() if p.dim() > 1]
                assert len(set(held)) < len(held), "layers lie in buffers"
            before()
            assert_same(train(trainer, local, case, self.batches), expected)


@pytest.fixture(scope="module")
def known():
    """{case: what one process leaves}"""
    return {}


@pytest.fixture
def bench(run_config, batches, texts, launcher, known):
    return Bench(run_config, batches, texts, launcher, known)


@pytest.mark.parametrize(
    ("case", "keys", "ranks"),
    [
        *((case, (), 2) if case == "ppo, a critic with an adapter" else slow(case, (), 2) for case in CASES),
        slow("ppo with pretraining text", (), 4),
        slow("ppo with pretraining text", SHARDED, 2),
        slow("opd, the base with a hint", SHARDED, 2),
    ],
)
def test_ranks_give_the_bits_of_one_also_if_they_divide_the_base(case, keys, ranks, bench):
    bench.check(case, *keys, ranks=ranks)


# -- all weights -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "ranks"),
    [(GRPO_OF_ALL, 3), slow(GRPO_OF_ALL, 2), slow(PPO_OF_ALL, 2), slow(PPO_OF_ALL, 3), slow(MUON_OF_ALL, 2),
     slow(MUON_OF_ALL, 3)],
)  # fmt: skip
def test_ranks_that_train_all_weights_give_the_bits_of_one(case, ranks, bench):
    bench.check(case, ranks=ranks)


@pytest.mark.parametrize(
    ("case", "ranks"), [(GRPO_OF_ALL, (2, 3)), slow(PPO_OF_ALL, (3, 1)), slow(GRPO_OF_ALL, (1, 2))]
)
def test_all_weights_go_on_from_a_checkpoint_with_other_ranks(case, ranks, bench, tmp_path):
    expected = bench.alone(case)
    with bench.opened(case, ranks=ranks[0]) as (trainer, local):
        begun = train(trainer, local, case, bench.batches[:2])
        saved = trainer.state()
        for name, write in saved.folders.items():
            write(tmp_path / name)
        saved = replace(
            saved, optimizer={n: t.clone() for n, t in saved.optimizer.items()}, folders={}, folder=tmp_path
        )
    with bench.opened(case, ranks=ranks[1]) as (trainer, local):
        trainer.restore(saved)
        del saved
        done = train(trainer, local, case, bench.batches, first=2)
    assert_same(replace(done, metrics=begun.metrics + done.metrics), expected)


@pytest.mark.parametrize("point", [point if point == "reduce" else slow(point) for point in
                                   ("annotate", "update", "reduce", "checkpoint")])  # fmt: skip
def test_a_rank_that_dies_ends_a_run_that_trains_all_weights(point, bench, monkeypatch, tmp_path):
    text = (
        r"^the run ends, because with lora=null no copy of all weights is kept from which a step could be done again; "
        r"resume from the newest checkpoint with: rlft resume some/run; .*was killed by SIGKILL.*; its log is "
    )
    with bench.opened(GRPO_OF_ALL, ranks=2) as (trainer, local):
        at_call(monkeypatch, POINTS[point], lambda: os.kill(bench.launcher.started[0].pid, signal.SIGKILL))
        with pytest.raises(RankError, match=text):
            train(trainer, local, GRPO_OF_ALL, bench.batches)


@pytest.mark.slow
def test_ranks_without_rows_wait_for_the_others(bench):
    """One live row in all: three lanes, and so one rank of two, have nothing to do."""
    algorithm, batch = rlft.load_algorithm("grpo"), bench.batches[0]
    zero_gradient_B = torch.ones(12, dtype=torch.bool)
    zero_gradient_B[0] = False

    def one_update(trainer, local):
        credited = algorithm.credit(trainer.annotate(batch, zero_gradient_B))
        metrics = trainer.update(algorithm, credited, zero_gradient_B, 0)
        return Trained(metrics=[metrics], tensors=flat(local, trainer.state()))

    with bench.opened(GRPO) as opened:
        expected = one_update(*opened)
    with bench.opened(GRPO, ranks=2) as opened:
        assert_same(one_update(*opened), expected)
    assert expected.metrics[0]["lanes/balance"] == pytest.approx(1 / LANES)


# -- ranks that share the tokens of their passes -----------------------------------------------------------------------
UNAMPLIFIED = "trainer.lr=1e-5"
"""With a rate of 0.01 the random weights of these tests make a difference of 1e-7 a thousand times larger each step."""


@pytest.mark.parametrize("case", slow_but(GRPO, CASES | OF_ALL_WEIGHTS))
def test_ranks_that_share_tokens_learn_what_one_learns(case, bench):
    keys = (UNAMPLIFIED, *(("lora.dropout=0",) if case in CASES else ()))
    with bench.opened(case, *keys) as opened:
        expected = train(*opened, case, bench.batches)
    with bench.opened(case, *keys, ranks=2, sequence=2) as opened:
        found = train(*opened, case, bench.batches)
    for of_step, whole in zip(found.metrics, expected.metrics, strict=True):
        assert of_step == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("case", [GRPO, GRPO_OF_ALL])
def test_the_bits_depend_on_who_shares_tokens_and_not_on_the_number_of_ranks(case, bench):
    """With dropout, which each rank draws for its own tokens."""
    with bench.opened(case, ranks=2, sequence=2) as opened:
        expected = train(*opened, case, bench.batches)
    with bench.opened(case, ranks=4 if case in CASES else 6, sequence=2) as opened:
        assert_same(train(*opened, case, bench.batches), expected)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), SHARDED], ids=["a whole base", "a divided base"])
def test_a_rank_that_dies_while_tokens_are_exchanged_costs_no_step_and_no_bit(keys, bench, monkeypatch, capsys):
    with bench.opened(GRPO, ranks=2, sequence=2) as opened:
        expected = train(*opened, GRPO, bench.batches)
    with bench.opened(GRPO, *keys, ranks=2, sequence=2) as opened:
        at_call(monkeypatch, POINTS["tokens"], lambda: os.kill(bench.launcher.started[0].pid, signal.SIGKILL))
        assert_same(train(*opened, GRPO, bench.batches), expected)
    assert "was killed by SIGKILL" in capsys.readouterr().out


def test_ranks_that_share_tokens_draw_dropout_of_their_own(bench):
    drawn = []
    with bench.opened(GRPO) as (_, local):
        for rank in range(4):
            local.share = LaneShare(lanes=LANES, rank=rank, ranks=4, sequence=2)
            local._seed_pass(0, "dropout 0 0")
            drawn.append(float(torch.rand(())))
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


# -- a rank that dies --------------------------------------------------------------------------------------------------
POINTS = {
    "annotate": (LocalTrainer, "annotations", 2),
    "update": (LocalTrainer, "_passes", 10),  # two lanes of rank 0, four updates a step: in the second step
    "reduce": (Exchange, "broadcast", 20),
    "publish": (Roles, "publish", 2),
    "checkpoint": (LocalTrainer, "digest", 2),
    # Between two layers of a base that is divided, in the forward of the first annotation.
    "layer forward": (Exchange, "numbers", 3),
    # In a backward. Of four layers, these of two roles by two lanes announce 2 * 2 * 4 in an annotation, and the end of
    # the passes: 17 rounds in all. An update announces 4 + 3 layers of one pass, forwards and backwards, 3 + 3 of the
    # next, which begins with the layer that is there, and the end: 14 rounds. So 37 is the sixth of the second update.
    "layer backward": (Exchange, "numbers", 37),
    "tokens": (Exchange, "all_to_all", 70),  # in an update
}


@pytest.mark.parametrize(
    ("point", "number"),
    [
        slow(p, signal.SIGKILL) if p != "update" else (p, signal.SIGKILL)
        for p in POINTS
        if p not in ("layer backward", "tokens")
    ]
    + [slow("update", signal.SIGSTOP), slow("layer backward", signal.SIGSTOP)],
)
def test_a_rank_that_dies_or_hangs_costs_no_step_and_no_bit(point, number, bench, monkeypatch, capsys):
    started, is_stopped = bench.launcher.started, number == signal.SIGSTOP

    def fails():
        at_call(monkeypatch, POINTS[point], lambda: os.kill(started[0].pid, number))

    keys = SHARDED if point.startswith("layer") else ()
    bench.check(GRPO, *keys, timeout=2.0 if is_stopped else 60.0, before=fails)
    note = capsys.readouterr().out
    assert note.count("a rank is replaced, and the work of the ranks done again: ") == 1
    late = r"rank-1 has not answered for 2 s \(cluster\.timeout\); its log is "
    assert re.search(late if is_stopped else "was killed by SIGKILL", note), note


@pytest.mark.slow
def test_a_rank_of_whose_death_a_busy_machine_tells_late_is_known_to_have_died(bench, monkeypatch, capsys):
    """The connection of the exchange is lost long before."""
    call = ProcessWorker.call

    def told_late(worker, *args, **kwargs):
        shown = Future()

        def tell(future):
            if (error := future.exception()) is None:
                shown.set_result(future.result())
            else:
                threading.Timer(1.0, shown.set_exception, [error]).start()

        call(worker, *args, **kwargs).add_done_callback(tell)
        return shown

    def fails():
        monkeypatch.setattr(ProcessWorker, "call", told_late)
        monkeypatch.setattr(ranked_trainer, "GRACE_S", 0.1)
        at_call(monkeypatch, POINTS["update"], lambda: os.kill(bench.launcher.started[0].pid, signal.SIGKILL))

    bench.check(GRPO, before=fails)
    assert "was killed by SIGKILL" in capsys.readouterr().out


def at_call(monkeypatch, place, happens):
    """Before the n-th call of a function something happens."""
    owner, name, due = place
    original, count = getattr(owner, name), 0

    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        if count == due:
            happens()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_ranks_that_differ_are_not_saved(bench):
    with bench.opened(GRPO, ranks=2) as (trainer, local):
        trainer.state()
        next(p for _, p in local.roles.named_parameters()).data[0, 0] += 1e-7
        with pytest.raises(RankError, match=r"^rank-1 has come to another adapter or optimizer than rank 0, so"):
            trainer.state()


class Failing:
    """A launcher, and its workers, which fail in every call; `raised`: with this, else they die."""

    address = "127.0.0.1"

    def __init__(self, folder, raised=None):
        self.log, self.raised, self.num_started, self.num_killed = folder / "rank-1.log", raised, 0, 0
        self.log.write_text("the last words\n")
        self.name = "rank-1"

    def start(self, spec):
        self.num_started += 1
        return self

    def share(self, value):
        return value

    def call(self, method, *args, **kwargs):
        future = Future()
        future.set_exception(
            self.raised or WorkerError("rank-1 was killed by SIGKILL; its last lines:\nthe last words")
        )
        return future

    def kill(self):
        self.num_killed += 1

    def close(self):
        """Nothing to end."""


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (None, RankError, r"(?s)^the ranks failed 3 times in a row; .* by SIGKILL; its last lines:\nthe last words"),
        (RuntimeError("no memory"), RankError, "in a row; the last time rank-1 failed: RuntimeError: no memory"),
        (UserError("model.path", "is not there", remedy="copy it"), UserError, r"^model\.path: is not there; copy it"),
    ],
)
def test_ranks_that_fail_again_and_again_stop_the_run(raised, error, text, bench, tmp_path):
    failing = Failing(tmp_path, raised)
    with bench.opened(GRPO, ranks=2, launcher=failing) as (trainer, _), pytest.raises(error, match=text):
        trainer.annotate(bench.batches[0], torch.zeros(12, dtype=torch.bool))
    assert failing.num_started == (1 if error is UserError else ranked_trainer.MOST_FAILURES)
