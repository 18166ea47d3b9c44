"""The pictures of `rlft report` in docs/tutorials/first-run.md, of the demo, trained anew: report_*.png next to it.

python scripts/report_figures.py        # a minute; needs selenium, chromium and chromedriver (the extra dev)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

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


DOCS = Path(__file__).resolve().parents[1] / "docs" / "tutorials"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["+recipe=grpo_arithmetic", "hydra.run.dir=runs/grpo_arithmetic/demo"]
        rlft(folder, "train", *words)
        rlft(folder, "report", "runs/grpo_arithmetic/demo", "out=report.html")
        draw(Path(folder) / "report.html")


def rlft(folder: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "rlft.cli", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def draw(report: Path) -> None:
    driver = open_chromium(str(report.parent / "profile"), width=1500, height=880)
    try:
        driver.get(report.as_uri())
        while driver.execute_script("return document.documentElement.dataset.ready") != "true":
            time.sleep(0.05)
        driver.save_screenshot(str(DOCS / "report_curves.png"))
        driver.find_element(By.ID, "tab-completions").click()
        Select(driver.find_element(By.ID, "filter")).select_by_value("tokens")
        Select(driver.find_element(By.ID, "colour")).select_by_value("ratio")
        driver.set_window_size(1500, 720)
        driver.execute_script("document.getElementById('filter').scrollIntoView(); window.scrollBy(0, -70)")
        driver.save_screenshot(str(DOCS / "report_tokens.png"))
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
