"""Log-probs and entropies of single tokens of a few completions, for people to look at (`rlft report`).

The policy reads some of the step's groups before and after the update, without gradient and without dropout. That
shows what an update did to each token, and where engine and trainer disagree. The run is not affected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlft.batch import Decode
from rlft.model.adapter_folder import POLICY
from rlft.model.networks import Networks
from rlft.runs.lines import TokenValues
from rlft.types import Batch

DIGITS = 5
UNFINISHED = "\ufffd"  # a tokenizer decodes part of a character to this


class Inspection:
    """Inspects at most so many groups of a step: before its update when it is made, and after it by `finish`.

    zero_gradient_B: bool `[B]`, rows that contribute nothing; groups of other rows come first.
    """

    def __init__(
        self,
        roles: Networks,
        batch: Batch,
        prompt_lengths: Sequence[int],
        zero_gradient_B: Tensor,
        num_groups: int,
        decode: Decode,
    ) -> None:
        self.roles, self.prompt_lengths, self.decode = roles, prompt_lengths, decode
        self.rows = chosen_rows(batch.group_ids, zero_gradient_B, num_groups)
        self.batch = batch.select(self.rows)
        self.old_BT = roles.logprobs(self.batch, POLICY)
        reference = roles.reference_role
        self.reference_BT = roles.logprobs(self.batch, reference) if roles.has(reference) else None

    def finish(self) -> dict[int, TokenValues]:
        """{row of the step's batch: the values of its tokens}."""
        batch, (after_BT, entropy_BT) = self.batch, self._after()
        advantages = torch.zeros_like(self.old_BT) if batch.advantages is None else batch.advantages
        values = {}
        for i, row in enumerate(self.rows.tolist()):
            completion = slice(self.prompt_lengths[row], int(batch.attention_mask[i].sum()))
            sampled_T = batch.loss_mask[i, completion]
            old, after, reference, entropy, advantage = (
                _of_sampled(None if values_BT is None else values_BT[i, completion], sampled_T)
                for values_BT in (self.old_BT, after_BT, self.reference_BT, entropy_BT, advantages)
            )
            values[row] = TokenValues(
                text=pieces(batch.token_ids[i, completion].tolist(), self.decode),
                old=old,
                after=after,
                reference=reference,
                entropy=entropy,
                advantage=advantage,
            )
        return values

    def _after(self) -> tuple[Tensor, Tensor]:
        """The current policy's log-probs and entropies `[B, T]`."""
        roles, logprobs, entropy = self.roles, torch.zeros_like(self.old_BT), torch.zeros_like(self.old_BT)
        with torch.no_grad():
            for part, micro in roles.forward.parts(self.batch, roles.token_budget):
                with roles.replaying(micro.batch, micro.layout):
                    outputs = roles.forward(micro.batch, roles.temperature, True, layout=micro.layout)
                assert outputs.entropy is not None, "it was requested"
                logprobs[part], entropy[part] = outputs.logprobs.to(logprobs), outputs.entropy.to(entropy)
        return logprobs, entropy


def chosen_rows(group_ids: Tensor, zero_gradient_B: Tensor, num_groups: int) -> Tensor:
    """Rows of whole groups, in order: groups with a row that has a gradient take precedence over the others."""
    groups = list(dict.fromkeys(group_ids.tolist()))
    is_zero = {group: bool(zero_gradient_B[group_ids == group].all()) for group in groups}
    chosen = sorted(groups, key=lambda group: is_zero[group])[:num_groups]
    return torch.isin(group_ids, torch.tensor(chosen, device=group_ids.device)).nonzero()[:, 0]


def pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds; of the tokens of one character, only the last adds text.

    Tokens are decoded together with those of the previous piece, as a tokenizer may join a token to the one before.
    """
    texts = []
    start = end = 0  # the start of the previous piece, and the end of the tokens whose text has been added
    for i in range(len(token_ids)):
        previous, text = decode(token_ids[start:end]), decode(token_ids[start : i + 1])
        if text.endswith(UNFINISHED) and i + 1 < len(token_ids):
            texts.append("")
            continue
        texts.append(text[len(previous) :])
        start, end = end, i + 1
    return texts


def _of_sampled(values_T: Tensor | None, sampled_T: Tensor) -> list[float | None]:
    """The values of sampled tokens, and None for the others; None for all without values."""
    if values_T is None:
        return [None] * len(sampled_T)
    return [
        round(value, DIGITS) + 0.0 if is_sampled else None  # + 0.0: no -0.0
        for value, is_sampled in zip(values_T.tolist(), sampled_T.tolist(), strict=True)
    ]
