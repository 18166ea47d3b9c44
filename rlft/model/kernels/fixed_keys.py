"""Keys and values of decoding in the same places of memory for every batch, as CUDA graphs have to find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlft.model.kernels.flash_attention import Runs

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(keys, values) by number of the call of attention in a pass."""


@dataclass(eq=False)
class FixedKeys:
    """Room for the keys and values of prompts and completions, and what tells attention where they are.

    A batch with fewer rows or tokens than there is room for uses the first ones. Only a batch that needs more moves it.
    """

    rows: int = 0
    tokens: int = 0  # the most of a completion
    prompts: int = 0
    prompt_tokens: int = 0  # of all prompts
    of_prompts: Pairs = ()  # `[prompt_tokens, K, D]` each
    own: Pairs = ()  # those of completions, `[rows, tokens, K, D]` each
    starts: Tensor = field(default_factory=lambda: torch.empty(0))  # int32 `[prompts + 1]`, of prompts among the tokens
    siblings: Tensor = field(default_factory=lambda: torch.empty(0))  # the same of their completions among the rows
    first_R: Tensor = field(default_factory=lambda: torch.empty(0))  # int64, the position of each row's first own token
    row_R: Tensor = field(default_factory=lambda: torch.empty(0))  # int64, 0, 1, 2 ..
    place: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 `[1]`, that of the next token among its row's

    def fit(
        self, rows: int, tokens: int, prompts: int, of_prompts: Pairs, enlarged: Callable[[int, int], int] = max
    ) -> None:
        """Makes room for so many rows of so many tokens, and for the keys and values of so many prompts; where it has
        less, it moves, and what it held is lost. `enlarged` gives room for tokens of prompts: (there is, needed)."""
        needed, room = (rows, tokens, prompts, len(of_prompts[0][0])), self.sizes
        if all(has >= needs for has, needs in zip(room, needed, strict=True)):
            return
        self.rows = self.tokens = self.prompts = self.prompt_tokens = 0  # until all of the room is there
        self.of_prompts = self.own = ()  # they are freed before the larger ones are made
        rows, tokens, prompts, _ = map(max, room, needed)
        prompt_tokens = enlarged(room[-1], needed[-1])
        self.of_prompts, self.own = (
            [(k.new_empty(*size, *k.shape[1:]), v.new_empty(*size, *v.shape[1:])) for k, v in of_prompts]
            for size in ((prompt_tokens,), (rows, tokens))
        )
        device = of_prompts[0][0].device
        self.starts, self.siblings = (torch.zeros(prompts + 1, dtype=torch.int32, device=device) for _ in "ks")
        self.first_R, self.row_R = (torch.arange(rows, device=device) for _ in "fr")
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows, self.tokens, self.prompts, self.prompt_tokens = rows, tokens, prompts, prompt_tokens

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.rows, self.tokens, self.prompts, self.prompt_tokens

    @property
    def tensors(self) -> list[Tensor]:
        pairs = [x for pair in (*self.of_prompts, *self.own) for x in pair]
        return [*pairs, self.starts, self.siblings, self.first_R, self.row_R, self.place]

    def hold(self, of_prompts: Pairs, starts: Tensor) -> Runs:
        """Copies the keys and values of a batch's prompts here, whose runs start so; returns these. No row has an own
        token yet."""
        for fixed, given in zip(self.of_prompts, of_prompts, strict=True):
            for room, x in zip(fixed, given, strict=True):
                room[: len(x)].copy_(x)
        self.starts.fill_(len(of_prompts[0][0]))  # prompts that the batch does not have are empty
        self.starts[: len(starts)].copy_(starts)
        self.place.zero_()
        return Runs(starts=self.starts, longest=self.prompt_tokens)

    def arrange(self, counts_U: Tensor, first_R: Tensor) -> Runs:
        """Notes how many rows each prompt has (int64, on the host), and the position of each row's first own token
        (int64, on the device); returns the siblings as runs of rows."""
        ends = counts_U.cumsum(0).int()
        more = ends[-1:].expand(self.prompts - len(ends))
        self.siblings[1:].copy_(torch.cat([ends, more]))
        self.first_R[: len(first_R)].copy_(first_R)
        return Runs(starts=self.siblings, longest=self.rows)

    def keep(self, rows: Tensor, written: int) -> None:
        """Moves these rows (int64, ascending, on the device) to the front, of whose tokens so many are written."""
        for buffer in (x for pair in self.own for x in pair):
            filled = buffer[:, :written]
            filled[: len(rows)].copy_(filled.index_select(0, rows))
