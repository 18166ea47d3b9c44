"""What vLLM does to the process that it lives in, and how its errors explain themselves. No vLLM is started."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rlft.generation.vllm import guest as vllm_guest
from rlft.generation.vllm.guest import VLLMError, answers, of_tokens
from rlft.system.crash import explains_itself
from rlft.types import UserError


def test_an_error_inside_vllm_while_it_computes_explains_itself_and_others_stay_as_they_are():
    inside = {"__name__": "vllm.kernels"}
    exec("def compute(call): return call()", inside)
    engine = SimpleNamespace(step=None, output_processor=SimpleNamespace(request_states={}))
    engine.abort_request = lambda requests, internal: None

    def compute(error, generate):
        def raised():
            raise error

        def call(*_, **__):
            return generate(raised)

        answers(SimpleNamespace(llm_engine=engine, generate=call), of_tokens([[1, 2]]), [None], on_cpu=False)

    kernel = RuntimeError("Unsupported CPU attention configuration: head_dim=16")
    said = r"^vLLM failed while it computed: Unsupported .*head_dim=16; choose gener"
    with pytest.raises(VLLMError, match=said) as e:
        compute(kernel, inside["compute"])
    assert explains_itself(e.value)
    with pytest.raises(VLLMError, match=r"AssertionError in vllm\.kernels, line 1; "):
        compute(AssertionError(), inside["compute"])
    dead = type("EngineDeadError", (Exception,), {})("the engine has died")
    for error in (dead, torch.OutOfMemoryError("no memory"), MemoryError()):
        with pytest.raises(type(error)):
            compute(error, inside["compute"])
    with pytest.raises(RuntimeError, match="of rlft's own") as e:
        compute(RuntimeError("of rlft's own"), lambda call: call())
    assert not isinstance(e.value, VLLMError)


def test_batch_invariance_is_set_before_vllm_is_imported_and_not_changed_after(monkeypatch):
    monkeypatch.setenv(vllm_guest.INVARIANT, "0")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    vllm_guest.set_batch_invariant(False)
    assert vllm_guest.os.environ[vllm_guest.INVARIANT] == "0"
    vllm_guest.set_batch_invariant(True)
    assert vllm_guest.os.environ[vllm_guest.INVARIANT] == "1"
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    vllm_guest.set_batch_invariant(True)
    with pytest.raises(UserError, match=r"^generation\.vllm\.batch_invariant: vLLM reads it once .* on, got false; "):
        vllm_guest.set_batch_invariant(False)


def test_only_the_last_engine_that_ends_takes_what_all_have_in_common(monkeypatch):
    core, kept = SimpleNamespace(cleanup_dist_env_and_memory="of all"), list[bool]()
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.core"):
        monkeypatch.setitem(sys.modules, name, core)

    def llm():
        client = SimpleNamespace(shutdown=lambda: kept.append(core.cleanup_dist_env_and_memory != "of all"))
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))

    first, second = llm(), llm()
    monkeypatch.setattr(vllm_guest, "_running", [first, second])
    for ended in (second, first):
        vllm_guest.end(ended, on_cpu=False)
    assert kept == [True, False]
