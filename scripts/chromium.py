"""Chromium without a window, for the tests and the pictures of reports; scripts/install.py brings it."""

from __future__ import annotations

import shutil

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


def open_chromium(profile: str, width: int, height: int) -> webdriver.Chrome:
    """A browser that keeps what its console says; profile: an empty folder for what it remembers.

    Raises:
        FileNotFoundError: there is no Chromium, or no ChromeDriver.
    """
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if path is None]:
        raise FileNotFoundError(f"no {missing[0]} here: python scripts/install.py --extras dev installs it or says how")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs["chromium"])
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(programs["chromedriver"]))
