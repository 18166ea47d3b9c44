"""Decoding: forward passes of a chunk of prompts and draws from their logits, until every completion has ended.

A row's draws have their own noise, a number for each place, so that a completion depends on its seed alone. That is why
drafts of its next tokens, computed together in one pass, change nothing: a draft is kept if it equals what is drawn in
its place, and the first draw that equals none counts like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlft.generation.drafts import LONGEST, Drafts, key_of
from rlft.generation.engine import Ids, TokenCallback
from rlft.generation.memory import FLOAT32, INT64
from rlft.generation.stops import StopStrings
from rlft.system.device import widest
from rlft.system.lazy import torch
from rlft.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64
"""Number of tokens in a block of the vocabulary: to draw a token, a block is drawn first, then a token inside it."""

AT_ONCE = 2**17  # the most probabilities that are turned into float64 at a time
COMPACT_AT = 0.25  # finished rows are dropped from the cache once they are this share of it: dropping copies the others
NOTES_AT_ONCE = 64  # number of tokens after which the experts that they went to leave the device

SYNCHRONOUS = ("cpu",)  # devices that nothing has to wait for
READ_EVERY = 8
"""Number of tokens after which the host reads what a GPU has sampled, for which it has to wait; each one if somebody
else is told of it at once. Rows that end in between are computed until then."""


class Decoder(Protocol):
    """The forward passes of one chunk: prompts once, then one token a row. Holds the keys and values."""

    def checks(self) -> bool:
        """Whether it can compute several tokens of a row together, and take some of them back (`check`)."""
        ...

    def prefill(self, n: int) -> Tensor: ...

    def step(self, token_R: Tensor) -> Tensor: ...

    def check(self, token_N: Tensor, row_N: Tensor, place_N: Tensor) -> Tensor:
        """As `PrefixCache.check`; no `step` comes after it."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drops every other row from the batch. The rows to keep, int64 in ascending order, are on the host."""
        ...

    def fill(self) -> None: ...


