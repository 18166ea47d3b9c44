"""What the modules here have in common: some of them import vLLM and start it in this process."""

import gc
import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def vllm_is_no_garbage():
    """An engine that starts looks for garbage five times, among all of vLLM; one that ends thaws what was frozen."""
    yield
    if "vllm" in sys.modules:
        gc.collect()
        gc.freeze()
