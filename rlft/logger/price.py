"""What an hour of a machine costs, as in price=2.5/h, and what so many seconds cost."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlft.logger.forecast import Forecast
from rlft.types import UserError, require

CURRENCY = r"[$€£¥]|[A-Za-z]{3}"
PRICE = re.compile(rf"(?P<before>{CURRENCY})? ?(?P<amount>[0-9]{{1,9}}(\.[0-9]{{1,9}})?) ?(?P<after>{CURRENCY})? ?/ ?h")


@dataclass(frozen=True, slots=True)
class Price:
    """An amount per hour; `currency` may be empty."""

    per_hour: float
    currency: str = ""

    def amount(self, seconds: float) -> str:
        """Such as `1,234.50`."""
        return f"{self.per_hour * seconds / 3600:,.2f}"

    def so_far(self, seconds: float, left: Forecast | None) -> str:
        """What has been paid, and if known what the whole will cost: `1.20, in all 3.40 (3.00 to 3.90) EUR`."""
        text = self.amount(seconds)
        if left is not None and left.seconds > 0:
            text += f", in all {self.whole(left, seconds)}"
        return f"{text} {self.currency}".rstrip()

    def whole(self, left: Forecast, seconds: float = 0.0) -> str:
        """What these seconds and those that are left cost: `3.40 (3.00 to 3.90)`."""
        whole, low, high = (self.amount(seconds + more) for more in (left.seconds, left.low, left.high))
        return f"{whole} ({low} to {high})"

    def __str__(self) -> str:
        return f"{self.per_hour:,.2f} {self.currency}".rstrip() + "/h"


def read_price(text: str | None) -> Price | None:
    """The price in `2.5/h`, with or without a currency; None of None.

    >>> read_price("2.5/h"), read_price("$2/h"), read_price("1.80 EUR/h")
    (Price(per_hour=2.5, currency=''), Price(per_hour=2.0, currency='$'), Price(per_hour=1.8, currency='EUR'))

    Raises:
        UserError: the text is no price per hour, or it is 0.
    """
    if text is None:
        return None
    match = PRICE.fullmatch(text.strip())
    remedy = "write it as 2.5/h or 2.5EUR/h"
    if match is None or (match["before"] and match["after"]):
        raise UserError("price", "must be an amount per hour", got=text or "nothing", remedy=remedy)
    require(float(match["amount"]) > 0, "price", "must be above 0", got=text, remedy=remedy)
    return Price(float(match["amount"]), match["before"] or match["after"] or "")