class NotingDecoder:
    """A decoder that keeps the experts to which tokens go, `[tokens, layers, k]`, in main memory.

    noted: gives the experts of the tokens of its last pass.
    lengths: number of tokens of each prompt.
    """

    def __init__(self, decoder: Decoder, noted: Callable[[], Tensor], lengths: Sequence[int]) -> None:
        self._decoder, self._noted, self._lengths = decoder, noted, lengths
        self.checks = decoder.checks
        self._prompts: Sequence[Tensor] = ()
        # (rows, places of their tokens, experts of those `[N, layers, k]`); a later one is what counts of a place.
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows = torch.empty(0, dtype=torch.int64)

    def prefill(self, n: int) -> Tensor:
        logits, experts = self._decoder.prefill(n), self._noted().cpu()
        width = len(experts) // len(self._lengths)
        if len(experts) == sum(self._lengths):  # one after the other; else padded on the left
            self._prompts = experts.split(list(self._lengths))
        else:
            rows = zip(experts.split(width), self._lengths, strict=True)
            self._prompts = [row[width - length :] for row, length in rows]
        self._rows = torch.arange(n * len(self._lengths))
        return logits

    def step(self, token_R: Tensor) -> Tensor:
        logits = self._decoder.step(token_R)
        self._note(self._rows, torch.full_like(self._rows, len(self._steps)))
        return logits

    def check(self, token_N: Tensor, row_N: Tensor, place_N: Tensor) -> Tensor:
        logits = self._decoder.check(token_N, row_N, place_N)
        self._note(self._rows[row_N], place_N)
        return logits

    def keep(self, rows: Tensor) -> None:
        self._decoder.keep(rows)
        self._rows = self._rows[rows]

    def fill(self) -> None:
        self._decoder.fill()

    def _note(self, rows_N: Tensor, places_N: Tensor) -> None:
        self._steps.append((rows_N, places_N, self._noted()))
        if len(self._steps) % NOTES_AT_ONCE == 0:
            self._fetch()

    def _fetch(self) -> None:
        """Moves what was noted to main memory, for which a GPU has to be waited for."""
        self._steps = [(rows, places, experts.cpu()) for rows, places, experts in self._steps]

    def experts(self, lengths: Sequence[int]) -> list[Tensor]:
        """The experts of each row's prompt and of its completion of this many tokens; those of the last token, which
        nothing was sampled after, are unknown."""
        from rlft.batch import unknown_expert

        self._fetch()
        each, n = self._prompts[0].shape[1:], len(lengths) // len(self._lengths)
        unknown = unknown_expert(self._prompts[0].dtype)
        most = max([*lengths, *(int(places.max()) + 1 for _, places, _ in self._steps)])
        completions = self._prompts[0].new_full((len(lengths), most, *each), unknown)
        for rows, places, experts in self._steps:
            completions[rows, places] = experts
        completions[range(len(lengths)), [length - 1 for length in lengths]] = unknown
        return [torch.cat([self._prompts[r // n], completions[r, :length]]) for r, length in enumerate(lengths)]


def uniforms(seeds: Sequence[int], n: int, max_tokens: int) -> Tensor:
    """float64 `[P * n, max_tokens]` in [0, 1): row r is drawn from its own seed, whatever else is in the batch."""
    rows = [
        torch.rand(max_tokens, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64)
        for seed in seeds
        for i in range(n)
    ]
    return torch.stack(rows)


@dataclass(eq=False)
class Sampled:
    """The tokens and log-probs of a chunk's rows so far, and when rows end: with one of the tokens in `own_ends`, where
    `watch` says so, or with their own limit.

    tokens_RT: int64, -1 after a row's end; logprobs_RT: float32, 0 there.
    """

    shape: torch.Size
    own_ends: frozenset[int]
    watch: StopStrings | None
    limits_R: Tensor
    callback: TokenCallback | None

    def __post_init__(self) -> None:
        self.tokens_RT, self.logprobs_RT = torch.full(self.shape, -1, dtype=torch.int64), torch.zeros(self.shape)
        self.ends = torch.tensor(sorted(self.own_ends), dtype=torch.int64)

    def add(self, rows: Tensor, place: Tensor, token: Tensor, logprob: Tensor) -> Tensor:
        """Adds a token to each of these rows, at its place in the row; bool: which of them do not end with it."""
        self.tokens_RT[rows, place], self.logprobs_RT[rows, place] = token, logprob
        if self.callback is not None:
            for row, token_id in zip(rows.tolist(), token.tolist(), strict=True):
                self.callback(row, token_id)
        live = ~torch.isin(token, self.ends)
        if self.watch is not None:
            steps = zip(rows.tolist(), token.tolist(), live.tolist(), strict=True)
            complete = [unfinished and self.watch.completes(row, token_id) for row, token_id, unfinished in steps]
            live = live & ~torch.tensor(complete, dtype=torch.bool)
        return live & (self.limits_R[rows] > place + 1)

    def add_several(self, rows: Tensor, first: int, token_ER: Tensor, bits_ER: Tensor, live_ER: Tensor) -> Tensor:
        """Adds the tokens of E places from `first` on to each of these rows, -1 after its end, with the bits of their
        log-probs; bool: which rows do not end with them, by `live_ER` and stop strings. All are int32."""
        live = live_ER[-1].bool()
        if self.watch is not None:
            ends = set(self.ends.tolist())
            for i, row in enumerate(rows.tolist()):
                for e, token in enumerate(token_ER[:, i].tolist()):
                    if token < 0 or token in ends:
                        break
                    if self.watch.completes(row, token):
                        live[i], token_ER[e + 1 :, i] = False, -1
                        break
        places = slice(first, first + len(token_ER))
        self.tokens_RT[rows, places] = token_ER.t().long()
        self.logprobs_RT[rows, places] = bits_ER.view(torch.float32).where(token_ER >= 0, 0.0).t()
        return live


def decode(decoder: Decoder, prompts: Ids, n: int, uniforms_RT: Tensor, sampling: Sampling, into: Sampled) -> None:
    """Samples n completions of each of these prompts."""
    rows, last = torch.arange(len(uniforms_RT)), int(into.limits_R.max())  # completions that are still in the batch
    live = torch.ones_like(rows, dtype=torch.bool)  # those of them that have not ended, as far as is known
    logits = decoder.prefill(n)
    device = logits.device
    few = sampling.drafts.rows if sampling.drafts is not None and decoder.checks() else 0
    every = 1 if device.type in SYNCHRONOUS or into.callback is not None or len(rows) <= few else READ_EVERY
    uniforms_RT = uniforms_RT.to(device, widest(device))
    unread: list[tuple[Tensor, Tensor]] = []
    for t in range(last):
        token, logprob = draw(logits, uniforms_RT[:, t], sampling)
        unread.append((token, logprob))
        if len(unread) == every or t + 1 == last:
            for i, (token_R, logprob_R) in enumerate(_on_host(unread), t + 1 - len(unread)):
                there = live.nonzero()[:, 0]
                live[there] = into.add(rows[there], torch.full_like(there, i), token_R[there], logprob_R[there])
                if sampling.drafts is not None:
                    sampling.drafts.counts.update(rows=len(there), tokens=len(there))
            unread = []
            if not live.any():
                break
            is_tail = int(live.sum()) <= few
            if is_tail or (~live).float().mean() >= COMPACT_AT:
                kept = live.nonzero()[:, 0]
                decoder.keep(kept)
                rows, live, there = rows[kept], live[kept], kept.to(device)
                uniforms_RT, token = uniforms_RT.index_select(0, there), token.index_select(0, there)
            if is_tail:
                keys = [key_of(prompts[row // n]) for row in rows.tolist()]
                del logits
                _decode_with_drafts(decoder, keys, rows, t, uniforms_RT, sampling, into)
                break
        logits = decoder.step(token)


def _decode_with_drafts(
    decoder: Decoder, keys: list[int], rows: Tensor, held: int, uniforms_RT: Tensor, sampling: Sampling, into: Sampled
) -> None:
    """Samples the rest of these rows, several tokens of a row in a pass where there are drafts of them.

    keys: of the rows' prompts; held: how many tokens of each row have gone through the network, all but the last one.
    """
    drafts: Drafts = sampling.drafts
    held_R, device = torch.full_like(rows, held), uniforms_RT.device
    while True:
        room = (into.limits_R[rows] - held_R - 2).tolist()  # a draft of the last token would save no pass
        ends = zip(rows.tolist(), (held_R + 1).tolist(), strict=True)
        said = [into.tokens_RT[row, max(0, end - LONGEST) : end].tolist() for row, end in ends]
        offers = drafts.offers(keys, said, room)
        input_N = torch.tensor([t for row, offer in zip(said, offers, strict=True) for t in (row[-1], *offer)])
        lengths_R = torch.tensor([1 + len(offer) for offer in offers])
        first_R, row_N = lengths_R.cumsum(0) - lengths_R, torch.arange(len(rows)).repeat_interleave(lengths_R)
        place_N = torch.arange(len(row_N)) + (held_R - first_R)[row_N]
        logits = decoder.check(input_N.to(device), row_N, place_N)
        there, where = torch.stack([row_N, place_N + 1]).to(device)
        [(token_N, logprob_N)] = _on_host([draw(logits, uniforms_RT[there, where], sampling)])
        live, going = torch.ones_like(rows, dtype=torch.bool), torch.arange(len(rows))
        for i in range(int(lengths_R.max())):
            n = first_R[going] + i
            live[going] = into.add(rows[going], place_N[n] + 1, token_N[n], logprob_N[n])
            held_R[going] += 1
            drafts.counts.update({"accepted" if i else "rows": len(going), "tokens": len(going)})
            going = going[live[going] & (lengths_R[going] > i + 1)]
            n = first_R[going] + i
            going = going[input_N[n + 1] == token_N[n]]
        if not live.any():
            return
        if not live.all():
            kept = live.nonzero()[:, 0]
            decoder.keep(kept)
            rows, held_R, keys = rows[kept], held_R[kept], [keys[row] for row in kept.tolist()]
            uniforms_RT = uniforms_RT.index_select(0, kept.to(device))


def _on_host(sampled: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """(token ids int64 `[R]`, their log-probs float32 `[R]`), one pair after the other; the host waits once for all."""
    tokens, logprobs = map(torch.stack, zip(*sampled, strict=True))
    both = torch.stack([tokens.int(), logprobs.view(torch.int32)], 1).cpu()
    return ((token_R.long(), logprob_R.view(torch.float32)) for token_R, logprob_R in both)


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token int64 `[R]`, its log-prob float32 `[R]`), by inverting the cumulative distribution at `uniform_R`.

    Temperature 0 takes the most likely token and gives its log-prob at temperature 1.
    """
    logits_RV = logits_RV.float()
    if sampling.temperature == 0:
        most_likely = logits_RV.max(-1)
        return most_likely.indices, most_likely.values - logits_RV.logsumexp(-1)
    logits_RV = _keep_most_likely(logits_RV, sampling)
    top_R1 = logits_RV.amax(-1, keepdim=True)
    weights_RV = (logits_RV - top_R1).exp_()
    token_R1, total_R1 = _invert(weights_RV, uniform_R[:, None])
    shifted_R1 = logits_RV.gather(-1, token_R1) - top_R1
    return token_R1[:, 0], (shifted_R1 - total_R1.log().float())[:, 0]


def bytes_of_a_draw(vocabulary: int, itemsize: int, sampling: Sampling) -> int:
    """The most bytes of a row that are alive in `draw`, without those that libraries take for a sort; its logits have
    so many each."""
    copies = (1 if sampling.temperature == 0 else 2) * FLOAT32
    if sampling.temperature and sampling.top_p < 1:  # the order besides, and the logits that are sorted
        is_changed = sampling.temperature != 1 or sampling.min_p > 0 or sampling.top_k > 0
        copies += INT64 + FLOAT32 * is_changed
    return vocabulary * (copies + FLOAT32 + (itemsize if itemsize < FLOAT32 else 0))  # as the head gives them, too


def _invert(weights_RV: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor]:
    """(the first index whose cumulative weight exceeds the uniform's share of the total `[R, 1]`, the totals `[R, 1]`).

    Its block of 64 weights is found first, by the blocks' sums, then the index inside: so no running sum goes over the
    whole vocabulary. The sums are in float64 where the device has it (the dtype of `uniform`), because float32 loses
    the tail of a vocabulary of 150,000. On a CPU they are of a few rows at a time, because torch makes a float64 copy
    for them there, which has to stay in the processor's cache.
    """
    blocks_RKB = torch.nn.functional.pad(weights_RV, (0, -weights_RV.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    rows = max(1, AT_ONCE // weights_RV.shape[-1]) if weights_RV.device.type == "cpu" else len(weights_RV)
    sums_RK = torch.cat([part.sum(-1, dtype=uniform_R1.dtype) for part in blocks_RKB.split(rows)])
    until_RK = sums_RK.cumsum(-1)
    total_R1 = until_RK[:, -1:]
    threshold_R1 = uniform_R1 * total_R1
    block_R1 = (until_RK <= threshold_R1).sum(-1, keepdim=True).clamp(max=until_RK.shape[-1] - 1)
    inside_RB = blocks_RKB.gather(1, block_R1[..., None].expand(-1, -1, BLOCK))[:, 0].to(uniform_R1.dtype)
    before_R1 = (until_RK - sums_RK).gather(-1, block_R1)
    place_R1 = (inside_RB.cumsum(-1) + before_R1 <= threshold_R1).sum(-1, keepdim=True)
    # Where rounding leaves no such index, it is the last one with a weight.
    last_R1 = BLOCK - 1 - (inside_RB.flip(-1) > 0).int().argmax(-1, keepdim=True)
    return block_R1 * BLOCK + torch.minimum(place_R1, last_R1), total_R1


def _keep_most_likely(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """Divides logits by the temperature, and sets those outside min_p, top_k and top_p, in this order, to -inf; the
    most likely token always stays."""
    if sampling.temperature != 1:
        logits_RV = logits_RV / sampling.temperature
    if sampling.min_p > 0:
        least_R1 = logits_RV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    if sampling.top_k > 0:
        kth = logits_RV.topk(min(sampling.top_k, logits_RV.shape[-1])).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_RV.sort(descending=True)
        mass = ordered.softmax(-1)
        del ordered
        outside = mass.cumsum(-1).sub_(mass) >= sampling.top_p
        drop = torch.zeros_like(outside).scatter(-1, order, outside)
        del order, mass
        logits_RV = logits_RV.masked_fill(drop, -torch.inf)
    return logits_RV
