"""What conversations look like to one model: its prompts, how calls are read, and what stands between turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlft.environment.calls import Syntax, preamble, reader_of, written
from rlft.environment.protocol import Call, Environment
from rlft.environment.turn_template import TurnTemplate, with_opening
from rlft.tokens.text import decode
from rlft.types import Schema, Shown, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def shown_by(environment: Environment, schemas: Sequence[Schema]) -> Shown:
    """What prompts show of this environment."""
    if not schemas or not environment.show_tools:
        return Shown()
    if environment.syntax == "template":
        return Shown(tools=tuple(schemas))
    return Shown(preamble=preamble(environment.syntax, schemas))


class Dialect:
    """The chat template and the syntax of calls, for one environment.

    Args:
        environment: the environment of the conversations.
        tokenizer: the model's.
        opening: messages like those that conversations begin with.

    Raises:
        UserError: the template cannot show tools or their answers, rewrites earlier turns when a tool answers, or
            writes calls in a form that is not known here; or a tool has no types or docstring.
    """

    def __init__(
        self, environment: Environment, tokenizer: PreTrainedTokenizerBase, opening: Sequence[Mapping[str, Any]]
    ) -> None:
        schemas = environment.schemas()
        self.shown = shown_by(environment, schemas)
        self._as_messages_of_tools = environment.syntax == "template" and not environment.plays_a_game
        shown_opening = self.shown.messages(opening)
        try:
            self.template = TurnTemplate(
                tokenizer,
                {"tool" if self._as_messages_of_tools else "user"},
                tools=self.shown.tools,
                opening=shown_opening,
            )
        except UserError as error:
            if not self._as_messages_of_tools or not tokenizer.chat_template:
                raise
            remedy = f"set environment.syntax=json or xml, or {error.remedy}"
            raise UserError(error.key, error.problem, got=error.got, remedy=remedy) from None
        self._tokenizer = tokenizer
        self._syntax: Syntax = environment.syntax
        self._schemas, self._opening = schemas, shown_opening
        self._reader = None
        if not environment.plays_a_game:
            self._reader = reader_of(environment.syntax, tokenizer, schemas, shown_opening)

    def opened(self, messages: Sequence[Mapping[str, Any]], text: str) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
        """(messages, tokens) of a prompt to which the environment adds this text."""
        return self.template.opened(self.shown.messages(messages), text)

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, as a completion's."""
        return decode(self._tokenizer, ids)

    def calls(self, sampled: Sequence[int]) -> list[Call]:
        """The calls in a turn of the policy, in order; those that cannot be made have a `problem`."""
        return [] if self._reader is None else self._reader.calls(self.template.spoken(sampled))

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the policy has to write it."""
        return self.template.stripped(
            written(self._syntax, self._tokenizer, self._schemas, self._opening, name, arguments)
        )

    def suffix(self, sampled: Sequence[int], answers: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The tokens between this turn and the next: the answers, and the start of the policy's next turn.

        Args:
            sampled: token ids of the turn.
            answers: (name of the tool, its answer) in the order of the calls, or ("", observation) of a game.
        """
        return self.template.suffix(sampled, self._messages(answers))

    @property
    def rewrites(self) -> bool:
        """Whether the template rewrites earlier turns at each answer; then `rewritten` takes the place of `suffix`."""
        return bool(self.template.rewriting)

    def rewritten(
        self,
        messages: Sequence[Mapping[str, Any]],
        opened_with: str,
        history: Sequence[tuple[Sequence[int], Sequence[tuple[str, str]]]],
    ) -> tuple[int, ...]:
        """The tokens of the whole conversation up to the start of the policy's next turn, as the template has it now.

        Args:
            messages: messages of the prompt.
            opened_with: what the environment has added to the prompt.
            history: for each turn its token ids and its answers, as in `suffix`.
        """
        conversation, trusted = with_opening(self.shown.messages(messages), opened_with)
        for sampled, answers in history:
            turn = [{"role": "assistant", "content": self.text(sampled)}, *self._messages(answers)]
            conversation += turn
            trusted += [0] * len(turn)
        return self.template.prompt(conversation, trusted)

    def _messages(self, answers: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        if self._as_messages_of_tools:
            return [{"role": "tool", "name": name or "tool", "content": text} for name, text in answers]
        return [{"role": "user", "content": "\n".join(text for _, text in answers)}]
