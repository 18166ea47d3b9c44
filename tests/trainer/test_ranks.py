"""The exchange between ranks: what arrives, and what is said where somebody does not come."""

import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
from met_ranks import CPU, meeting, met, together

from rlft.system.process.running_time import in_background
from rlft.trainer import ranks
from rlft.trainer.ranks import Exchange, LaneShare, RanksError, sent, shapes_of, take_over


def test_every_rank_hears_the_numbers_of_all(store):
    with met(meeting(store, "numbers", 3)) as exchanges:
        heard = [in_background(lambda e=e, n=n: e.numbers(n)) for n, e in enumerate(exchanges, start=-1)]
        assert [future.result(120) for future in heard] == [[-1, 0, 1]] * 3


def test_ranks_that_share_tokens_exchange_among_themselves(store):
    """Parts of unlike sizes, as of a row whose number of tokens the ranks do not divide."""
    sizes = [3, 2]
    with met(meeting(store, "tokens", 4, sequence=2)) as exchanges:

        def exchanged(rank):
            own = rank % 2
            sent = torch.tensor([10 * rank + to for to in range(2) for _ in range(sizes[to])], dtype=torch.uint8)
            arrived = exchanges[rank].all_to_all(sent, sizes, [sizes[own]] * 2)
            total = torch.tensor([0.5, rank], dtype=torch.float64)
            exchanges[rank].add_up(total)
            return arrived.tolist(), total.tolist()

        found = [future.result(120) for future in [in_background(lambda r=r: exchanged(r)) for r in range(4)]]
    assert found == [
        ([0, 0, 0, 10, 10, 10], [1.0, 1.0]),
        ([1, 1, 11, 11], [1.0, 1.0]),
        ([20, 20, 20, 30, 30, 30], [1.0, 5.0]),
        ([21, 21, 31, 31], [1.0, 5.0]),
    ]


