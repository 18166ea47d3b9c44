"""Renders chat templates: every text that a template writes in a run comes from here, on the run's date.

A template may write today's date (`strftime_now`, as Llama 3.2's and gpt-oss's do). A run's prompts must not depend on
the day on which they are rendered, or a resume would have other prompts, so the date is the model's (`model.date`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DATE = "rlft_date"
"""The attribute of a tokenizer that holds the date that its template writes; a tokenizer without it writes today's."""

AUTO_DATE = "auto"
"""The value of model.date for the day on which a run starts."""

Conversation = Sequence[Mapping[str, Any]]


def dated(tokenizer: PreTrainedTokenizerBase, date: str) -> PreTrainedTokenizerBase:
    """The tokenizer, whose template writes this date (2026-11-25); `auto`: today's."""
    setattr(tokenizer, DATE, today() if date == AUTO_DATE else date)
    return tokenizer


def date_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The date that the tokenizer's template writes."""
    return getattr(tokenizer, DATE, None) or today()


def today() -> str:
    """Today's date, such as 2026-11-25."""
    return _now().date().isoformat()


def _now() -> datetime.datetime:
    return datetime.datetime.now()


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    start: bool = False,
) -> list[str]:
    """The text of each conversation as the tokenizer's chat template writes it.

    Args:
        tokenizer: with a chat template.
        conversations: the messages of each.
        tools: JSON schemas of tools that the template shows.
        start: whether the text ends with the start of the assistant's next turn.

    Raises:
        Exception: whatever the template raises, which is a program of somebody else's.
    """
    date = datetime.date.fromisoformat(date_of(tokenizer))
    plain = [[dict(message) for message in conversation] for conversation in conversations]
    schemas = [dict(tool) for tool in tools]

    def written(shown: list[dict[str, Any]] | None) -> list[str]:
        variables = {"strftime_now": lambda form: formatted(date, form)}
        texts = tokenizer.apply_chat_template(
            plain, tools=shown, add_generation_prompt=start, tokenize=False, **variables
        )
        return [str(text) for text in texts]

    if schemas:
        return written(schemas)
    from jinja2.exceptions import TemplateError

    try:
        return written(None)
    except TemplateError:
        raise
    except Exception:  # some templates go through the tools without asking whether there are any
        return written([])


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    start: bool = False,
) -> str:
    """The text of one conversation, see `rendered`."""
    return rendered(tokenizer, [conversation], tools=tools, start=start)[0]


def formatted(date: datetime.date, form: str) -> str:
    """The date in this format, with English names in every locale, and midnight as the time.

    >>> formatted(datetime.date(2026, 7, 5), "%d %b %Y, %A %H:%M")
    '05 Jul 2026, Sunday 00:00'
    """
    month, day = MONTHS[date.month - 1], DAYS[date.weekday()]
    names = {"%B": month, "%b": month[:3], "%h": month[:3], "%A": day, "%a": day[:3], "%p": "AM", "%x": "%m/%d/%y"}
    english = re.sub("%.", lambda directive: names.get(directive[0], directive[0]), form, flags=re.DOTALL)
    return datetime.datetime.combine(date, datetime.time()).strftime(english)
