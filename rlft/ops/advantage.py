"""Advantages: from the rewards of siblings, from returns over the tokens of a completion, and from a critic's values.

Siblings, completions of one prompt, share a group id (any integers, in any order). values[b, t] is the critic's V_t:
what is still to come before token t is drawn. A row's masked tokens follow upon each other: what lies between them
(another's turn, a tool's answer) is no step, earns nothing and is not discounted.

Where `ends` (bool `[B, T]`, `last_of_turns`) is given, a row is several episodes, each up to a masked token where it is
True: nothing that comes after such a token counts at it or before.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.ops.lazy import torch
from rlft.ops.mask import keep, row_sum

if TYPE_CHECKING:
    from torch import Tensor


class Std(StrEnum):
    """What a centred reward is divided by: the group's (`population`: n, `sample`: n - 1), or the `batch`'s (n - 1)."""

    population = "population"
    sample = "sample"
    none = "none"
    batch = "batch"


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Each entry's group mean, `[B]`."""
    return _group_sum(values, group_ids) / group_size(values, group_ids)


def group_size(values: Tensor, group_ids: Tensor) -> Tensor:
    """Each entry's number of siblings, itself included, `[B]` in the dtype of `values`."""
    return _group_sum(torch.ones_like(values), group_ids)


def group_std(values: Tensor, group_ids: Tensor, correction: int) -> Tensor:
    """Each entry's group standard deviation, `[B]`; the squares are divided by max(n - correction, 1)."""
    squares_B = _group_sum((values - group_mean(values, group_ids)).square(), group_ids)
    return (squares_B / (group_size(values, group_ids) - correction).clamp(min=1)).sqrt()


def group_is_equal(values: Tensor, group_ids: Tensor) -> Tensor:
    """Whether all of an entry's group have exactly the same value (so also when it is alone), bool `[B]`."""
    groups, index = group_ids.unique(return_inverse=True)
    blank = values.new_zeros(len(groups))
    low = blank.scatter_reduce(0, index, values, "amin", include_self=False)
    high = blank.scatter_reduce(0, index, values, "amax", include_self=False)
    return (low == high)[index]


def group_zscore(rewards: Tensor, group_ids: Tensor, std: Std, eps: float) -> Tensor:
    """(R_i - mean) / (std + eps) within the group, `[B]`. Exactly 0 in a group of one or of equal rewards.

    `std=none` divides by nothing, not even eps (Dr. GRPO, arXiv 2503.20783). GRPO: arXiv 2402.03300, section 4.1.2.
    """
    centred_B = rewards - group_mean(rewards, group_ids)
    match std:
        case Std.none:
            advantages_B = centred_B
        case Std.population:
            advantages_B = centred_B / (group_std(rewards, group_ids, correction=0) + eps)
        case Std.sample:
            advantages_B = centred_B / (group_std(rewards, group_ids, correction=1) + eps)
        case Std.batch:
            one_group = torch.zeros_like(group_ids)
            advantages_B = centred_B / (group_std(rewards, one_group, correction=1) + eps)
    return _zero_where_equal(advantages_B, rewards, group_ids)


