"""Which cards engines and ranks have: in pairs, an engine and a rank on one card, or divided, each on its own cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlft.cluster.config import ClusterConfig
from rlft.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """The memory that an engine takes on a card, alone or together with a rank.

    Attributes:
        needed: bytes that it takes.
        card: bytes of the card.
        text: both in words.
    """

    needed: int
    card: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the members are.

    Attributes:
        kind: `pairs` or `divided` on cards, `processes` on a CPU.
        reason: why, for the start-up table.
        cards: number of cards that the run needs in all.
        engines: the cards of each engine. Cards are counted from that of the run's own process, which is 0.
        ranks: the card of each rank, the first of which is the run's own process.
    """

    kind: Literal["processes", "pairs", "divided"]
    reason: str
    cards: int = 0
    engines: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()


def place(
    config: ClusterConfig,
    *,
    on_cards: bool,
    available: int | None = None,
    lag: int = 0,
    pair: CardMemory | None = None,
    alone: CardMemory | None = None,
) -> Placement:
    """The placement of a run.

    Args:
        config: the section `cluster`.
        on_cards: whether the run's model is on a card.
        available: number of cards of the cluster, the run's own included; None if it is not known.
        lag: `overlap.lag`; if it is 1, engines need cards of their own.
        pair: the memory of an engine and a rank on one card; None if it is not known.
        alone: the memory of an engine on each of its cards; None if it is not known.

    Raises:
        UserError: the cards are too few or too small.
    """
    engines, cards_each, ranks = config.engines, config.gpus_per_engine, config.ranks
    if not on_cards:
        if cards_each > 1:
            remedy = "set it to 1, or run on cards (model.device=cuda)"
            raise UserError("cluster.gpus_per_engine", "the model is on a CPU", got=cards_each, remedy=remedy)
        return Placement(kind="processes", reason="on the cores of the CPU")
    paired_cards, divided_cards = max(engines * cards_each, ranks), engines * cards_each + ranks
    too_large = pair is not None and pair.needed > pair.card
    is_joined = config.is_joined
    if config.placement == "pairs":
        if is_joined:
            problem = "the cards of a cluster that is joined are given out whole"
            raise UserError("cluster.placement", problem, got="pairs", remedy="use divided, or auto")
        if pair is not None and too_large:
            problem = f"an engine and a rank do not fit on one card: {pair.text}"
            raise UserError("cluster.placement", problem, got="pairs", remedy="use divided, or auto")
        kind, reason = "pairs", "as cluster.placement says"
    elif config.placement == "divided":
        kind, reason = "divided", "as cluster.placement says"
    elif not engines:
        kind, reason = "divided", "a card for each rank"
    elif is_joined:
        kind, reason = "divided", "the cards of a cluster that is joined are given out whole"
    elif lag:
        kind, reason = "divided", "overlap.lag=1 samples beside the update"
    elif available is not None and available >= divided_cards:
        kind, reason = "divided", f"the {available} cards are enough for one each"
    elif pair is not None and too_large:
        kind, reason = "divided", f"an engine and a rank do not fit on one card: {pair.text}"
    else:
        kind = "pairs"
        reason = "an engine sleeps while its rank trains"
        reason += f"; together they take {pair.text}" if pair is not None else ""
    needed = paired_cards if kind == "pairs" else divided_cards
    if available is not None and needed > available:
        raise _too_few(config, kind, reason, needed, available)
    if kind == "divided" and engines and alone is not None:
        if alone.needed > alone.card:
            remedy = "give an engine more cards (cluster.gpus_per_engine, generation=vllm), or take larger ones"
            raise UserError("cluster.engines", f"an engine does not fit: {alone.text}", got=engines, remedy=remedy)
        reason += f"; an engine takes {alone.text}"
    # Engines come after the ranks: the run's own process is rank 0, on card 0.
    first = 0 if kind == "pairs" else ranks
    return Placement(
        kind=kind,
        reason=reason,
        cards=needed,
        engines=tuple(tuple(range(first + i * cards_each, first + (i + 1) * cards_each)) for i in range(engines)),
        ranks=tuple(range(ranks)),
    )


def _too_few(config: ClusterConfig, kind: str, reason: str, needed: int, available: int) -> UserError:
    members = (
        f"{config.engines} engine(s) of {config.gpus_per_engine} card(s) and {config.ranks} rank(s), {kind} ({reason})"
    )
    room = available if kind == "pairs" else available - config.ranks
    most = max(0, room) // config.gpus_per_engine
    enough_for_engines = kind == "pairs" and config.engines * config.gpus_per_engine <= available
    key = "cluster.ranks" if not config.engines or enough_for_engines else "cluster.engines"
    remedy = f"use at most {most} engines" if most and key == "cluster.engines" else "use fewer, or more cards"
    got = config.ranks if key == "cluster.ranks" else config.engines
    return UserError(key, f"{members} need {needed} cards, and the cluster has {available}", got=got, remedy=remedy)


def environment_of(cards: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """The environment variables of a member that has these cards of this machine.

    Args:
        cards: numbers of its cards, as in `Placement`.
        names: names of all cards, that of the run's own process first.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[card] for card in cards)}
