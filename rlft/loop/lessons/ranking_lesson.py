"""What the lessons of `rlft rm` and `rlft dpo` share: an update on rankings, in micro-batches that tear none apart."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rlft.data.examples import RankedTokens
from rlft.loop.lessons.supervised import AdapterLesson
from rlft.model.rows import Row, Tokens, parts_within
from rlft.plan.ranking_plan import RankingPlan
from rlft.types import Batch

AnyRankingPlan = TypeVar("AnyRankingPlan", bound=RankingPlan)

Terms = tuple[Tensor, dict[str, Tensor]]
"""(the loss of a ranking `[]`, with gradient; {metric: its value `[]`})."""


class RankingLesson(AdapterLesson[AnyRankingPlan]):
    """A lesson whose loss is a mean over rankings, each with completions of one prompt.

    ending: tokens by which each row is longer than prompt and completion.
    """

    ending = 0

    @abstractmethod
    def batch_of(self, rankings: Sequence[RankedTokens]) -> Batch:
        """The rows of these rankings, in the order of `rows_of`, on the CPU."""

    @abstractmethod
    def terms(self, rankings: Sequence[RankedTokens], batch: Batch) -> list[Terms]:
        """Loss and metrics of each ranking, by the role that learns; batch: that of `batch_of`, on the device."""

    def learn(self, rankings: Sequence[RankedTokens]) -> dict[str, float]:
        """Adds the gradient of the mean loss over the rankings; returns the means of the metrics."""
        roles, total, num_tokens = self.roles, 0.0, 0
        sums: dict[str, float] = defaultdict(float)
        with roles.training():
            for part in self.micro_batches(rankings):
                batch = roles.to_device(self.batch_of(part))
                with roles.learning(self.role):
                    terms = self.terms(part, batch)
                    loss = torch.stack([loss for loss, _ in terms]).sum() / len(rankings)
                    loss.backward()
                roles.check_gradients(self.role)
                total += loss.item()
                for name in terms[0][1]:
                    sums[name] += sum(torch.stack([metrics[name] for _, metrics in terms]).tolist())
                num_tokens += roles.forward.real_tokens(batch)
        means = {name: value / len(rankings) for name, value in sums.items()}
        return {"loss/total": total, **means, "tokens/trained": num_tokens}

    def micro_batches(self, rankings: Sequence[RankedTokens]) -> list[list[RankedTokens]]:
        """Splits the rankings in order to fit the token budget; a ranking that exceeds it is not split."""

        def texts_of(ranking: RankedTokens) -> list[tuple[Tokens, Tokens]]:
            return [(ranking.prompt, completion) for completion in ranking.completions]

        budget, packed = self.config.token_budget, self.roles.forward.packed
        return parts_within(rankings, texts_of, budget, packed=packed, ending=self.ending)

    def largest_part(self) -> list[RankedTokens]:
        """The micro-batch with the most tokens of an update on the rankings that have most, padding included."""
        forward = self.roles.forward

        def tokens_of(ranking: RankedTokens) -> int:
            lengths = [len(completion) + self.ending for completion in ranking.completions]
            if forward.packed:
                return len(ranking.prompt) + sum(lengths)
            return len(lengths) * (len(ranking.prompt) + max(lengths))

        rankings = sorted(self.plan.train.rankings, key=tokens_of, reverse=True)[: self.config.rankings_per_step]
        return max(self.micro_batches(rankings), key=lambda part: forward.network_tokens(self.batch_of(part)))


def rows_of(rankings: Sequence[RankedTokens]) -> list[Row]:
    """Every completion once, in the order of rankings; completions of one prompt form a group even across rankings."""
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(r.prompt for r in rankings))}
    return [(groups[r.prompt], r.prompt, completion) for r in rankings for completion in r.completions]


def of_each(values: Tensor, rankings: Sequence[RankedTokens]) -> Sequence[Tensor]:
    """The values `[rows]` of the rows of these rankings, apart for each ranking."""
    return values.split([len(ranking.completions) for ranking in rankings])
