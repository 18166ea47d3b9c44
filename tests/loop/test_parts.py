"""From an engine to its generator, and to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from rlft.config.model import LoraSettings
from rlft.config.schema import RunConfig
from rlft.generation.engine import Engine, EngineArgs, TeacherSettings
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator
from rlft.loop import parts
from rlft.loop.parts import Engines, engine_args, load_for_training, opened_teacher
from rlft.model.activations import activation_bytes, set_checkpointing
from rlft.model.backbone import Backbone
from rlft.model.forward import Forward
from rlft.system import device
from rlft.types import UserError


class Closing:
    """Stands for a live engine: to be closed, and that once."""

    def __init__(self) -> None:
        self.closed, self.slot = 0, "that of its arguments"

    def serve(self, slot: Any) -> None:
        self.slot = slot

    def close(self) -> None:
        self.closed += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Engine):
    """An engine that writes down what it opens."""

    started: ClassVar[list[Closing]] = []

    size: int = 1

    def open(self, args: EngineArgs) -> Any:
        self.started.append(Closing())
        return self.started[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared(Started):
    shared: ClassVar[bool] = True


@pytest.fixture
def started() -> Iterator[list[Closing]]:
    Started.started.clear()
    yield Started.started
    Started.started.clear()


@pytest.fixture
def config(run_config: Any) -> RunConfig:
    return run_config("generation.scripted.answers={*: [aye]}", "generation.transformers.batch_size=12")


@pytest.fixture
def args(config: RunConfig, make_roles: Any, backbone: Backbone) -> EngineArgs:
    return engine_args(config, replace(config.lora, rank=4), make_roles())


def test_an_engines_name_gives_its_generator(config: RunConfig, args: EngineArgs) -> None:
    with Engines() as engines:
        with engines.opened(config.generation.named("transformers"), args) as sampler:
            assert isinstance(sampler, TransformersGenerator)
            assert (sampler.slot, sampler.batch_size, sampler.version) == (args.slot, 12, None)
        with engines.opened(config.generation.named("scripted"), args) as canned:
            assert isinstance(canned, ScriptedGenerator)
            assert list(canned.answers["*"]) == ["aye"]


def test_what_an_engine_is_opened_with_is_the_runs(config: RunConfig, args: EngineArgs, backbone: Backbone) -> None:
    assert (args.tokenizer, args.device, args.dtype) == (backbone.tokenizer, backbone.device, "float32")
    assert args.model_path.endswith("tiny-arithmetic")
    assert (args.lora_rank, args.seed) == (4, config.seed)
    assert args.max_sequence_tokens == config.prompts.max_tokens + config.generation.max_tokens


def test_an_engine_is_told_on_which_modules_its_adapters_are_before_and_beside_the_base(
    run_config: Any, make_roles: Any, backbone: Backbone
) -> None:
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        config = run_config(f"lora.target_modules={targets}".replace(" ", "").replace("'", ""))
        args = engine_args(config, config.lora, make_roles(target_modules=targets))
        apart = engine_args(config, config.lora)
        assert args.lora_modules == apart.lora_modules
        assert args.of_the_engine == apart.of_the_engine
        all_names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert args.lora_modules == (all_names if targets == "all-linear" else set(targets))


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_runs_own_engine_is_closed_once_with_the_run(
    error: type[BaseException] | None, args: EngineArgs, started: list[Closing]
) -> None:
    @contextmanager
    def expected() -> Iterator[None]:
        if error is None:
            yield
            return
        with pytest.raises(error):
            yield

    with Engines() as engines:
        with expected(), engines.opened(Started(), args):
            assert [engine.closed for engine in started] == [0]
            if error is not None:
                raise error
        assert [engine.closed for engine in started] == [1], "another job of a sweep opens one of its own"
        with engines.opened(Started(), args):
            pass
    assert [engine.closed for engine in started] == [1, 1]


def test_an_engine_that_fails_to_close_serves_no_other_job(args: EngineArgs, started: list[Closing]) -> None:
    class Broken(Closing):
        def close(self) -> None:
            raise RuntimeError("a CUDA error")

    with Engines() as engines:
        with engines.opened(Shared(), args) as first:
            first.__class__ = Broken
        with pytest.raises(RuntimeError, match="a CUDA error"):
            engines.close()
        with engines.opened(Shared(), args) as second:
            assert second is not first
    assert [engine.closed for engine in started] == [0, 1]


def test_jobs_of_a_sweep_share_one_engine_until_they_need_another(args: EngineArgs, started: list[Closing]) -> None:
    with Engines() as engines:
        with engines.opened(Shared(), args) as first:
            assert first.slot is args.slot is not None  # type: ignore[attr-defined]
        assert first.slot is None, "it keeps nothing of a job that is over"  # type: ignore[attr-defined]
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


def test_a_shared_engine_is_closed_when_a_job_fails(args: EngineArgs, started: list[Closing]) -> None:
    refusal = UserError("steps", "fails", remedy="do not")
    with pytest.raises(UserError), Engines() as engines, engines.opened(Shared(), args):
        raise refusal
    assert [engine.closed for engine in started] == [1]


# -- a teacher in vLLM -----------------------------------------------------------------------------------------------
class Taught(Closing):
    """Stands for a live teacher."""

    def __init__(self, settings: TeacherSettings) -> None:
        super().__init__()
        self.settings = settings


@pytest.fixture
def teachers(monkeypatch: pytest.MonkeyPatch) -> list[Taught]:
    """Those that were started, in their order."""
    begun: list[Taught] = []

    def start(settings: TeacherSettings) -> Taught:
        begun.append(Taught(settings))
        return begun[-1]

    monkeypatch.setattr("rlft.generation.vllm.teacher.VLLMTeacher", start)
    return begun


def taught_by(name: str, *more: str) -> tuple[str, ...]:
    return ("algorithm=opd", f"snapshot.teacher=embedded:{name}", *more)


def test_a_teacher_is_started_with_what_the_run_says(run_config: Any, teachers: list[Taught]) -> None:
    words = taught_by("tiny-chains", "snapshot.teacher_engine=vllm", "snapshot.teacher_gpu_memory_utilization=0.2")
    with opened_teacher(run_config(*words), 99) as teacher:
        assert teacher is teachers[0]
        assert teachers[0].closed == 0
    settings = teachers[0].settings
    assert (settings.row_tokens, settings.dtype, settings.gpu_memory_utilization) == (99, "float32", 0.2)
    assert settings.model_path.endswith("tiny-chains")
    assert teachers[0].closed == 1


def test_a_teacher_by_transformers_is_a_forward(run_config: Any, teachers: list[Taught]) -> None:
    with opened_teacher(run_config(*taught_by("tiny-student")), 99) as teacher:
        assert isinstance(teacher, Forward)
    with opened_teacher(run_config(), 0) as teacher:
        assert teacher is None
    assert teachers == []


def is_checkpointing(model) -> bool:
    """Whether any layer recomputes its activations."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.fixture