def test_the_lanes_of_a_rank_are_neighbours():
    shares = [LaneShare(lanes=6, rank=rank, ranks=3) for rank in range(3)]
    assert [list(share.mine) for share in shares] == [[0, 1], [2, 3], [4, 5]]
    assert [shares[0].owner(lane) for lane in range(6)] == [0, 0, 1, 1, 2, 2]
    shared = [LaneShare(lanes=4, rank=rank, ranks=4, sequence=2) for rank in range(4)]
    assert [list(share.mine) for share in shared] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [shared[0].owner(part) for part in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert [share.part_of(share.mine[1]) for share in shared] == [1, 5, 3, 7]
    buffer = torch.ones(2)
    assert LaneShare(lanes=6).sent(5, buffer) is buffer


def test_a_rank_that_does_not_come_is_waited_for_until_the_limit(store):
    begun = time.monotonic()
    with pytest.raises(RanksError, match=r"^rank 0 waited 0\.5 s \(cluster\.timeout\) to meet the others$"):
        Exchange(meeting(store, "absent", 2, timeout=0.5), 0, CPU)
    assert time.monotonic() - begun < 60


@pytest.mark.usefixtures("soon_closed")
def test_a_rank_that_takes_no_part_is_waited_for_until_the_limit(store):
    limit = r"^rank 0 waited 1 s \(cluster\.timeout\) to exchange gradients with rank 1$"
    with met(meeting(store, "silent", 2, timeout=1.0)) as (first, _), pytest.raises(RanksError, match=limit):
        first.broadcast(torch.zeros(3), 1)


@pytest.mark.usefixtures("soon_closed")
def test_ranks_that_share_tokens_are_named_where_one_is_late(store):
    limit = r"^rank 3 waited 1 s \(cluster\.timeout\) to share tokens among ranks 2 to 3$"
    with met(meeting(store, "late", 4, timeout=1.0, sequence=2)) as exchanges, pytest.raises(RanksError, match=limit):
        exchanges[3].add_up(torch.zeros(3))


def test_time_in_which_this_process_could_not_run_ends_no_wait(store, monkeypatch):
    """As after SIGSTOP: our clock has stood still, and the limit of torch's own wait, if it had one, has passed."""
    monkeypatch.setattr(ranks, "RunningTime", lambda: lambda: 0.0)
    with met(meeting(store, "stopped", 2, timeout=0.2)) as (first, second):
        received = torch.zeros(3)
        sent = in_background(lambda: first.broadcast(received, 1))
        time.sleep(0.6)
        assert not sent.done()
        second.broadcast(torch.ones(3), 1)
        sent.result(120)
        assert torch.equal(received, torch.ones(3))


def test_closing_waits_for_nothing_that_is_under_way(store, monkeypatch):
    """64 MiB are more than a connection takes without a reader. The thread that ends it is far ahead of the caller."""

    def is_ahead(*call):
        future = in_background(*call)
        time.sleep(0.5)
        return future

    with met(meeting(store, "closing", 2, timeout=0.5)) as (first, _):
        with pytest.raises(RanksError, match="to exchange gradients with rank 0"):
            first.broadcast(torch.zeros(2**24), 0)
        monkeypatch.setattr(ranks, "in_background", is_ahead)
        in_background(first.close).result(120)


def test_a_process_that_ends_after_closing_is_not_aborted():
    script = """
import torch
from rlft.system.process.running_time import in_background
from rlft.trainer.ranks import LOOPBACK, Exchange, Rendezvous, open_store
store, cpu = open_store(LOOPBACK), torch.device("cpu")
where = Rendezvous(host=LOOPBACK, port=store.port, name="ends", ranks=2, timeout=20.0)
other = in_background(lambda: Exchange(where, 1, cpu))
first = Exchange(where, 0, cpu)
other.result(120).close()
first.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_knows_that_a_rank_is_gone_need_not_wait(store):
    class KnownError(Exception):
        pass

    def watch():
        if is_known:
            raise KnownError

    is_known, where = False, meeting(store, "known", 2)
    other = in_background(lambda: Exchange(where, 1, CPU))
    with closing(Exchange(where, 0, CPU, watch)) as first, closing(other.result(120)):
        is_known = True
        with pytest.raises(KnownError):
            first.broadcast(torch.zeros(3), 1)


# -- how ranks come to one state ---------------------------------------------------------------------------------------
def test_tensors_are_taken_over_in_their_places_however_they_lie_and_count_as_written(met):
    """The second one's columns lie one after the other; a publish tells by the count what has been written into."""
    held = [{"a": torch.full((3,), 1.0 + rank), "b": torch.arange(6.0).view(2, 3).T * (1 + rank)} for rank in range(3)]
    expected = {name: tensor.clone() for name, tensor in held[0].items()}
    before = [{name: (t.data_ptr(), t.stride(), t._version) for name, t in tensors.items()} for tensors in held]
    exchanges = met(3)
    together([lambda e=e, r=r: take_over(e, r, held[r]) for r, e in enumerate(exchanges)])
    for rank, tensors in enumerate(held):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        for name, (address, stride, version) in before[rank].items():
            assert (tensors[name].data_ptr(), tensors[name].stride()) == (address, stride)
            assert (tensors[name]._version > version) == (rank > 0), "rank 0 has written nothing"


def test_what_a_rank_has_is_sent_to_all(met):
    """Of any dtype and shape, as optimizers' moments are."""
    own = {"step/p": torch.tensor(7), "exp_avg/p": torch.randn(2, 3), "codes/q": torch.tensor([1, 255]).byte()}

    def receive(rank, exchange):
        return dict(sent(exchange, rank, shapes_of(own), own if rank == 1 else {}, CPU, root=1))

    for found in together([lambda e=e, r=r: receive(r, e) for r, e in enumerate(met(2))]):
        assert shapes_of(found) == shapes_of(own)
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
