"""What the networks say of single tokens, kept of a few completions for people to look at (`rlft report`).

The policy reads some of the step's groups before the update and after it, without gradient and without dropout: what
an update did to each token, and where engine and trainer disagree, is seen nowhere else. The run is not touched by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlft.collate import select
from rlft.model.roles import POLICY, Roles
from rlft.types import Batch, TokenValues

DIGITS = 5
UNFINISHED = "\ufffd"  # what a tokenizer decodes part of a character to

Decode = Callable[[Sequence[int]], str]


class Inspection:
    """Some groups of a step, read before its update when this is made, and after it by `finish`.

    batch: after credit. inert_B: bool `[B]`, rows that teach nothing; groups of others come first. decode: token ids to
    text, special tokens included.
    """

    def __init__(self, roles: Roles, batch: Batch, inert_B: Tensor, num_groups: int, decode: Decode) -> None:
        self.roles, self.decode = roles, decode
        self.rows = chosen_rows(batch.group_ids, inert_B, num_groups)
        self.batch = select(batch, self.rows)
        self.old_BT = roles.logprobs(self.batch, POLICY)
        self.reference_BT = roles.logprobs(self.batch, roles.reference_role)

    def finish(self) -> dict[int, TokenValues]:
        """{row of the step's batch: what was read of it}."""
        batch, (after_BT, entropy_BT) = self.batch, self._after()
        advantages = torch.zeros_like(self.old_BT) if batch.advantages is None else batch.advantages
        found = {}
        for i, row in enumerate(self.rows.tolist()):
            own = batch.loss_mask[i]
            found[row] = TokenValues(
                text=pieces(batch.token_ids[i][own].tolist(), self.decode),
                old=_rounded(self.old_BT[i][own]),
                after=_rounded(after_BT[i][own]),
                reference=_rounded(self.reference_BT[i][own]),
                entropy=_rounded(entropy_BT[i][own]),
                advantage=_rounded(advantages[i][own]),
            )
        return found

    def _after(self) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies `[B, T]` by the policy as it is now."""
        roles, logprobs, entropy = self.roles, torch.zeros_like(self.old_BT), torch.zeros_like(self.old_BT)
        with torch.no_grad():
            for part in roles.forward.micro_batches(self.batch, torch.arange(len(self.rows)), roles.token_budget):
                outputs = roles.forward(roles.to_device(select(self.batch, part)), roles.temperature, True)
                assert outputs.entropy is not None, "it was asked for"
                logprobs[part], entropy[part] = outputs.logprobs.to(logprobs), outputs.entropy.to(entropy)
        return logprobs, entropy


def chosen_rows(group_ids: Tensor, inert_B: Tensor, num_groups: int) -> Tensor:
    """Rows of whole groups, in their order: first of groups with a row that is not inert, then of the others."""
    groups = list(dict.fromkeys(group_ids.tolist()))
    inert = {group: bool(inert_B[group_ids == group].all()) for group in groups}
    chosen = sorted(groups, key=lambda group: inert[group])[:num_groups]
    return torch.isin(group_ids, torch.tensor(chosen, device=group_ids.device)).nonzero()[:, 0]


def pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds; of a character that several tokens make, all but the last add nothing.

    Decoded behind the tokens of the piece before, as a tokenizer may join a token to what stands before it.
    """
    found = []
    start = end = 0  # tokens of the piece before, and those whose text has been told
    for i in range(len(token_ids)):
        told, text = decode(token_ids[start:end]), decode(token_ids[start : i + 1])
        if text.endswith(UNFINISHED) and i + 1 < len(token_ids):
            found.append("")
            continue
        found.append(text[len(told) :])
        start, end = end, i + 1
    return found


def _rounded(values_T: Tensor) -> list[float]:
    return [round(value, DIGITS) + 0.0 for value in values_T.tolist()]  # + 0.0: no -0.0
