"""Advantages: from the rewards of siblings, from returns over the tokens of a completion, and from a critic's values.

Siblings, the completions of one prompt, share a group id (any integers, in any order). values[b, t] is the critic's
V_t: the expected return before token t is sampled. The masked tokens of a row count as consecutive: tokens between them
(another's turn, a tool's answer) are not time steps, so that they have no reward and nothing is discounted over them.

With `ends` (bool `[B, T]`, `last_of_turns`), a row is several episodes. Each ends with a masked token at which `ends`
is True: no later reward or value counts for that token or earlier ones.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.ops.aggregate import keep, row_sum
from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Std(StrEnum):
    """Which standard deviation to divide by: the group's (`population`: n, `sample`: n - 1), or the batch's (n - 1)."""

    population = "population"
    sample = "sample"
    none = "none"
    batch = "batch"


def rounded(rewards: Tensor) -> Tensor:
    """The rewards in float64, to 43 of its 53 bits: sums of the same parts in another order are then the same number.

    A difference between rounding errors would become an advantage where it is divided by its own size. Splitting by
    Dekker, doi 10.1007/BF01397083, section 5.
    """
    scaled = rewards.double() * (2**10 + 1)
    return scaled - (scaled - rewards)


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
    """Whether all values in an entry's group are exactly the same (True in a group of one), bool `[B]`."""
    groups, index = group_ids.unique(return_inverse=True)
    zeros = values.new_zeros(len(groups))
    low = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    return (low == high)[index]


def group_zscore(rewards: Tensor, group_ids: Tensor, std: Std, eps: float) -> Tensor:
    """(R_i - mean) / (std + eps) within the group, `[B]`. Exactly 0 in a group of one or of equal rewards.

    With `std=none` nothing is divided, not even by eps (Dr. GRPO, arXiv 2503.20783). GRPO: arXiv 2402.03300, section
    4.1.2.
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
    """z / (std(z) + eps), where z is the weighted sum of the rewards' group z-scores, std over all B (n - 1), `[B]`.

    Each reward is normalised separately in its group before they are added, so that a reward with a small spread is not
    lost next to one with a large spread, and different combinations of rewards with the same sum stay distinct. The
    paper also subtracts the mean over the batch, which is 0, like that of every group. The result is exactly 0 in a
    group in which no reward differs. GDPO, arXiv 2601.05242, equations 4 to 6.

    `rewards` and `weights` are `[B, K]`, with a column per reward; `std` and `eps` as in `group_zscore`.
    """
    assert rewards.shape == weights.shape, (rewards.shape, weights.shape)
    scores_K = [group_zscore(column, group_ids, std, eps) for column in rewards.unbind(-1)]
    if not scores_K:
        return rewards.new_zeros(len(rewards))
    summed_B = (torch.stack(scores_K, -1) * weights).sum(-1)
    spread_B = group_std(summed_B, torch.zeros_like(group_ids), correction=1) + eps
    return torch.where(summed_B == 0, 0.0, summed_B / spread_B)  # 0 / 0 where all are equal and eps is 0


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R_i minus the mean of its siblings = G/(G-1) * (R_i - mean), `[B]`. RLOO, arXiv 2402.14740.

    A completion without siblings has no baseline. It gets exactly 0, as in a group of equal rewards.
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
    """The sum of the normalised scores of the steps that end at or after a token, `[B, T]`; 0 outside the mask.

    A step's score is normalised among all steps of all completions in its group, by `group_zscore`. The result is
    therefore exactly 0 in a group with a single step or with equal scores, and after a row's last step. GRPO, arXiv
    2402.03300, section 4.1.3.

    `token_rewards` (`[B, T]`) has the scores at the ends of steps, where `step_ends` is True; its other entries are
    ignored. `std` and `eps` as in `group_zscore`.
    """
    step_ends_BT = step_ends & mask
    ids_BT = group_ids.unsqueeze(-1).expand(mask.shape)
    scores = group_zscore(token_rewards[step_ends_BT], ids_BT[step_ends_BT], std, eps)
    return reward_to_go(
        torch.zeros_like(token_rewards).masked_scatter(step_ends_BT, scores), mask, gamma=1.0, ends=ends
    )


def steps_are_equal(token_rewards: Tensor, step_ends: Tensor, group_ids: Tensor) -> Tensor:
    """Whether all step scores in an entry's group are exactly the same, or there are none, bool `[B]`."""
    groups, index = group_ids.unique(return_inverse=True)
    scores, index_of_step = token_rewards[step_ends], index.unsqueeze(-1).expand(step_ends.shape)[step_ends]
    low = scores.new_full((len(groups),), torch.inf).scatter_reduce(0, index_of_step, scores, "amin")
    high = scores.new_full((len(groups),), -torch.inf).scatter_reduce(0, index_of_step, scores, "amax")
    return (low >= high)[index]  # without a step: inf >= -inf