def decoupled_zscore(rewards: Tensor, weights: Tensor, group_ids: Tensor, std: Std, eps: float) -> Tensor:
    """z / (std(z) + eps) with z the weighted sum of each reward's own group z-score, std over all B (n - 1), `[B]`.

    Each reward is normalised in its group by itself before they are added, so that a reward with a small spread is not
    lost beside one with a large spread, and different mixes of rewards with the same sum stay apart. The paper also
    subtracts the mean over the batch, which is 0 as that of every group is. Exactly 0 in a group in which no reward
    differs. rewards, weights `[B, K]`: a column a reward. GDPO, arXiv 2601.05242, equations 4 to 6.
    """
    assert rewards.shape == weights.shape, (rewards.shape, weights.shape)
    scores_K = [group_zscore(column, group_ids, std, eps) for column in rewards.unbind(-1)]
    if not scores_K:
        return rewards.new_zeros(len(rewards))
    summed_B = (torch.stack(scores_K, -1) * weights).sum(-1)
    return summed_B / (group_std(summed_B, torch.zeros_like(group_ids), correction=1) + eps)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R_i minus the mean of its siblings = G/(G-1) * (R_i - mean), `[B]`. RLOO, arXiv 2402.14740.

    Needs G >= 2; one alone has no baseline and gets 0, as does a group of equal rewards, exactly.
    """
    size_B = group_size(rewards, group_ids)
    advantages_B = size_B / (size_B - 1).clamp(min=1) * (rewards - group_mean(rewards, group_ids))
    return _zero_where_equal(advantages_B, rewards, group_ids)


def process_advantages(
    token_rewards: Tensor,
    step_ends: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    std: Std,
    eps: float,
    ends: Tensor | None = None,
) -> Tensor:
    """The sum of the normalised scores of the steps that end with or after a token, `[B, T]`; 0 outside the mask.

    A step's score is normalised among all steps of its group, whichever sibling's: (r - mean) / (std + eps), as
    `group_zscore` does. So exactly 0 in a group with one step or with equal scores, and after a row's last step.
    token_rewards `[B, T]`: scores at step ends (elsewhere ignored). GRPO, arXiv 2402.03300, section 4.1.3.
    """
    step_ends_BT = step_ends & mask
    ids_BT = group_ids.unsqueeze(-1).expand(mask.shape)
    scores = group_zscore(token_rewards[step_ends_BT], ids_BT[step_ends_BT], std, eps)
    return reward_to_go(
        torch.zeros_like(token_rewards).masked_scatter(step_ends_BT, scores), mask, gamma=1.0, ends=ends
    )


def steps_are_equal(token_rewards: Tensor, step_ends: Tensor, group_ids: Tensor) -> Tensor:
    """Whether all step scores of an entry's group are exactly the same, or there are none, bool `[B]`."""
    groups, index = group_ids.unique(return_inverse=True)
    scores, index_of_step = token_rewards[step_ends], index.unsqueeze(-1).expand(step_ends.shape)[step_ends]
    low = scores.new_full((len(groups),), torch.inf).scatter_reduce(0, index_of_step, scores, "amin")
    high = scores.new_full((len(groups),), -torch.inf).scatter_reduce(0, index_of_step, scores, "amax")
    return (low >= high)[index]  # without a step: inf >= -inf


def place_at_last_token(values: Tensor, mask: Tensor, ends: Tensor | None = None) -> Tensor:
    """`[B, T]` with values `[B]` on each row's last masked token and 0 elsewhere; nothing of an empty row's.

    With `ends` on all of them: a row's value is that of each of its episodes.
    """
    return keep(values.unsqueeze(-1).expand(mask.shape), _is_last(mask) if ends is None else ends)


