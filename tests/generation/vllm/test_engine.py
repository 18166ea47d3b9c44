"""The keys of vLLM: when it shares the trainer's base or holds the policy, and what is refused. No vLLM is started."""

import importlib.util
import shlex
import subprocess
import sys
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each
from real_engines import vllm_engine
from slow_cases import slow_but

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.vllm import engine as vllm_module
from rlft.generation.vllm.engine import COPIED
from rlft.generation.vllm.options import engine_rank
from rlft.plan.fit import settled
from rlft.plan.model_rules import choose_engine, why_not_on_a_gpu
from rlft.plan.roles import check_teacher_engine
from rlft.system.terminal import pip_install
from rlft.types import UserError

ON_CUDA = {"device": "cuda:0", "itemsize": 2, "quantized": False}


def engine(**changes):
    return vllm_engine(**{"gpu_memory_utilization": 0.5, "enforce_eager": False, **changes})


# -- when ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("keys", "base", "why"), [
    ({}, {}, None),
    ({"share_base": True}, {"device": "cuda"}, None),
    ({"options": {"kv_cache_dtype": "fp8"}}, {}, None),
    ({"share_base": False}, {}, "generation.vllm.share_base is false"),
    ({}, {"device": "cpu"}, "in its own way on cpu"),
    ({}, {"device": "cuda:1"}, "vLLM runs on cuda:0 and the trainer on cuda:1"),
    ({}, {"itemsize": 4}, "has 32 bits, not 16"),
    ({}, {"quantized": True}, "the trainer's base is quantised"),
    ({"options": {"quantization": "fp8"}}, {}, "options.quantization gives vLLM other weights"),
    ({"options": {"cpu_offload_gb": 2}}, {}, "options.cpu_offload_gb gives vLLM other weights"),
])  # fmt: skip
def test_one_copy_of_the_base_where_it_can_be(keys, base, why):
    found = engine(**keys).base_sharing_obstacle(**{**ON_CUDA, **base})
    assert (found is None) if why is None else (found is not None and why in found)
    if why is not None and keys.get("share_base") is not False:
        with pytest.raises(UserError, match=r"^share_base: .*, got true; set"):
            engine(**keys, share_base=True).check_device(**{**ON_CUDA, **base})


