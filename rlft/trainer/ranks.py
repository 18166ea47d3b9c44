"""The ranks that share the lanes of an update, and the exchange of gradients between them.

Collectives are begun asynchronously and polled every few milliseconds. So a wait has a time limit, which does not run
while this process is stopped; a signal is handled during it; and a rank that is known to be gone ends it at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from rlft.model.sequence import TokenShare
from rlft.system.device import kind_of
from rlft.system.process.running_time import RunningTime, in_background

dist: Any = torch.distributed  # without type checks, since torch's types lack the classes of its C++ part
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.01
"""Pauses between polls of a collective: short at first, since most are done in a moment."""
CLOSE_S = 1.0
LOOPBACK = "127.0.0.1"
BACKEND_LIMIT = timedelta(days=1)
"""The time limit of torch's own waits: far longer than `cluster.timeout`, which is counted here. Torch's limit runs on
while the process is stopped, and its error does not say which rank is missing."""


class RanksError(RuntimeError):
    """A rank is gone, or did not take part in an exchange within the time limit."""


class LateRankError(RanksError):
    """A rank did not take part within the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where ranks find each other."""

    host: str  # host of the store that rank 0 holds
    port: int  # port of that store
    name: str  # a name that no earlier one at this store had
    ranks: int  # number of ranks
    sequence: int = 1  # as in `LaneShare`
    timeout: float  # seconds that a rank may be behind the others


class Exchange:
    """One process's end of the connections between ranks, on its device; making it waits until all have come.

    `watch` is called during each wait; it raises if a rank is known to be gone.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, device: torch.device, watch: Callable[[], None] = lambda: None
    ) -> None:
        self._rendezvous, self._rank, self._watch = rendezvous, rank, watch
        first = rank - rank % rendezvous.sequence
        self._sharing = f"share tokens among ranks {first} to {first + rendezvous.sequence - 1}"
        connecting: Future[Any] = in_background(_groups, rendezvous, rank, device)
        self._group: Any = None
        self._host_group: Any = None
        self._token_group: Any = None
        self._wait(connecting.done, "meet the others")
        try:
            self._group, self._host_group, self._token_group = connecting.result()
        except RuntimeError as error:
            raise RanksError(f"rank {rank} could not meet the others: {error}") from error

    def broadcast(self, tensor: Tensor, root: int, what: str = "exchange gradients") -> None:
        """Copies the tensor of rank `root` into that of each other rank; `what` says for error messages what this does.

        Raises RanksError: a rank is gone, or is late.
        """
        self.begin_broadcast(tensor, root, what)()

    def begin_broadcast(self, tensor: Tensor, root: int, what: str) -> Callable[[], None]:
        """Begins a `broadcast`; returns what waits for its end."""
        options, dense = dist.BroadcastOptions(), tensor.contiguous()
        options.rootRank, options.rootTensor = root, 0
        complete = self._begin(lambda: self._group.broadcast([dense], options), f"{what} with rank {root}")

        def arrived() -> None:
            complete()
            tensor.copy_(dense)

        return complete if dense is tensor or root == self._rank else arrived

    def numbers(self, own: int) -> list[int]:
        """The numbers of all ranks in their order, this rank's being `own`; exchanged in main memory on any device.

        Raises RanksError: a rank is gone, or is late.
        """
        own_number = torch.tensor([own])
        numbers = [torch.empty_like(own_number) for _ in range(self._rendezvous.ranks)]
        self._begin(lambda: self._host_group.allgather([numbers], [own_number]), "hear from all other ranks")()
        return [int(number) for number in numbers]

    # -- between the ranks that share the tokens of their passes -----------------------------------------------------
    def all_to_all(self, sent: Tensor, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """What other ranks have for this one: so many bytes from each are `arriving`.

        sent: a contiguous row of bytes, the part for the first rank first; `sizes` are those of the parts.
        """
        arrived, options = sent.new_empty(sum(arriving)), dist.AllToAllOptions()
        arguments = (arrived, sent, [*arriving], [*sizes], options)
        self._begin(lambda: self._token_group.alltoall_base(*arguments), self._sharing)()
        return arrived

    def add_up(self, tensor: Tensor) -> None:
        """Overwrites each rank's tensor by the sum of all ranks' tensors."""
        self._begin(lambda: self._token_group.allreduce([tensor]), self._sharing)()

    def close(self) -> None:
        """Ends the connections in a thread, because unfinished collectives may block that.

        It waits a moment for the thread: a process that ends before the thread would be aborted.
        """
        groups = [group for group in (self._group, self._host_group, self._token_group) if group is not None]
        self._group = self._host_group = self._token_group = None
        if groups:
            wait([in_background(_end, groups)], timeout=CLOSE_S)

    def _begin(self, begin: Callable[[], Any], what: str) -> Callable[[], None]:
        """Begins a collective; returns what waits for its end."""

        def complete() -> None:
            self._wait(work.is_completed, what)
            work.wait()

        work = self._connected(begin)
        return partial(self._connected, complete)

    def _connected(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(f"rank {self._rank} lost the connection to another rank: {error}") from error

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        clock, pause = RunningTime(), FIRST_PAUSE_S
        while not done():
            if clock() >= self._rendezvous.timeout:
                limit = f"{self._rendezvous.timeout:g} s (cluster.timeout)"
                raise LateRankError(f"rank {self._rank} waited {limit} to {what}")
            self._watch()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShare:
    """The lanes of one rank: neighbouring ones, as many as every other rank has."""

    lanes: int = 1  # number of all lanes
    rank: int = 0
    ranks: int = 1  # number of ranks
    sequence: int = 1  # how many neighbouring ranks have the same lanes, and share the tokens of their passes
    exchange: Exchange | None = None  # the connections to the other ranks; None for a single rank

    @property
    def parts(self) -> int:
        """Number of the parts that a gradient is the sum of: one for each lane and each rank that shares its tokens."""
        return self.lanes * self.sequence

    def owner(self, part: int) -> int:
        """The rank that computes a part; the first ranks that share a lane have the parts 0, 1, .. of all lanes."""
        number, lane = divmod(part, self.lanes)
        return lane * self.ranks // self.parts * self.sequence + number

    def part_of(self, lane: int) -> int:
        """This rank's part of a lane."""
        return self.rank % self.sequence * self.lanes + lane

    def lanes_of(self, rank: int) -> range:
        """The lanes of a rank."""
        size = self.parts // self.ranks
        first = rank // self.sequence * size
        return range(first, first + size)

    @property
    def mine(self) -> range:
        """The lanes of this rank."""
        return self.lanes_of(self.rank)

    @property
    def tokens(self) -> TokenShare | None:
        """Which tokens of its passes this rank computes; None: all."""
        if self.exchange is None or self.sequence == 1:
            return None
        return TokenShare(rank=self.rank % self.sequence, ranks=self.sequence, exchange=self.exchange)

    def sent(self, part: int, buffer: Tensor) -> Tensor:
        """The part's buffer, with the owner's values on every rank; other ranks only provide the memory."""
        if self.exchange is not None:
            self.exchange.broadcast(buffer, self.owner(part))
        return buffer


def open_store(host: str) -> Any:
    """The store of rank 0, at a free port of this machine; it serves the other ranks as long as this object lives."""
    return dist.TCPStore(host, 0, None, True, timeout=BACKEND_LIMIT, wait_for_workers=False)


def _groups(rendezvous: Rendezvous, rank: int, device: torch.device) -> tuple[Any, Any, Any]:
    """(process group of this device, process group of main memory, process group of the ranks that share tokens with
    this one); the first two are the same on a CPU.

    They are not torch's default group, which an engine in this process may use. Each has a connection of its own to the
    store: a wait on a shared one would block every other user of it.
    """
    number, place = divmod(rank, rendezvous.sequence)
    of_tokens = replace(rendezvous, name=f"{rendezvous.name}/{number}", ranks=rendezvous.sequence)
    host = _gloo(rendezvous, rank)
    if kind_of(device).collective != "nccl":
        return host, host, _gloo(of_tokens, place) if rendezvous.sequence > 1 else None
    return _nccl(rendezvous, rank), host, _nccl(of_tokens, place) if rendezvous.sequence > 1 else None


def _nccl(rendezvous: Rendezvous, rank: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = BACKEND_LIMIT
    return dist.ProcessGroupNCCL(_store(rendezvous, "cards"), rank, rendezvous.ranks, options)


def _store(rendezvous: Rendezvous, group: str) -> Any:
    store = dist.TCPStore(rendezvous.host, rendezvous.port, None, False, timeout=BACKEND_LIMIT)
    return dist.PrefixStore(f"{rendezvous.name}/{group}", store)


def _gloo(rendezvous: Rendezvous, rank: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = BACKEND_LIMIT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(rendezvous))]
    return dist.ProcessGroupGloo(_store(rendezvous, "hosts"), rank, rendezvous.ranks, options)


def _own_address(rendezvous: Rendezvous) -> str:
    """The address of this machine in the network of rank 0, which others can reach, too."""
    if rendezvous.host == LOOPBACK:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect((rendezvous.host, rendezvous.port))
        return connection.getsockname()[0]


def _end(groups: list[Any]) -> None:
    """Ends and frees the groups. Freeing waits for unfinished collectives, without end if the other rank is stopped, so
    that the last reference to a group must be this thread's."""
    for group in groups:
        group.abort()
    groups.clear()


# -- how ranks come to one state: rank 0 broadcasts it, one tensor at a time -------------------------------------------
# Weights are written where they are used, so that no rank holds a second copy of them and none is pickled.
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # {name: (shape, dtype)} of tensors that are sent


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def take_over(exchange: Exchange, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Writes rank 0's tensors into those of the same names on every other rank.

    Raises RanksError: another rank is gone or late.
    """
    for tensor in tensors.values():
        exchange.broadcast(tensor, 0, "exchange weights")
    if rank > 0:  # collectives count no change, by which copies of weights in 16 bits are kept
        torch.autograd.graph.increment_version(tensors.values())


def sent(
    exchange: Exchange, rank: int, shapes: Shapes, own: Mapping[str, Tensor], device: torch.device, root: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor on the device) of what rank `root` has, and of which every rank knows the shapes.

    All ranks take part, in the order of the shapes. Only rank `root` reads its `own`.

    Raises RanksError: another rank is gone or late.
    """
    for name, (shape, dtype) in shapes.items():
        tensor = own[name].to(device) if rank == root else torch.empty(shape, dtype=dtype, device=device)
        exchange.broadcast(tensor, root, "exchange moments")
        yield name, tensor
