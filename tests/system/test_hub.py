"""Whether the hub answers: any answer counts, and none is waited for long. What is asked of it is tested with data/."""

import time

import huggingface_hub.utils
import pytest
from huggingface_hub import constants

from rlft.system import hub


@pytest.fixture
def asked(monkeypatch):
    """Whether the hub answers where a request does this."""

    def ask(request):
        session = type("Session", (), {"head": lambda self, url, timeout: request()})()
        monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: session)
        hub.hub_answers.cache_clear()
        return hub.hub_answers()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield ask
    hub.hub_answers.cache_clear()


def test_any_answer_counts_and_silence_does_not(asked, monkeypatch):
    def refuse(text):
        raise OSError(text)

    assert asked(lambda: "HTTP 500")
    assert asked(lambda: refuse("[SSL: CERTIFICATE_VERIFY_FAILED]")), "a server did answer"
    assert not asked(lambda: refuse("Name or service not known"))
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.1)
    assert not asked(lambda: time.sleep(30)), "a name lookup, which knows no limit"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not asked(lambda: "HTTP 200")