@pytest.mark.parametrize(("keys", "base", "why"), [
    ({}, {}, None),
    ({}, {"device": "cpu", "itemsize": 4}, None),
    ({"share_base": False}, {"itemsize": 4}, None),
    ({"share_base": True}, {}, "share_base is true"),
    ({}, {"device": "cuda:1"}, "vLLM runs on cuda:0 and the trainer on cuda:1"),
    ({}, {"quantized": True}, "the trainer's base is quantised"),
    ({"options": {"quantization": "fp8"}}, {}, "options.quantization gives vLLM other weights"),
])  # fmt: skip
def test_a_copy_of_the_policy_where_it_can_be_and_auto_is_one_there(keys, base, why):
    where, copying = {**ON_CUDA, **base}, engine(**keys, weights="copy")
    if why is None:
        copying.check_device(**where)
        shares = engine(**keys | {"share_base": "auto"}, weights="copy").base_sharing_obstacle(**where)
        assert "those of the policy" in str(shares)
    elif keys.get("share_base") is not True:
        with pytest.raises(UserError, match=rf"^weights: .*{why}.*, got copy; set weights=adapter"):
            copying.check_device(**where)
    on = {"device": where["device"], "quantized": where["quantized"]}
    kinds = ((False, 8), (True, 8), (False, 513))
    lora, dora, large = (SimpleNamespace(use_dora=dora, rank=rank) for dora, rank in kinds)
    for shape, modules, fits, can in (
        (lora, ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.fc1"], True, True),
        (lora, ["model.layers.0.self_attn.q_proj"], False, False),
        (dora, ["model.layers.0.self_attn.q_proj"], False, True),
        (large, ["model.layers.0.self_attn.q_proj"], False, True),
        (dora, ["model.layers.0.self_attn.kv_a_proj_with_mqa"], True, False),
        (None, [], True, False),
    ):
        found = engine(**keys, weights="auto").settled(shape, lambda m=modules: m, lambda each, fits=fits: fits, **on)
        assert found == engine(**keys, weights="copy" if can and why is None else "adapter")
        assert copying.settled(shape, list, lambda each: False, **on) == copying, "what is named stays"


def test_neither_is_one_that_runs_in_another_process_or_cannot_free_its_cache_alone(monkeypatch):
    monkeypatch.setattr(vllm_module, "release", lambda: (0, 30))
    assert engine().base_sharing_obstacle(**ON_CUDA) is None
    assert "only vLLM 0.31 and later" in str(engine(sleep=True).base_sharing_obstacle(**ON_CUDA))
    monkeypatch.setattr(vllm_module, "release", lambda: (0, 31))
    assert engine(sleep=True).base_sharing_obstacle(**ON_CUDA) is None
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert "another process" in str(engine().base_sharing_obstacle(**ON_CUDA))


@pytest.mark.parametrize("plans_all", slow_but(False, [False, True]))
def test_auto_chooses_vllm_only_where_it_serves_base_and_adapter_as_they_would_be_settled(
    plans_all, monkeypatch, run_config
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    dora, large, apart, another = "lora.use_dora=true", "lora.rank=600", "cluster.engines=1", "model.device=cuda:1"
    four_bits, fp8 = "model.quantization=4bit", "+generation.vllm.options.quantization=fp8"
    shared, named = "generation.vllm.share_base=true", "generation=vllm"
    cases = {
        "as it is": {
            (): "vllm", (apart,): "vllm", (dora,): "vllm", (large,): "vllm", (another,): "vllm",
            (dora, apart): "transformers", (large, apart): "transformers", (dora, four_bits): "transformers",
            (dora, fp8): "transformers", (dora, shared): "transformers", (dora, another): "transformers",
            (four_bits,): "vllm", (four_bits, named): "vllm",
        },
        "merges q_proj alone": {
            (dora,): "transformers", (dora, "lora.target_modules=[q_proj]"): "vllm", (large,): "transformers",
        },
        "reads no base in 4 bits": {
            (four_bits,): "transformers", (four_bits, named): None, (four_bits, fp8): "vllm",
            (four_bits, fp8, named): "vllm",
        },
    }  # fmt: skip
    planned = {(dora,), (dora, apart), (large, apart), (dora, shared), (dora, another)}
    for vllm, words, chosen in ((vllm, *case) for vllm, table in cases.items() for case in table.items()):
        monkeypatch.setattr(vllm_module, "COPIED", {"q_proj"} if vllm == "merges q_proj alone" else COPIED)
        monkeypatch.setattr(vllm_module, "reads_bitsandbytes", lambda vllm=vllm: vllm != "reads no base in 4 bits")
        asked = ["model.device=cuda", "model.dtype=bfloat16", *words]
        config = run_config(*asked)
        runs_here = four_bits in words and dora not in words
        choose = partial(choose_engine, config.generation, config.model, config.lora, runs_here=runs_here)
        if chosen is None:
            refusal = r"^model\.quantization: vLLM .* 0\.30\), got 4bit; add \+gen.*fp8 .*'vllm<0\.30', or"
            with pytest.raises(UserError, match=refusal):
                choose()
            continue
        assert choose(apart=apart in words)[0] == chosen, (vllm, words)
        if runs_here or not (plans_all or (vllm == "as it is" and words in planned)):
            continue  # a plan takes a second
        assert settled_engine(*asked) == chosen
        if chosen == "transformers":
            with pytest.raises(UserError, match=r"^lora\.(use_dora|rank): vLLM "):
                settled_engine(*asked, named)


def settled_engine(*words):
    plan = resolve(compose(["+recipe=grpo_arithmetic", *words])).plan(runs_here=False)
    return settled(plan, str(plan.engine), lambda: None).engine


def test_a_teacher_in_4_bits_is_refused_where_vllm_has_none(monkeypatch, run_config):
    of_teacher = ("snapshot.teacher=embedded:tiny-student", "snapshot.teacher_engine=vllm")
    monkeypatch.setattr(vllm_module, "reads_bitsandbytes", lambda: False)
    config = run_config(*of_teacher, "snapshot.teacher_quantization=4bit")
    refusal = r"^snapshot\.teacher_engine: vLLM .*; use transformers, or snapshot\.teacher_q"
    with pytest.raises(UserError, match=refusal):
        check_teacher_engine(config, "vllm", "cuda", runs_here=True)
    check_teacher_engine(config, "vllm", "cuda", runs_here=False)


def test_what_the_installed_vllm_can_hold_and_its_release_are_read_without_an_import():
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert vllm_module.reads_bitsandbytes() == ("bitsandbytes" in QUANTIZATION_METHODS)
    found = vllm_module.release()
    assert (0, 27) <= found < (1, 0)


def test_batch_invariance_is_refused_where_there_is_none(monkeypatch):
    refusal = r"^batch_invariant: .* on CUDA only, and model\.device is cpu, got true; set it"
    with pytest.raises(UserError, match=refusal):
        engine(batch_invariant=True).check_device(**{**ON_CUDA, "device": "cpu"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
        reason = vllm_module.why_not_invariant("cuda:0")
        assert (reason is None) == (capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "from compute capability 8.0 on, and this GPU has 7.5" in str(vllm_module.why_not_invariant("cuda:0"))


# -- where it is installed ---------------------------------------------------------------------------------------------
@each(("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (300, 320), (512, 512)])
def test_a_rank_is_rounded_up_to_one_the_engine_takes(rank, allowed):
    assert engine_rank(rank) == allowed
    with pytest.raises(UserError, match=r"^lora\.rank: .*, got 513; "):
        engine_rank(513)


def test_asking_for_vllm_where_it_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = vllm_engine().missing()
    assert missing.problem == "vLLM is not installed"
    assert missing.remedy.startswith(pip_install("rlft[vllm]"))


@each(("asks", "problem", "remedy"), [
    (["torch==2.99.0"], "torch==2.99.0, and this is torch {torch}", "'torch==2.99.0'"),
    (["torch==2.99.0+cpu"], "torch==2.99.0, and this is torch {torch}", "'torch==2.99.0'"),
    (["transformers<5.2,>=5.1"], "transformers>=5.1,<5.2, and this is transformers {transformers}",
     "'transformers>=5.1,<5.2'"),
    (["numpy<1", "torch<2", "transformers>9"],
     "torch<2 and transformers>9, and this is torch {torch} and transformers {transformers}",
     "'torch<2' 'transformers>9'"),
    (["torch>=2.11", "transformers<9", "numpy<1", "torch<2; python_version < '3'"], None, None),
    ([], None, None),
])  # fmt: skip
def test_vllm_next_to_versions_that_it_is_not_built_for_is_refused(asks, problem, remedy, tmp_path, run_config):
    about = tmp_path / "vllm-0.99.0.dist-info" / "METADATA"
    about.parent.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", "Name: vllm", "Version: 0.99.0", *(f"Requires-Dist: {ask}" for ask in asks)]
    about.write_text("\n".join(lines))
    config = run_config("generation=vllm", "model.device=cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        if problem is None:
            assert choose_engine(config.generation, config.model) == ("vllm", "as configured")
            return
        with pytest.raises(UserError) as raised:
            choose_engine(config.generation, config.model)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        reason = why_not_on_a_gpu(config.generation, None, config.model)
    here = {name: metadata.version(name) for name in ("torch", "transformers")}
    words = f"vllm 0.99.0 needs {problem.format(**here)}"
    assert (raised.value.key, raised.value.problem, reason) == ("generation.engine", words, words)
    assert raised.value.remedy == f"{pip_install(*shlex.split(remedy))}, or use generation=transformers"


def test_the_checks_of_the_configuration_can_be_imported_without_vllm_or_torch():
    code = "import sys; from rlft.generation.vllm.engine import VLLM; VLLM.title; "
    code += "VLLM(gpu_memory_utilization=0.5, max_num_seqs=8, sleep=False, enforce_eager=False, options={}).missing(); "
    code += "print({'vllm', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
