"""Drafts of tokens that are about to be sampled, from what a run has sampled before.

Each completion votes: after these last tokens came this one. Earlier completions of the same prompt are asked first,
then all, about a longer context before a shorter one. How far a draft has to lead follows the number of rows: a token
that is drafted in vain costs its share of a pass, while a right one saves the less, the more rows share the pass.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rlft.config.schema import AUTO, HISTORY, GenerationConfig
from rlft.system.lazy import torch
from rlft.types import Group

if TYPE_CHECKING:
    from torch import Tensor

ROWS = {"cpu": 16, "cuda": 96}
"""The most rows that are sampled with drafts, by device: with more, a pass is bound by its products. A pass has at most
twice as many tokens."""

MOST = 4  # drafts of a row in a pass
SAME, OF_ANY = 4, (6, 4, 2)
"""The last tokens that are a context for completions of the same prompt, and for those of any."""

LONGEST = max(OF_ANY)
COLUMNS = ("token_ids", "lengths", "prompts")  # of a checkpoint
LEADS = 6  # the most that is ever asked for
KEPT = 2**17  # tokens; with so many, the older half of the completions is forgotten. They take 80 MB at most.


class Drafts:
    """What a run has sampled for one purpose, as a source of drafts; the same completions give the same drafts.

    rows: the most rows that are sampled with drafts.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._rows: list[tuple[int, Sequence[int]]] = []  # (key of the prompt, token ids) of what is remembered
        self._num_tokens = 0  # of them
        self._leading: dict[int, tuple[int, int]] = {}  # {context: (the token that leads after it, by how many votes)}
        # Of drafts offered and accepted, tokens, and the rows of all passes: since the last call of `taken`.
        self.counts: Counter[str] = Counter()

    @classmethod
    def of(
        cls, generation: GenerationConfig, engine: str, device: str, together: int, *, in_process: bool = True
    ) -> Drafts | None:
        """Those of this config; None where it has none, and where `auto` does without.

        together: number of completions of a call; in_process: whether the engine is in the run's own process.
        """
        rows = ROWS.get(device, 0) if generation.draft_rows == AUTO else generation.draft_rows
        can = in_process and generation.named(engine).why_no_drafts is None
        # Measured on a CPU: with more rows at the start, what they save is less than what the smallest models pay.
        pays = device == "cpu" and 2 * together <= rows
        wanted = generation.drafts == HISTORY or (generation.drafts == AUTO and pays)
        return cls(rows) if can and wanted else None

    def offers(self, keys: Sequence[int], said: Sequence[Sequence[int]], room: Sequence[int]) -> list[list[int]]:
        """Drafts of the next tokens of each row, `room` at most.

        keys: of the rows' prompts (`key_of`); said: the last tokens of each row, all if there are not LONGEST.
        """
        lead = 1 + (LEADS - 1) * len(keys) // self.rows
        most = most_drafts(len(keys), self.rows)
        offers = [self._offer(key, row, min(most, left), lead) for key, row, left in zip(keys, said, room, strict=True)]
        self.counts.update(offered=sum(map(len, offers)))
        return offers

    def _offer(self, key: int, said: Sequence[int], room: int, lead: int) -> list[int]:
        row = list(said)
        while len(row) - len(said) < room:
            found = (self._leading.get(context, (0, 0)) for context in contexts(key, row))
            token = next((token for token, by in found if by >= lead), None)
            if token is None:
                break
            row.append(token)
        return row[len(said) :]

    def add(self, groups: Sequence[Group]) -> None:
        """Remembers these completions."""
        for group in groups:
            key = key_of(group.prompt.token_ids)
            for rollout in group.rollouts:
                self._add(key, rollout.completion.token_ids)

    def _add(self, key: int, token_ids: Sequence[int]) -> None:
        while self._num_tokens >= KEPT:  # also if the newer half has most tokens: what is kept is kept by a resume
            self._remember(self._rows[(len(self._rows) + 1) // 2 :])
        self._rows.append((key, token_ids))
        self._num_tokens += len(token_ids)
        for place, token in enumerate(token_ids[:-1]):  # a draft of a row's last token would save no pass
            for context in contexts(key, token_ids[max(0, place - LONGEST) : place]):
                leading, lead = self._leading.get(context, (token, 0))
                if leading == token:
                    self._leading[context] = token, min(LEADS, lead + 1)
                else:
                    self._leading[context] = (leading, lead - 1) if lead else (token, 1)

    def _remember(self, rows: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Remembers these and no others."""
        self._rows, self._num_tokens, self._leading = [], 0, {}
        for row in rows:
            self._add(*row)

    def taken(self) -> Counter[str]:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    # -- in a checkpoint -----------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        """What is remembered, as int64: all tokens, one completion after the other, the completions' numbers of tokens,
        and the keys of their prompts."""
        rows = [ids for _, ids in self._rows]
        values = [t for ids in rows for t in ids], list(map(len, rows)), [key for key, _ in self._rows]
        return {name: torch.tensor(of, dtype=torch.int64) for name, of in zip(COLUMNS, values, strict=True)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        token_ids, lengths, keys = (state[name].tolist() for name in COLUMNS)
        tokens = iter(token_ids)
        self._remember((key, tuple(islice(tokens, n))) for n, key in zip(lengths, keys, strict=True))


def most_drafts(rows: int, allowed: int) -> int:
    """Of each of so many rows, where `allowed` rows at most are sampled with drafts."""
    return min(MOST, 2 * allowed // rows - 1)


def widest_pass(rows: int, max_tokens: int, allowed: int) -> tuple[int, int]:
    """(rows, tokens of each) of the pass with the most tokens, of those that have drafts; (0, 0) if none has."""
    each = range(min(rows, allowed) if max_tokens > 1 else 0, 0, -1)  # of two, the one with more rows
    passes = ((number, min(1 + most_drafts(number, allowed), max_tokens - 1)) for number in each)
    return max(passes, key=math.prod, default=(0, 0))


def savings(counts: Mapping[str, int]) -> dict[str, float]:
    """The metrics of drafts with these counts."""
    share = {"drafts/accepted_share": counts["accepted"] / counts["offered"]} if counts.get("offered") else {}
    return share | ({"drafts/tokens_per_pass": counts["tokens"] / counts["rows"]} if counts.get("rows") else {})


def key_of(prompt: Sequence[int]) -> int:
    return zlib.crc32(array("q", prompt).tobytes())


def contexts(key: int, said: Sequence[int]) -> list[int]:
    """Numbers of the contexts after these tokens of a completion, to be asked in this order. One that has fewer tokens
    than its kind is the beginning of a completion."""
    last = tuple(said[-LONGEST:])
    return [hash((-1, key, *last[-SAME:])), *(hash((n, *last[-n:])) for n in OF_ANY)]