def model(backbone):
    yield backbone.model
    set_checkpointing(backbone.model, False)


@pytest.mark.parametrize(("setting", "expected"), [(True, True), (False, False), ("auto", False)])
def test_it_is_on_when_asked_for_and_off_where_there_is_room(setting, expected, model_config):
    loaded = load_for_training(model_config(gradient_checkpointing=setting), None, 4096).model
    assert is_checkpointing(loaded) is expected


def test_auto_recomputes_what_would_take_more_than_half_of_the_free_memory(model, backbone, model_config, monkeypatch):
    monkeypatch.setattr(parts, "read_backbone", lambda config, adopt: replace(backbone, model=model))
    needed = activation_bytes(model.config, 1000, 4)
    for free, expected in ((2 * needed - 1, True), (2 * needed, False)):
        monkeypatch.setattr(device, "free_memory", lambda free=free: free)
        load_for_training(model_config(gradient_checkpointing="auto"), None, 1000)
        assert is_checkpointing(model) is expected


def test_auto_counts_what_the_adapter_keeps(model, backbone, model_config, monkeypatch):
    monkeypatch.setattr(parts, "load_backbone", lambda config: replace(backbone, model=model))
    monkeypatch.setattr(device, "free_memory", lambda: 3 * activation_bytes(model.config, 1000, 4))
    plain = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear", "path": None}
    for kind, expected in (({}, False), ({"use_dora": True}, True), ({"dropout": 0.1}, True)):
        lora = LoraSettings(**plain | {"dropout": 0.0} | kind)
        load_for_training(model_config(gradient_checkpointing="auto"), lora, 1000)
        assert is_checkpointing(model) is expected, kind
