"""A config is read here, once: typed, and checked by itself within a second, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlft.config import command as verbs
from rlft.config.command import Verb
from rlft.config.compose import build
from rlft.config.token_budget import with_budget_of_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A config that has been read.

    Attributes:
        command: the command whose config it is.
        plain: the composed config, as dicts and lists.
        config: the command's typed root; `token_budget: auto` is the number of a CPU, which no GPU's is below.
        parts: what the command's check has made of the config, such as its algorithm; None without a check.
    """

    command: Verb
    plain: Mapping[str, Any]
    config: Any
    parts: Any

    def plan(self, **how: Any) -> Any:
        """The plan of this config's run (a `rlft.plan.run_plan.Plan`); plans are made nowhere else.

        Args:
            how: keywords of the command's `make_plan`, such as runs_here=False.

        Raises:
            UserError: the data, the tokenizer or the model are wrong.
        """
        config = with_budget_of_device(self.config, self.plain)
        return self.command.make_plan(replace(self, config=config), **how)


def resolve(plain: Mapping[str, Any], verb: str | None = None, check: Callable[[Any], Any] | None = None) -> Resolved:
    """Types a composed config, and refuses one that is wrong by itself or names local files that do not exist.

    Args:
        plain: the composed config.
        verb: the command's name; None for the one that the config names.
        check: instead of the command's own check.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    command = verbs.named(plain["verb"] if verb is None else verb)
    config = build(plain, command.root, command.name)
    check = check or command.check
    return Resolved(command=command, plain=plain, config=config, parts=None if check is None else check(config))