def place_at_last_token(values: Tensor, mask: Tensor, ends: Tensor | None = None) -> Tensor:
    """The values `[B]` on each row's last masked token and 0 elsewhere, `[B, T]`; an empty row has only zeros.

    With `ends`, a row's value is on all of these tokens, as the value of each of its episodes.
    """
    return keep(values.unsqueeze(-1).expand(mask.shape), _is_last(mask) if ends is None else ends)


def last_of_turns(turn_ends: Tensor | None, mask: Tensor) -> Tensor:
    """The masked tokens that end a turn, bool `[B, T]`: those marked in `turn_ends`, and the last of each row."""
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
    n: int | None = None,
    value_lam: float | None = None,
    truncated: Tensor | None,
    bootstrap: bool,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages A and the critic's targets, both `[B, T]` and 0 outside the mask.

    A_t = sum_{k<n} (gamma lam)^k d_{t+k} with d_t = r_t + gamma V_{t+1} - V_t (GAE, arXiv 1506.02438, equation 16), cut
    after n terms (PPO, arXiv 1707.06347, equation 11). With lam 1 that is the n-step advantage
    sum_{k<n} gamma^k r_{t+k} + gamma^n V_{t+n} - V_t (A2C, arXiv 1602.01783, section 4). V past a row's end is 0. With
    `bootstrap`, where the length limit cut the row, it is V of the last token, the nearest known value.

    The target is A + V, or with `value_lam` V plus the advantage to the end with that lambda. With 1 it is what was
    earned from t on, in which no value of the critic is left (VC-PPO, arXiv 2503.01491, section 3.2).

    Args:
        rewards, values: reward and critic's value of each token, `[B, T]`.
        mask: the masked tokens, bool `[B, T]`.
        gamma, lam: discount per token, and lambda of GAE.
        n: the number of terms, at least 1; None: to the end.
        value_lam: lambda of the critic's target; None: the target is made of the advantage.
        truncated: whether the length limit cut the row, bool `[B]`; None: no row was cut.
        bootstrap: whether a value past the end of a truncated row is estimated.
        ends: the ends of episodes; None: each row is one.
    """
    assert n is None or n >= 1, n
    rewards_BT, values_BT = keep(rewards, mask), keep(values, mask)
    past_B = values_BT.new_zeros(len(mask))
    if truncated is not None and bootstrap:
        past_B = keep(row_sum(values_BT, _is_last(mask)), truncated)
    errors_BT = rewards_BT + gamma * _successors(values_BT, mask, past_B, ends) - values_BT
    if n is None:
        advantages_BT = reward_to_go(errors_BT, mask, gamma * lam, ends)
    else:
        advantages_BT, zero_B = errors_BT, torch.zeros_like(past_B)
        for _ in range(min(n, mask.shape[1]) - 1):  # more terms than the longest row has tokens change nothing
            later_BT = _successors(advantages_BT, mask, zero_B, ends)
            advantages_BT = keep(errors_BT + gamma * lam * later_BT, mask)
    if value_lam is None:
        return advantages_BT, advantages_BT + values_BT
    return advantages_BT, reward_to_go(errors_BT, mask, gamma * value_lam, ends) + values_BT


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) over all masked tokens together (n - 1), `[B, T]`; 0 outside the mask.

    Exactly 0 where there are fewer than two tokens, or all are equal. `values` must be those of the whole step, not of
    a micro-batch.
    """
    tokens = values[mask]
    if len(tokens) < 2 or tokens.amin() == tokens.amax():
        return torch.zeros_like(values)
    return keep((values - tokens.mean()) / (tokens.std() + eps), mask)


def _is_last(mask: Tensor) -> Tensor:
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)


def _successors(values: Tensor, mask: Tensor, past_B: Tensor, ends: Tensor | None) -> Tensor:
    """The value of the next masked token in the row, `[B, T]`; `past_B` at the last token, 0 at other ends."""
    num_tokens = mask.shape[1]
    index_BT = torch.where(mask, torch.arange(num_tokens, device=mask.device), num_tokens)
    at_or_after_BT = index_BT.flip(-1).cummin(-1).values.flip(-1)
    after_BT = torch.cat([at_or_after_BT, at_or_after_BT.new_full((len(mask), 1), num_tokens)], 1)[:, 1:]
    successors_BT = torch.cat([values, past_B.unsqueeze(-1)], 1).gather(1, after_BT)
    return successors_BT if ends is None else keep(successors_BT, ~ends | _is_last(mask))


def _zero_where_equal(advantages: Tensor, rewards: Tensor, group_ids: Tensor) -> Tensor:
    # The mean of three times 0.1 is not exactly 0.1: rounding errors divided by a tiny std would become advantages.
    return advantages.masked_fill(group_is_equal(rewards, group_ids), 0.0)


def _group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    assert values.shape == group_ids.shape, (values.shape, group_ids.shape)
    assert values.ndim == 1
    groups, index = group_ids.unique(return_inverse=True)
    return values.new_zeros(len(groups)).index_add(0, index, values)[index]
