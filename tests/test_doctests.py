"""The examples in docstrings hold, as somebody who has imported rlft would type them."""

import doctest
import importlib
from pathlib import Path

from in_one_test import each

import rlft

PACKAGE = Path(rlft.__file__).parent
MODULES = [
    ".".join(("rlft", *file.relative_to(PACKAGE).with_suffix("").parts))
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text()
]
MODULES += ["claims", "compare_commits", "comparison_cases", "load_processes"]  # of scripts/


@each("module", MODULES)
def test_the_examples_of_a_module_hold(module):
    result = doctest.testmod(importlib.import_module(module), extraglobs={"rlft": rlft})
    assert result.attempted > 0
    assert result.failed == 0


def test_modules_with_examples_are_found():
    assert {"rlft.__init__", "rlft.data.records", "rlft.reward.answer", "rlft.trainer.optimizer"} <= set(MODULES)
