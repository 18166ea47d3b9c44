"""Completions as a policy would have sampled them, of texts that are made up to try what scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlft.config.schema import SamplingRoot
from rlft.generation.stops import shown_texts
from rlft.model.backbone import ends_of, load_tokenizer
from rlft.tokens.plain import PlainText
from rlft.tokens.text import RunTokenizer, without_tail
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from rlft.tokens.ends import TurnEnds

MAX_CHARS = 12  # of a token, about: no more of an endless text is tokenised than a completion may hold


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes texts as the policy of a run would: with its tokenizer, ends of turns, stop strings and limit."""

    tokenizer: RunTokenizer
    ends: TurnEnds
    sampling: Sampling

    @classmethod
    def of(cls, config: SamplingRoot) -> Writer:
        """That of this config, whose tokenizer is read."""
        tokenizer = load_tokenizer(config.model, config.prompts.template_variables)
        return cls(tokenizer, ends_of(config.model, config.prompts.style, tokenizer), config.generation.sampling)

    def completions(self, turns: Sequence[tuple[Prompt, str]], *, cuts: bool = False) -> list[Completion]:
        """The completions that say these texts, each as the rest of a turn that its prompt may have begun.

        As in a run they consist of the tokenizer's tokens with those that end a turn, and their texts are what these
        decode to. With `cuts` none is longer than a completion may be.
        """
        if not turns:
            return []
        most = self.sampling.max_tokens if cuts else None
        chars = None if most is None else MAX_CHARS * most
        texts = [without_tail(text[:chars], prompt.tail) + self.ends.lead for prompt, text in turns]
        said = [[*row, *self.ends.closing] for row in PlainText(self.tokenizer).ids_said(texts)]
        stopped = [most is None or len(ids) <= most for ids in said]
        said = [ids[:most] for ids in said]
        shown = shown_texts(self.tokenizer, said, stopped, self.sampling, self.ends.ids)
        reasons = [FinishReason.stop if is_stopped else FinishReason.length for is_stopped in stopped]
        return [
            Completion(text=text, token_ids=tuple(ids), logprobs=(0.0,) * len(ids), finish_reason=reason)
            for text, ids, reason in zip(shown, said, reasons, strict=True)
        ]


def group_of(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    rollouts = (Rollout(prompt=prompt, completion=completion, policy_version=0) for completion in completions)
    return Group(prompt=prompt, rollouts=tuple(rollouts))