def last_of_turns(turn_ends: Tensor | None, mask: Tensor) -> Tensor:
    """The masked tokens that end a turn, bool `[B, T]`: those that `turn_ends` names, and each row's last."""
    return _is_last(mask) if turn_ends is None else (turn_ends & mask) | _is_last(mask)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float, ends: Tensor | None = None) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over each row's masked tokens, `[B, T]`; 0 outside the mask."""
    assert rewards.shape == mask.shape, (rewards.shape, mask.shape)
    rewards_BT = keep(rewards, mask)
    returns_BT, return_B = torch.zeros_like(rewards_BT), rewards_BT.new_zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        if ends is not None:
            return_B = return_B.masked_fill(ends[:, t], 0.0)
        return_B = torch.where(mask[:, t], rewards_BT[:, t] + gamma * return_B, return_B)
        returns_BT[:, t] = return_B
    return keep(returns_BT, mask)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    truncated: Tensor | None,
    bootstrap: bool,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns = A + V, both `[B, T]` and 0 outside the mask.

    A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t. V past a row's end is 0 where the model stopped;
    with `bootstrap`, where the length limit cut it off (truncated, bool `[B]`; None: nowhere), it is taken to be V of
    the last token, the nearest known. GAE, arXiv 1506.02438, equation 16.
    """
    rewards_BT, values_BT = keep(rewards, mask), keep(values, mask)
    past_B = _value_past_end(values_BT, mask, truncated, bootstrap)
    errors_BT = rewards_BT + gamma * _successors(values_BT, mask, past_B, ends) - values_BT
    advantages_BT = reward_to_go(errors_BT, mask, gamma * lam, ends)
    return advantages_BT, advantages_BT + values_BT


def n_step(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    n: int,
    truncated: Tensor | None,
    bootstrap: bool,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """n-step advantages and returns = A + V, both `[B, T]` and 0 outside the mask.

    A_t = sum_{k<n} gamma^k r_{t+k} + gamma^n V_{t+n} - V_t. A row that ends L < n tokens later has its L rewards and
    gamma^L V past the end, which is as in `gae`. A2C: arXiv 1602.01783, section 4.
    """
    assert n >= 1, n
    rewards_BT, values_BT = keep(rewards, mask), keep(values, mask)
    past_B = _value_past_end(values_BT, mask, truncated, bootstrap)
    returns_BT = values_BT
    for _ in range(min(n, mask.shape[1])):  # beyond the longest row nothing changes any more
        returns_BT = keep(rewards_BT + gamma * _successors(returns_BT, mask, past_B, ends), mask)
    advantages_BT = returns_BT - values_BT
    return advantages_BT, advantages_BT + values_BT


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) over all masked tokens together (n - 1), `[B, T]`; 0 outside the mask.

    Exactly 0 where there are fewer than two tokens, or all are equal. values: of the whole step, not of a micro-batch.
    """
    tokens = values[mask]
    if len(tokens) < 2 or tokens.amin() == tokens.amax():
        return torch.zeros_like(values)
    return keep((values - tokens.mean()) / (tokens.std() + eps), mask)


def _is_last(mask: Tensor) -> Tensor:
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)


def _value_past_end(values: Tensor, mask: Tensor, truncated: Tensor | None, bootstrap: bool) -> Tensor:
    if truncated is None or not bootstrap:
        return values.new_zeros(len(mask))
    return keep(row_sum(values, _is_last(mask)), truncated)


def _successors(values: Tensor, mask: Tensor, past_B: Tensor, ends: Tensor | None) -> Tensor:
    """At each token the value of the row's next masked token, `[B, T]`; `past_B` if there is none, 0 at other ends."""
    num_tokens = mask.shape[1]
    index_BT = torch.where(mask, torch.arange(num_tokens, device=mask.device), num_tokens)
    at_or_after_BT = index_BT.flip(-1).cummin(-1).values.flip(-1)
    after_BT = torch.cat([at_or_after_BT, at_or_after_BT.new_full((len(mask), 1), num_tokens)], 1)[:, 1:]
    successors_BT = torch.cat([values, past_B.unsqueeze(-1)], 1).gather(1, after_BT)
    return successors_BT if ends is None else keep(successors_BT, ~ends | _is_last(mask))


def _zero_where_equal(advantages: Tensor, rewards: Tensor, group_ids: Tensor) -> Tensor:
    # The mean of three times 0.1 is not 0.1: without this, rounding noise over a tiny std becomes an advantage.
    return advantages.masked_fill(group_is_equal(rewards, group_ids), 0.0)


def _group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    assert values.shape == group_ids.shape, (values.shape, group_ids.shape)
    assert values.ndim == 1
    groups, index = group_ids.unique(return_inverse=True)
    return values.new_zeros(len(groups)).index_add(0, index, values)[index]
