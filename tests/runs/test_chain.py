"""A line of the chain waits for the digests of its tensors, which a thread computes."""

import json
import threading

import pytest
import torch

from rlft.runs.chain import CHAIN, Chain
from rlft.system.files import digest_of_each, digest_of_tensors

TENSORS = {"adapters/policy": {"b": torch.arange(5.0), "a": torch.ones(2, 3)}, "optimizer": {"a": torch.zeros(4)}}
WAITS = {"seal": lambda chain: chain.seal(2), "flush": Chain.flush, "close": Chain.close}


def begun(folder):
    (folder / "config.yaml").write_text("seed: 0\n")
    chain = Chain(folder)
    chain.start(-1, {"data_fingerprint": "1"}, {"cpu": "x"})
    chain.seal(0, {"state": "2"})
    return chain


def lines(folder):
    return [json.loads(line) for line in (folder / CHAIN).read_text().splitlines()]


@pytest.mark.parametrize("name", WAITS)
def test_a_line_with_tensors_is_appended_by_what_follows_it(tmp_path, monkeypatch, name):
    may_go_on, of_each = threading.Event(), digest_of_each
    chain = begun(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [0], "without tensors there is nothing to wait for"
    monkeypatch.setattr("rlft.runs.chain.digest_of_each", lambda parts: of_each(parts) if may_go_on.wait(60) else {})
    chain.seal(1, {"state": "3"}, TENSORS)
    assert len(lines(tmp_path)) == 1
    threading.Timer(0.05, may_go_on.set).start()
    WAITS[name](chain)
    before, line = lines(tmp_path)[:2]
    assert (line["step"], line["previous"]) == (1, before["digest"])
    assert line["sha256"].items() > {part: digest_of_tensors(tensors) for part, tensors in TENSORS.items()}.items()
    chain.close()


@pytest.mark.parametrize("name", WAITS)
def test_what_fails_in_the_thread_is_raised_by_what_follows(tmp_path, monkeypatch, name):
    chain = begun(tmp_path)
    monkeypatch.setattr("rlft.system.files.digest_of_tensors", lambda tensors: [][len(tensors)])
    chain.seal(1, tensors=TENSORS)
    with pytest.raises(IndexError):
        WAITS[name](chain)
    assert len(lines(tmp_path)) == 1
