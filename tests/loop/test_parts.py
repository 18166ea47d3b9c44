"""From an engine to its generator, and to its end."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar
from unittest.mock import Mock

import pytest

from rlft.config.model import LoraSettings
from rlft.generation.engine import Engine
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator
from rlft.loop import parts
from rlft.loop.parts import Engines, engine_args, load_for_training, opened_teacher
from rlft.model.activations import activation_bytes, set_checkpointing
from rlft.model.forward import Forward
from rlft.system import device
from rlft.types import UserError


class Closing:
    """Stands for a live engine: to be closed, and that once."""

    def __init__(self):
        self.closed, self.slot = 0, "that of its arguments"

    def serve(self, slot):
        self.slot = slot

    def close(self):
        self.closed += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Engine):
    """An engine that writes down what it opens."""

    started: ClassVar[list[Closing]] = []

    size: int = 1

    def open(self, args):
        self.started.append(Closing())
        return self.started[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared(Started):
    shared: ClassVar[bool] = True


@pytest.fixture
def started():
    Started.started.clear()
    yield Started.started
    Started.started.clear()


@pytest.fixture
def config(run_config):
    return run_config("generation.scripted.answers={*: [aye]}", "generation.transformers.batch_size=12")


@pytest.fixture
def args(config, make_roles, backbone):
    return engine_args(config, replace(config.lora, rank=4), make_roles())


def test_an_engines_name_gives_its_generator_which_is_opened_with_what_is_the_runs(config, args, backbone):
    assert (args.tokenizer, args.device, args.dtype) == (backbone.tokenizer, backbone.device, "float32")
    assert args.model_path.endswith("tiny-arithmetic")
    assert (args.lora_rank, args.seed) == (4, config.seed)
    assert args.max_sequence_tokens == config.prompts.max_tokens + config.generation.max_tokens
    with Engines() as engines:
        with engines.opened(config.generation.named("transformers"), args) as sampler:
            assert isinstance(sampler, TransformersGenerator)
            assert (sampler.slot, sampler.batch_size, sampler.version) == (args.slot, 12, None)
        with engines.opened(config.generation.named("scripted"), args) as canned:
            assert isinstance(canned, ScriptedGenerator)
            assert list(canned.answers["*"]) == ["aye"]


def test_an_engine_is_told_on_which_modules_its_adapters_are(run_config, make_roles, backbone):
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        config = run_config(f"lora.target_modules={targets}".replace(" ", "").replace("'", ""))
        args = engine_args(config, config.lora, make_roles(target_modules=targets))
        apart = engine_args(config, config.lora)
        assert args.lora_modules == apart.lora_modules
        assert args.of_the_engine == apart.of_the_engine
        all_names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert args.lora_modules == (all_names if targets == "all-linear" else set(targets))


@pytest.mark.parametrize("error", [None, ValueError(), KeyboardInterrupt(), UserError("steps", "fails", remedy="no")])
def test_engines_are_closed_once_however_a_run_ends(error, args, started):
    with pytest.raises(type(error)) if error is not None else nullcontext(), Engines() as engines:
        with engines.opened(Started(), args):
            assert [engine.closed for engine in started] == [0]
        assert [engine.closed for engine in started] == [1], "another job of a sweep opens one of its own"
        with engines.opened(Started(), args), engines.opened(Shared(), args):
            assert [engine.closed for engine in started] == [1, 0, 0]
            if error is not None:
                raise error
    assert [engine.closed for engine in started] == [1, 1, 1]


def test_jobs_of_a_sweep_share_one_engine_until_they_need_another(args, started):
    with Engines() as engines:
        with engines.opened(Shared(), args) as first:
            assert first.slot is args.slot is not None
        assert first.slot is None, "it keeps nothing of a job that is over"
        with engines.opened(Shared(), replace(args, seed=9, slot=None)) as again:
            assert again is first
        assert [engine.closed for engine in started] == [0]
        for engine, needed in (
            (Shared(), replace(args, lora_rank=8)),
            (Shared(), replace(args, max_sequence_tokens=args.max_sequence_tokens + 1)),
            (Shared(size=2), args),
        ):
            with engines.opened(engine, needed) as other:
                assert other is started[-1]
        assert [engine.closed for engine in started] == [1, 1, 1, 0]
    assert [engine.closed for engine in started] == [1, 1, 1, 1]


def test_an_engine_that_fails_to_close_serves_no_other_job(args, started):
    with Engines() as engines:
        with engines.opened(Shared(), args) as first:
            first.close = Mock(side_effect=RuntimeError("a CUDA error"))
        with pytest.raises(RuntimeError, match="a CUDA error"):
            engines.close()
        with engines.opened(Shared(), args) as second:
            assert second is not first
    assert [engine.closed for engine in started] == [0, 1]


def test_a_teacher_is_started_in_vllm_with_what_the_run_says_and_by_transformers_is_a_forward(run_config, monkeypatch):
    begun = []

    def start(settings):
        begun.extend([settings, Closing()])
        return begun[1]

    monkeypatch.setattr("rlft.generation.vllm.teacher.VLLMTeacher", start)
    words = ("algorithm=opd", "snapshot.teacher=embedded:tiny-student")
    for asked, kind in ((words, Forward), ((), type(None))):
        with opened_teacher(run_config(*asked), 99) as teacher:
            assert isinstance(teacher, kind)
    assert begun == []
    words = (*words, "snapshot.teacher_engine=vllm", "snapshot.teacher_gpu_memory_utilization=0.2")
    with opened_teacher(run_config(*words), 99) as teacher:
        settings, live = begun
        assert teacher is live
        assert live.closed == 0
    assert (settings.row_tokens, settings.dtype, settings.gpu_memory_utilization) == (99, "float32", 0.2)
    assert settings.model_path.endswith("tiny-student")
    assert live.closed == 1


@pytest.fixture
def model(backbone):
    yield backbone.model
    set_checkpointing(backbone.model, False)


def test_activations_are_recomputed_where_asked_or_too_large(model, backbone, model_config, monkeypatch):
    def recomputes(setting, lora=None, tokens=1000):
        loaded = load_for_training(model_config(gradient_checkpointing=setting), lora, tokens).model
        return any(getattr(module, "gradient_checkpointing", False) for module in loaded.modules())

    assert [recomputes(setting, tokens=4096) for setting in (True, False, "auto")] == [True, False, False]
    for read in ("read_backbone", "load_backbone"):
        monkeypatch.setattr(parts, read, lambda *config, **how: replace(backbone, model=model))
    needed = activation_bytes(model.config, 1000, 4)
    lora = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear", "path": None, "dropout": 0.0}
    for kind, free, expected in (
        (None, 2 * needed - 1, True),  # more than half of it
        (None, 2 * needed, False),
        ({}, 3 * needed, False),
        ({"use_dora": True}, 3 * needed, True),  # what an adapter keeps counts
        ({"dropout": 0.1}, 3 * needed, True),
    ):
        monkeypatch.setattr(device, "free_memory", lambda free=free: free)
        assert recomputes("auto", None if kind is None else LoraSettings(**lora | kind)) is expected, (kind, free)
        set_checkpointing(model, False)
