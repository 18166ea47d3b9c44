"""Decoding in CUDA graphs: a token of all rows is one launch, and the host reads READ_EVERY of them at a time.

A step, from the tokens that were drawn to the next ones and the rows that they end, is one function of tensors that
stay where they are. It computes a bucket of rows, whose size follows from the number of live rows alone, so that the
bits of a completion never depend on what was decoded before: a graph replays what the function computes, and where
there can be none the function itself is called. The first replay of a graph is compared with it, at another place than
the one that was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rlft.generation.decoding import READ_EVERY, Sampled, draw
from rlft.system.device import kind_of, widest
from rlft.system.lazy import torch
from rlft.system.terminal import say
from rlft.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor, device as Device

MOST_WAYS = 8
"""Of sampling, that graphs are held of: requests of an endpoint or a chat may each have a temperature of their own."""


def obstacle(decoder: Any, sampling: Sampling, *, reports: bool) -> str | None:
    """Why these completions are not sampled in CUDA graphs; None if they are.

    reports: whether somebody is told of each token.
    """
    if reports or sampling.drafts is not None or sampling.notes_experts:
        return "the host reads each token at once"
    if not hasattr(decoder, "obstacle_to_graphs"):  # rlft.model.kernels.prefix_cache.FlashPrefixCache
        return "its keys and values are not those of flash kernels"
    return decoder.obstacle_to_graphs()


def bucket(live: int) -> int:
    """How many rows are computed where so many are live, at least 1: powers of two, and quarters between them from 8.

    >>> [bucket(live) for live in (1, 3, 16, 17, 33, 100, 192, 200)]
    [1, 4, 16, 24, 48, 128, 192, 256]
    """
    power = 1 << (live - 1).bit_length()
    step = max(8, power // 4)
    return power if live <= 16 else -(-live // step) * step


def enlarged(room: int, needed: int) -> int:
    """The room for tokens of prompts in place of `room`: an eighth more than is needed if there was some already, for
    conversations grow from turn to turn."""
    return room if room >= needed else needed + needed // 8 * bool(room)


class Graphs:
    """The graphs of one engine, with the tensors that they read."""

    def __init__(self, device: torch.device) -> None:
        assert kind_of(device).has_kernels, "other devices have no CUDA graphs, or were not tried"
        self._device = device
        self._keys: Any = None  # of the decoders, one after the other
        self._recorded: dict[Any, Any] = {}  # graphs, by bucket, role and what sampling makes of logits
        self._compared: set[Any] = set()  # those of them of which a replay was seen to give what the step gives
        self._ends: dict[Any, Tensor] = {}  # that rows end with, by role and what sampling makes of logits
        self._addresses: tuple[float, ...] = ()  # of what the graphs read
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self.problem: str | None = None  # why there are none any more
        self._make_room(0, 0)

    def _make_room(self, rows: int, tokens: int) -> None:
        """Makes what a step knows of each row."""
        self._forget()
        zeros = partial(torch.zeros, device=self._device)
        self._token_R = zeros(rows, dtype=torch.int64)  # the last one
        self._live_R = zeros(rows, dtype=torch.bool)
        self._limits_R = zeros(rows, dtype=torch.int64)  # the most tokens
        self._uniforms_RT = zeros(rows, tokens, dtype=widest(self._device))  # as of `decoding.decode`
        # The last tokens, -1 after a row's end, the bits of their log-probs, and which rows are live.
        self._noted = zeros(3, READ_EVERY, rows, dtype=torch.int32)

    def decode(self, decoder: Any, n: int, uniforms_RT: Tensor, sampling: Sampling, into: Sampled, role: Any) -> None:
        """Samples n completions of each of the decoder's prompts; `role` says with which adapter."""
        num_rows, last = len(uniforms_RT), int(into.limits_R.max())
        size = bucket(num_rows)
        rows = torch.arange(size).clamp(max=num_rows - 1)  # those that fill the bucket do what the last one does
        live = torch.arange(size) < num_rows
        logits = decoder.prefill(n)
        self._keys = decoder.fix(self._keys, rows, enlarged)
        if self._uniforms_RT.shape != (self._keys.rows, self._keys.tokens):
            self._make_room(self._keys.rows, self._keys.tokens)
        key = (role, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, tuple(into.ends.tolist()))
        is_full = len(self._ends) == MOST_WAYS and key not in self._ends
        if is_full or (self._recorded and self._addresses != decoder.addresses()):
            self._forget()
        there, limits_R, live_R = torch.stack([rows, into.limits_R[rows], live.long()]).to(self._device)
        uniforms_RT = uniforms_RT.to(self._uniforms_RT).index_select(0, there)
        self._uniforms_RT[:size, : uniforms_RT.shape[1]] = uniforms_RT
        self._limits_R[:size], self._live_R[:size] = limits_R, live_R
        if key not in self._ends:
            self._ends[key] = into.ends.to(self._device)
        ends = self._ends[key]
        self._draw(logits.index_select(0, there), self._keys.place, size, sampling, ends)
        del logits, uniforms_RT  # they would stay until the last token
        for t in range(last):
            if (t + 1) % READ_EVERY == 0 or t + 1 == last:
                first, going = t - t % READ_EVERY, live.nonzero()[:, 0]
                noted = self._noted[:, : t + 1 - first, :size].cpu()[:, :, going]
                live[going] = into.add_several(rows[going], first, *noted)
                if not live.any():
                    break
                if (smaller := bucket(int(live.sum()))) < size:
                    kept = (~live).int().argsort(stable=True)[:smaller].sort().values  # some that have ended fill it
                    decoder.compact(kept, t)
                    self._keep(kept.to(self._device), live[kept])
                    rows, live, size = rows[kept], live[kept], smaller
            if t + 1 < last:
                run = partial(self._advance, decoder, self._keys.place, size, sampling, ends)
                self._step(run, (size, *key), decoder, t)

    # -- on the device -------------------------------------------------------------------------------------------------
    def _advance(self, decoder: Any, place: Tensor, size: int, sampling: Sampling, ends: Tensor) -> None:
        """A step of the first rows. It may read nothing from the host that another step has otherwise."""
        self._draw(decoder.advance(self._token_R[:size]), place, size, sampling, ends)

    def _draw(self, logits_RV: Tensor, place: Tensor, size: int, sampling: Sampling, ends: Tensor) -> None:
        token_R, logprob_R = draw(logits_RV, self._uniforms_RT[:size].index_select(1, place)[:, 0], sampling)
        live_R = self._live_R[:size]
        shown_R = token_R.where(live_R, -1)
        live_R.logical_and_((token_R[:, None] != ends).all(1)).logical_and_(self._limits_R[:size] > place + 1)
        self._token_R[:size].copy_(token_R)
        noted = torch.stack([shown_R.int(), logprob_R.view(torch.int32), live_R.int()])
        self._noted[:, :, :size].index_copy_(1, place % READ_EVERY, noted[:, None])

    def _keep(self, kept: Tensor, live: Tensor) -> None:
        for x in (self._token_R, self._limits_R, self._uniforms_RT):
            x[: len(kept)] = x.index_select(0, kept)
        self._live_R[: len(kept)] = live.to(self._device)

    # -- graphs --------------------------------------------------------------------------------------------------------
    def _step(self, run: Callable[[], None], key: Any, decoder: Any, place: int) -> None:
        if self.problem is not None:
            run()
        elif key not in self._recorded:
            self._record(run, key, decoder)
        elif key not in self._compared:
            self._compare(run, key, place)
        else:
            self._recorded[key].replay()

    def _record(self, run: Callable[[], None], key: Any, decoder: Any) -> None:
        """Takes the step, which compiles and allocates what it needs, and records another one, which is not taken."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()  # of all graphs that are held
        graph, of_capture, problem = torch.cuda.CUDAGraph(), {"pool": pool, "stream": self._stream}, None
        try:
            with torch.cuda.stream(self._stream):
                run()
                try:
                    # Other threads may use the card meanwhile.
                    with torch.cuda.graph(graph, capture_error_mode="thread_local", **of_capture):
                        run()
                except RuntimeError as error:  # memory, or an operator that waits for the host
                    # What the end of a capture that failed raises names no operator.
                    problem = str(error.__context__ or error).partition("\n")[0] or "it cannot be recorded"
        finally:  # what follows uses the same tensors
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if problem is None:
            self._addresses, self._recorded[key] = decoder.addresses(), graph
            return
        del graph
        self._give_up(problem)
        _end_capture(pool, self._device)

    def _compare(self, run: Callable[[], None], key: Any, place: int) -> None:
        """Takes the step, after a replay of it."""
        size, *_ = key
        changed = self._token_R, self._live_R, self._noted, self._keys.place
        written = [x[:size, place] for pair in self._keys.own for x in pair]
        before = [x.clone() for x in changed]
        self._recorded[key].replay()
        replayed = [x.clone() for x in (*changed, *written)]
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)
        run()
        same = [(x == y).all() for x, y in zip(replayed, (*changed, *written), strict=True)]
        if torch.stack(same).all():
            self._compared.add(key)
        else:
            self._give_up(f"a replay of {size} rows differs from the step that was recorded")

    def _forget(self) -> None:
        self._recorded.clear()
        self._compared.clear()
        self._ends.clear()
        self._pool = None  # torch takes the handle of a pool no more once its graphs are gone

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._forget()
        say(f"generation.transformers.graphs: the same steps are computed without CUDA graphs: {problem}")


def _end_capture(pool: Any, device: Device) -> None:
    """Takes back what a capture that failed leaves in torch's allocator, once its graph and tensors are gone.

    Up to 2.12 it believes that the capture goes on (pytorch issue 180395). In 2.13, too, it counts a user of the pool
    who is gone: empty memory that `empty_cache` keeps shows it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it has been ended
        torch._C._cuda_endAllocateToPool(index, pool)
    torch.cuda.empty_cache()
    segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == index]
    if any(each["segment_pool_id"] == pool and not each["active_size"] for each in segments):
        torch._C._cuda_releasePool(index, pool)
