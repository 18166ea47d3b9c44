"""`rlft rank` in a real Chromium, with the keyboard alone, in light and dark, on narrow and wide screens.

Screenshots for looking at are left in build/screenshots.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from rlft.commands.rank import RankServer

pytestmark = pytest.mark.slow

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=document.title='owned'>",
    "</div></article><a href=\"javascript:document.title='owned'\">click</a>",
    "\u202e hidden \x1b[31m",
)
LONG = (
    "The sky is blue because air scatters short waves more than long ones. " * 6,
    "Blue.",
    "x" * 300,
    "def f():\n\n  1",
)


class Page:
    """The page in the browser, and what a person sees and types there."""

    def __init__(self, driver: webdriver.Chrome, server: RankServer, width: int = 1400, theme: str = "light") -> None:
        self.driver, self.server = driver, server
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get_log("browser")
        driver.get(server.url)
        self.wait(lambda: driver.execute_script("return document.documentElement.dataset.ready") == "true")

    def wait(self, happens: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, 10).until(lambda _: happens())

    def press(self, keys: str) -> None:
        ActionChains(self.driver).send_keys(keys).perform()

    def text(self, selector: str) -> str:
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return "\n".join(each.text for each in found if each.is_displayed())

    def answers(self) -> list[str]:
        return [str(each.text) for each in self.driver.find_elements(By.CSS_SELECTOR, ".card .text")]

    def judged(self, keys: str) -> tuple[list[str], list[int], bool]:
        """(answers, their scores, whether they were skipped) of the ranking that these keys add."""
        shown, number = self.answers(), len(self.server.rankings.done)
        self.press(keys)
        self.wait(lambda: self.text("#progress").startswith(f"{number + 1} of"))
        row = json.loads(self.server.rankings.file.read_text().splitlines()[-1])
        assert shown == row["completions"]
        return shown, row["scores"], row["skipped"]

    def shot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(SCREENSHOTS / f"rank_{name}.png"))


def test_a_person_ranks_with_the_keyboard_alone(
    driver: webdriver.Chrome, serve: Callable[..., RankServer], write_samples: Callable[..., Path]
) -> None:
    page = Page(driver, serve(write_samples(7)))
    done = page.server.rankings.done
    assert page.text("#progress") == "0 of 7 done"
    assert "secret-model" not in driver.page_source
    assert [page.judged(keys)[1:] for keys in ("21", "10", "0", "2=1", "s")] == [
        ([1, 2, 0], False),  # the last one needs no key
        ([1, 0, 0], False),
        ([0, 0, 0], False),
        ([1, 1, 0], False),
        ([0, 0, 0], True),
    ]
    assert page.judged("3=1")[1] == [1, 0, 1]
    page.press("31u")  # the second key is the last: it saves, and undo takes that back
    page.wait(lambda: page.text("#progress") == "6 of 7 done" and len(done) == 6)
    page.press("3")
    assert page.text("#order") == "3 > ?"
    assert page.text(".chosen .place") == "best"
    page.press("33=")
    assert page.text("#order") == "3 = ?", "an answer is chosen once"
    page.press("uu")
    assert page.text("#order") == "Which is best?"
    before = page.answers()
    page.press(Keys.BACKSPACE)  # with nothing chosen: the ranking before it
    page.wait(lambda: page.text("#progress") == "5 of 7 done")
    assert page.answers() != before
    page.press("u")
    page.wait(lambda: page.text("#progress") == "4 of 7 done")
    for keys in ("12", "12", "12"):
        page.judged(keys)
    assert page.text("#finished").startswith("All prompts are done.")
    page.press("12s0=")
    page.press("?")
    page.wait(lambda: "choose the next best answer" in page.text("#help"))
    page.press("u")  # is not heard behind the dialog
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.text("#help"))
    assert len(done) == 7
    page.press("u")
    page.wait(lambda: len(done) == 6)
    page.press(Keys.TAB * 4 + Keys.ENTER)  # buttons have the focus in turn
    assert driver.get_log("browser") == []


def test_a_page_that_is_out_of_date_or_alone_says_so_and_loses_nothing(
    driver: webdriver.Chrome, serve: Callable[..., RankServer], write_samples: Callable[..., Path]
) -> None:
    page = Page(driver, serve(write_samples(3)))
    page.server.rankings.add(None)  # as from another window
    page.press("12")
    page.wait(lambda: "another window" in page.text("#problem"))
    assert page.text("#progress") == "1 of 3 done"
    page.judged("12")
    assert page.text("#problem") == ""
    page.server.shutdown()
    page.server.server_close()
    page.press("1")
    page.press("2")
    page.wait(lambda: "rlft rank has ended" in page.text("#problem"))
    assert page.text("#order") == "Which is best?"
    assert len(page.server.rankings.done) == 2


def test_answers_are_shown_as_text_alone(
    driver: webdriver.Chrome, serve: Callable[..., RankServer], write_samples: Callable[..., Path]
) -> None:
    page = Page(driver, serve(write_samples(1, HOSTILE)))
    assert driver.title == "rlft rank"
    shown = "\n".join(page.answers())
    assert all(text in shown for text in HOSTILE[:3])
    assert "\\u202e hidden \\x1b[31m" in shown
    assert driver.get_log("browser") == []


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_answers_are_next_to_each_other_and_nothing_is_cut(
    width: int,
    theme: str,
    driver: webdriver.Chrome,
    serve: Callable[..., RankServer],
    write_samples: Callable[..., Path],
) -> None:
    for number in (2, 4):
        page = Page(driver, serve(write_samples(3, LONG[:number]), f"{number}.jsonl"), width, theme)
        assert driver.find_element(By.TAG_NAME, "html").get_attribute("data-theme") == theme
        cards = driver.find_elements(By.CSS_SELECTOR, ".card")
        assert len({card.rect["y"] for card in cards}) == (1 if width == 1400 else number)
        page.press("2")
        page.shot(f"{width}_{theme}_{number}")
        content, window = driver.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert content <= window
        cut = driver.execute_script(
            "return [...document.querySelectorAll('.text, .message, button, h1, #order')]"
            ".filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map((e) => e.textContent)"
        )
        assert cut == []
        footer = driver.find_element(By.TAG_NAME, "footer")
        bottom = driver.execute_script("return arguments[0].getBoundingClientRect().bottom", footer)
        assert bottom <= 801, "the keys are in sight"
