"""An engine that gives canned answers instead of a model's, for tests of everything behind the generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlft.generation.engine import Engine, EngineArgs, Generator
from rlft.generation.stops import StopStrings, plain_decoder, shown_texts
from rlft.tokens.text import RunTokenizer, TurnEnds, decode, turn_ends, without_tail
from rlft.types import Adapter, Completion, FinishReason, Group, Prompt, Rollout, Sampling, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted(Engine):
    """`generation.scripted`; meanings and defaults are in configs/generation/auto.yaml."""

    title: ClassVar[str] = "the scripted engine"
    serves_whole_models: ClassVar[bool] = True

    answers: Mapping[str, Any]

    def check(self, *, plain_kernels: bool) -> None:
        if not (self.answers and all(isinstance(texts, list) and texts for texts in self.answers.values())):
            problem = "must give a list of strings for prompt ids, or for * (every other prompt)"
            raise UserError("answers", problem, got=dict(self.answers), remedy="give for instance {*: [yes, no]}")

    def open(self, args: EngineArgs) -> ScriptedGenerator:
        return ScriptedGenerator(self.answers, args.tokenizer, args.ends)


class ScriptedGenerator(Generator):
    """The live generator of the scripted engine.

    Completion i of a prompt with n texts is text number (seed + i) modulo n. In a text, `{answer}` stands for the
    prompt's reference answer. In place of a text there may be a list of the turns of a conversation, the last of which
    is repeated. What the prompt has begun to say already (`Prompt.tail`) is not said twice.
    Log-probs are 0: nothing is sampled.

    answers: {prompt id, or "*" for every other prompt: texts}.
    ends: what ends a turn; None: what the tokenizer names as its end.
    """

    def __init__(
        self, answers: Mapping[str, Sequence[Any]], tokenizer: RunTokenizer, ends: TurnEnds | None = None
    ) -> None:
        self.answers, self.tokenizer = answers, tokenizer
        self.ends = ends or turn_ends(tokenizer, "raw")
        self.version: int | None = None

    def load(self, adapter: Adapter) -> None:
        self.version = adapter.version

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        groups = [
            Group(prompt=p, rollouts=tuple(self._rollout(p, seed + i, sampling) for i in range(n)))
            for p, seed in zip(prompts, seeds, strict=True)
        ]
        if self.token_callback is not None:
            for row, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
                for token in rollout.completion.token_ids:
                    self.token_callback(row, token)
        return groups

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns nothing: there are no weights that could be stale."""
        return []

    def _rollout(self, prompt: Prompt, seed: int, sampling: Sampling) -> Rollout:
        texts = self.answers.get(prompt.id) or self.answers.get("*")
        if not texts:
            problem = 'has no answers for this prompt and none for "*"'
            remedy = 'add "*": [text, ..] for every other prompt'
            raise UserError("generation.scripted.answers", problem, got=prompt.id, remedy=remedy)
        turn = prompt.next_turn
        script = texts[(seed if turn is None or turn.turn == 0 else turn.seed) % len(texts)]
        if not isinstance(script, str):
            script = script[0 if turn is None else min(turn.turn, len(script) - 1)]
        text = without_tail(script.replace("{answer}", prompt.answer), prompt.tail)
        ids = [*self.tokenizer(text + self.ends.lead, add_special_tokens=False)["input_ids"], *self.ends.closing]
        finish = FinishReason.stop
        ids, text = self._stopped(ids, prompt, sampling)
        if len(ids) > (limit := sampling.tokens_of(prompt)):
            finish, ids = FinishReason.length, ids[:limit]
            text = decode(self.tokenizer, ids)
        completion = Completion(text=text, token_ids=tuple(ids), logprobs=(0.0,) * len(ids), finish_reason=finish)
        return Rollout(prompt=prompt, completion=completion, policy_version=self.version)

    def _stopped(self, ids: list[int], prompt: Prompt, sampling: Sampling) -> tuple[list[int], str]:
        """(token ids, text) up to the first stop token or the token that completes a stop string."""
        watch = StopStrings(sampling.stop, plain_decoder(self.tokenizer), [prompt.token_ids]) if sampling.stop else None
        for count, token in enumerate(ids, 1):
            ends = token in sampling.stop_token_ids or (token in self.ends.ids and count < len(ids))
            if ends or (watch is not None and watch.completes(0, token)):
                ids = ids[:count]
                break
        return ids, shown_texts(self.tokenizer, [ids], [True], sampling, self.ends.ids)[0]
