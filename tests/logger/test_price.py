"""price= of rlft plan and rlft watch."""

from __future__ import annotations

import pytest
from in_one_test import each

from rlft.logger.forecast import Forecast
from rlft.logger.price import Price, read_price
from rlft.types import UserError

NO_AMOUNTS = (
    *("", "2.5", "/h", "-2/h", "1e3/h", "nan/h", "2,5/h", "2.5/d"),
    *("$2EUR/h", "2.5 euros/h", "2.5/h2", "9" * 400 + "/h", "٢/h"),
)


@each(
    ("text", "expected"),
    [
        ("2.5/h", Price(2.5)),
        ("2.5EUR/h", Price(2.5, "EUR")),
        ("$2/h", Price(2.0, "$")),
        (" 0.75 usd / h ", Price(0.75, "usd")),
        ("€1/h", Price(1.0, "€")),
        (None, None),
    ],
)
def test_a_price_is_an_amount_per_hour_in_any_currency(text: str | None, expected: Price | None) -> None:
    assert read_price(text) == expected


@each(
    ("text", "problem"),
    [
        *((text, "must be an amount per hour") for text in NO_AMOUNTS),
        ("0/h", "must be above 0"),
        ("0.0EUR/h", "must be above 0"),
    ],
)
def test_nonsense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        read_price(text)
    told = f"price: {problem}, got {text or 'nothing'}; write it as 2.5/h or 2.5EUR/h"
    assert str(caught.value) == told


def test_what_was_paid_and_what_the_whole_costs() -> None:
    price = Price(3600.0, "EUR")  # a second is one
    assert str(price) == "3,600.00 EUR/h"
    assert price.so_far(10.5, None) == "10.50 EUR"
    assert price.so_far(10.5, Forecast(100.0, 50.0, 2000.0)) == "10.50, in all 110.50 (60.50 to 2,010.50) EUR"
    assert price.so_far(10.5, Forecast(0.0, 0.0, 0.0)) == "10.50 EUR", "nothing is left"
