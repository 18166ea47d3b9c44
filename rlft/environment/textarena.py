"""`environment=textarena`: a game of the TextArena library (0.7), of which the policy is one player.

The policy reads what the game has told its player since its last turn. The other players are the user's functions.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlft.config.bounds import NonNegativeInt
from rlft.config.instantiate import locate
from rlft.environment.pool import first_reply
from rlft.environment.protocol import Environment, Play, Step
from rlft.system.terminal import pip_install
from rlft.types import UserError, require

Player = Callable[[str], str]
"""(all that the game has told this player, also in earlier turns) -> its move, like an agent of TextArena."""

GAME, OPPONENTS = "environment.game", "environment.opponents"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArena(Environment):
    """The keys of `environment=textarena`: arguments of `textarena.make`, importable players, the policy's place."""

    plays_a_game: ClassVar[bool] = True

    game: str
    arguments: Mapping[str, Any]
    opponents: Sequence[str]
    player: NonNegativeInt

    def check(self) -> None:
        is_installed, problem = importlib.util.find_spec("textarena"), "the textarena library is not installed"
        require(is_installed, "environment", problem, got="textarena", remedy=pip_install("rlft[textarena]"))
        for path in self.opponents:
            locate(path, OPPONENTS)
        problem = f"is beyond the game's last player ({len(self.opponents)}): there is one more than opponents"
        is_one = self.player <= len(self.opponents)
        require(is_one, "environment.player", problem, got=self.player, remedy="lower it, or name more opponents")
        from textarena.envs.registration import ENV_REGISTRY

        known = list(ENV_REGISTRY)
        if self.game not in known:
            near = difflib.get_close_matches(self.game, known, n=3) or ["GuessTheNumber-v0"]
            problem = f"is none of TextArena's {len(known)} games"
            raise UserError(GAME, problem, got=self.game, remedy=f"try {' or '.join(near)}")
        reply = first_reply(self, "reset")  # under its time limit: a game may want other players, or a download
        told = f"does not begin with {1 + len(self.opponents)} players ({reply.text})"
        remedy = "name as many environment.opponents as it wants besides the policy, or fix its environment.arguments"
        require(reply.cause is None, GAME, told, got=self.game, remedy=remedy)

    def start(self) -> None:
        import textarena  # noqa: F401 (it takes most of a second)

        for path in self.opponents:
            locate(path, OPPONENTS)

    def make(self) -> Match:
        found: list[Any] = [locate(path, OPPONENTS) for path in self.opponents]
        opponents: list[Any] = [player() if inspect.isclass(player) else player for player in found]
        return Match(self.game, self.arguments, opponents, self.player)


class Match(Play):
    """One game (see `TextArena`) with its other players, in the order of their places."""

    def __init__(self, game: str, arguments: Mapping[str, Any], opponents: Sequence[Player], player: int) -> None:
        import textarena

        self.player = player
        places = [place for place in range(1 + len(opponents)) if place != player]
        self._opponents = dict(zip(places, opponents, strict=True))
        self._shown = dict.fromkeys(places, "")
        self._game: Any = textarena.make(game, **arguments)
        self._rules: Any = self._game  # without wrappers, which would repeat all earlier messages
        while isinstance(self._rules, textarena.Wrapper):
            self._rules = self._rules.env
        self._is_over = False
        self._own_move: Any = textarena.ObservationType.PLAYER_ACTION

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._game.reset(num_players=1 + len(self._opponents), seed=row.get("seed", seed))
        return self._after_the_others()

    def step(self, text: str) -> Step:
        if not self._is_over:
            self._is_over, _ = self._game.step(action=text)
            observation = self._after_the_others()
            if not self._is_over:
                return Step(observation)
        rewards, information = self._game.close()
        reason = information.get(self.player, {}).get("reason", "") if isinstance(information, dict) else ""
        return Step(reason, None if rewards is None else float(rewards.get(self.player, 0.0)), done=True)

    def _after_the_others(self) -> str:
        """Lets the others move; returns what the policy's player is told at its turn, "" if the game has ended."""
        while not self._is_over:
            player, messages = self._rules.get_observation()
            if player == self.player:
                return self._as_text(messages)
            self._shown[player] += self._as_text(messages, own_moves=True)
            self._is_over, _ = self._game.step(action=self._opponents[player](self._shown[player]))
        return ""

    def _as_text(self, messages: Sequence[tuple[int, str, Any]], *, own_moves: bool = False) -> str:
        """The messages as TextArena shows them to language models, without the policy's own moves."""
        names = self._rules.state.role_mapping
        return "".join(
            f"\n[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if own_moves or sender != self.player or kind is not self._own_move
        ).lstrip("\n")
