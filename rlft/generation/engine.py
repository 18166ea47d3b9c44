"""What an engine is: its keys (`Engine`), what it is opened with (`EngineArgs`), and what samples (`Generator`).

An engine is one module. Its class is a frozen dataclass whose fields are the keys below `generation.<name>`, and whose
`open` makes the live generator. Nothing here or at the top of an engine's module imports torch or the engine's library:
what is wrong in a config alone is refused without them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from rlft.generation.memory import PLAIN, Decoding, EngineMemory, Load, MemoryPart, ModelSizes, TeacherLoad, When
from rlft.types import Adapter, Group, Prompt, Sampling, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlft.config.model import LoraSettings
    from rlft.generation.loaded_adapter import LoadedAdapter
    from rlft.generation.sending import Part
    from rlft.generation.shared_base import SharedBase
    from rlft.tokens.text import TurnEnds

TokenCallback = Callable[[int, int], None]
"""Called with each token when it is sampled: (p * n + i for completion i of prompt p, the token's id)."""
Ids = Sequence[Sequence[int]]
"""Token ids of several texts."""
Modules = Callable[[], Iterable[str]]
"""Gives the names of the modules that adapters are on, which takes time."""
Accept = Callable[[list[list[float]]], str | None]
"""Returns what is wrong with an engine's log-probs of fixed tokens; None if they are the policy's."""
AcceptAdapter = Callable[["LoadedAdapter | str"], str | None]
"""Returns what is wrong with what an engine holds of the adapter; None if it is the policy's. Text says why it cannot
be read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessCheck:
    """What an engine has to pass before it samples."""

    sequences: list[list[int]]  # the token ids that it scores; none where what it holds is enough
    accept: Accept  # judges its log-probs of them
    accept_adapter: AcceptAdapter | None = None  # judges what an engine with weights holds; None: that is not read back

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        """The calls whose answers `problem` judges: a method of a generator and its arguments each."""
        scores = [("score", self.sequences)] if self.sequences else []
        return [*scores, *([("loaded_adapter",)] if self.accept_adapter is not None else [])]

    def problem(self, answers: Sequence[Any]) -> str | None:
        """What is wrong with the engine that has given these answers; None if nothing is."""
        if not self.sequences:
            return None if self.accept_adapter is None else self.accept_adapter(*answers)
        scores, *adapter = answers
        problem = self.accept_adapter(*adapter) if self.accept_adapter is not None and any(scores) else None
        return problem or self.accept(scores)


class StaleEngineError(RuntimeError):
    """An engine holds other weights than those it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a live engine adds to what a run says when it starts."""

    rows: tuple[tuple[str, str, str], ...] = ()  # rows of the start-up table: (name, value, explanation)
    notes: tuple[str, ...] = ()


NO_FACTS = EngineFacts()


class Generator(ABC):
    """What samples: one live engine, several (`EnginePool`), or conversations over either (`GeneratorOver`).

    It holds at most one version of an adapter at a time.
    """

    token_callback: TokenCallback | None = None
    """Unless None, called by an engine that can tell its tokens while it samples."""
    shared_base: SharedBase | None = None
    """The base that trainer and engine share, after `adopt`; None where each holds its own."""
    replaces_engines: bool = False
    """Whether engines may start later, which load the version in use and have to pass its check (`verify`) first."""

    facts: EngineFacts = NO_FACTS
    """What it says of itself; that of engines in other processes is not asked for."""
    metrics: Mapping[str, float] = {}
    """Numbers of the version in use, which are in the metrics of the step at whose end it was published."""

    loads_parts: bool = False
    """Whether it takes all weights of a model in parts (`load_parts`); else it is given them together (`load`)."""

    def adopt(self, model: nn.Module, device: torch.device) -> None:
        """Makes the parameters of the trainer's base views of the engine's and moves the rest to the device."""
        raise NotImplementedError("its engine says that no base can be shared (`Engine.base_sharing_obstacle`)")

    def serve(self, slot: Any) -> None:  # noqa: B027 (most are opened for each job)
        """From now on serves the job with these networks (`EngineArgs.slot`); None: no job, of whose base it keeps
        nothing."""

    @abstractmethod
    def load(self, adapter: Adapter) -> None:
        """Use this adapter version for all sampling from now on. What `load_parts` has taken belongs to it."""

    def load_parts(self, parts: Sequence[Part], *, first: bool) -> None:
        """Takes parts of all weights for the version that `load` completes; an engine in a process of its own gets
        them in their order. `first`: these are the first of a version, and what was taken before is void."""
        assert not self.loads_parts, "an engine that says so takes them"

    @abstractmethod
    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """n completions of each prompt; completion i of prompt p is drawn with seed `seeds[p] + i`.

        One of an ongoing conversation has at most `sampling.tokens_of(prompt)` tokens; an engine that gives more has
        wasted them.
        """

    def sample_each(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Group]]:
        """The groups that each engine samples of all these prompts, without conversations."""
        return [self.sample(prompts, n, seeds, sampling)]

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first, by the adapter in use; empty without weights."""

    def best_tokens(self, sequences: Sequence[Sequence[int]]) -> list[list[tuple[int, float]]]:
        """(the most likely token, its log-prob) in place of every token that `score` scores; empty: it cannot tell."""
        return []

    def loaded_adapter(self) -> LoadedAdapter | str:
        """What it holds of the adapter in use, read back from where it computes with it; or why that cannot be."""
        return "it has no way to tell"

    def verify(self, check: FreshnessCheck, *, now: bool) -> None:
        """Sets the check of the version in use.

        now: whether engines that have the version are checked at once; those that start later always are.

        Raises StaleEngineError: an engine does not pass, and none takes its place.
        """
        if now and (problem := check.problem([getattr(self, name)(*args) for name, *args in check.calls])) is not None:
            raise StaleEngineError(problem)

    def rehearse(  # noqa: B027
        self, prompts: Ids, n: int, max_tokens: int, draft_rows: int = 0, sampling: Sampling = PLAIN
    ) -> None:
        """Take the most memory that completions of these prompts need, unless it is taken already; `draft_rows` of them
        at most are sampled with drafts, and all are drawn as `sampling` says."""

    def sleep(self) -> None:  # noqa: B027
        """Free as much of the device's memory as possible until the next use; engines without their own do nothing."""

    def close(self) -> None:  # noqa: B027 (not every one has something to free)
        """End the engine and every process it started. Safe to call twice."""


def rehearse(generator: Generator, *args: Any, **further: Any) -> None:
    """`Generator.rehearse`, also of a generator from outside, which may lack parameters for what is known further."""
    known = inspect.signature(generator.rehearse).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    generator.rehearse(*args, **{name: value for name, value in further.items() if takes_all or name in known})


class GeneratorOver(Generator):
    """A generator that makes its completions with another one, `generator`; whoever opened that one closes it."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.shared_base, self.replaces_engines = generator.shared_base, generator.replaces_engines

    @property
    def facts(self) -> EngineFacts:  # type: ignore[override]
        return self.generator.facts

    @property
    def metrics(self) -> Mapping[str, float]:  # type: ignore[override]
        return self.generator.metrics

    def load(self, adapter: Adapter) -> None:
        self.generator.load(adapter)

    def sample_each(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Group]]:
        return self.generator.sample_each(prompts, n, seeds, sampling)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.generator.score(sequences)

    def loaded_adapter(self) -> LoadedAdapter | str:
        return self.generator.loaded_adapter()

    def verify(self, check: FreshnessCheck, *, now: bool) -> None:
        self.generator.verify(check, now=now)

    def rehearse(self, *args: Any, **further: Any) -> None:
        rehearse(self.generator, *args, **further)

    def sleep(self) -> None:
        self.generator.sleep()


class Missing(NamedTuple):
    """Why an engine cannot run on this machine, and what to do: ("vLLM is not installed", "pip install ..")."""

    problem: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What an engine is opened with."""

    # The trainer's networks, on whose base an engine may keep its copy of the policy (transformers.AdapterSlot); None
    # in a process without them.
    slot: Any
    tokenizer: Any  # a `rlft.tokens.text.RunTokenizer`, called as transformers' tokenizer is; that one is its `own`
    ends: TurnEnds  # what ends a turn; a completion ends with each of `ends.ids`
    device: Any  # the trainer's torch.device
    model_path: str  # folder or hub name of the base
    revision: str | None
    dtype: str  # data type of the base's weights, such as "bfloat16"
    quantization: str | None
    trust_remote_code: bool
    # The largest rank of the adapters that the engine will load; None: it loads none, and a policy that it is given is
    # a whole model.
    lora_rank: int | None
    max_sequence_tokens: int  # the most tokens that a prompt and its completion have together
    seed: int  # the run's seed; what is sampled depends on the seeds given to `sample` alone
    # Last parts of the names of the modules that these adapters are on, such as "q_proj"; None where the engine loads
    # none.
    lora_modules: frozenset[str] | None = None
    images: int = 0  # the most images of a prompt
    decodings: tuple[Decoding, ...] = ()  # what it will be asked for, as far as that is known

    @property
    def of_the_engine(self) -> tuple[object, ...]:
        """What must be equal in the arguments of two jobs for them to share one live engine."""
        model = (self.model_path, self.revision, self.dtype, self.quantization, self.trust_remote_code)
        rows = self.max_sequence_tokens, self.ends.ids, self.images
        return (*model, str(self.device), self.lora_rank, self.lora_modules, *rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """What a teacher is started with."""

    model_path: str  # folder or hub name
    dtype: str  # of its weights, as "bfloat16"
    trust_remote_code: bool
    quantization: str | None  # None or "4bit" (bitsandbytes, CUDA only)
    row_tokens: int  # of the longest row that it will read
    gpu_memory_utilization: float  # share of the GPU's memory for weights and KV cache
    batch_invariant: bool = False  # results do not depend on what is computed together (CUDA only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(ABC):
    """A generation engine. Subclasses are frozen dataclasses; their fields are its keys, with types and bounds.

    Everything but `open` has a default, which is right for an engine that needs nothing of the trainer's device and
    serves adapters of any kind.
    """

    title: ClassVar[str] = "this engine"  # its name in messages
    on_trainers_base: ClassVar[bool] = False
    """Whether it decodes on the trainer's own base, with an adapter slot of its own there."""
    rounds_apart: ClassVar[bool] = False
    """Whether its log-probs come from a forward of its own, which in 16 bits rounds differently from the trainer's."""
    serves_whole_models: ClassVar[bool] = False
    """Whether it can follow a model that is trained whole (`rlft sft lora=null`), which has no adapters to load."""
    serves_whole_mixtures: ClassVar[bool] = True  # whether it can do so where the model has experts
    serves_dora: ClassVar[bool] = True
    serves_head: ClassVar[bool] = True  # whether it serves adapters of the output layer, too
    largest_rank: ClassVar[int | None] = None  # the largest rank of adapters that it serves; None: any
    shared: ClassVar[bool] = False
    """Whether all jobs of a sweep with the same settings share one live engine, since starting it takes long."""
    may_change: ClassVar[tuple[str, ...]] = ()
    """Its keys that change no number, so that a run may be resumed with other values."""
    in_graphs: ClassVar[bool | None] = None
    """Whether it decodes in CUDA graphs on a GPU, by which `rlft plan` estimates its time; None: that is not known."""
    divisible: ClassVar[bool] = True
    """Whether a completion's tokens and log-probs do not depend on which prompts are sampled in the same call."""
    at_once_key: ClassVar[str | None] = None  # its key that sets `at_once`, if there is one
    notes_experts: ClassVar[bool] = False
    """Whether its completions can say to which experts their tokens went (`Sampling.notes_experts`)."""
    why_no_drafts: ClassVar[str | None] = "samples without drafts"
    """Why it samples without drafts of tokens (`generation.drafts`), such as "it ..."; None if it can use them."""
    rewards_turns: ClassVar[bool] = False
    """Whether the turns of its completions may have rewards (`Turn.reward`), which count as rewards of steps."""
    teaches: ClassVar[bool] = False
    """Whether it computes a teacher that is a separate model, and samples a token after each row that it reads; else
    the trainer's own forward does."""
    dead: ClassVar[str | None] = None
    """The name of the error after which none of its calls succeeds any more, although its process lives on."""
    packages: ClassVar[tuple[str, ...]] = ()  # distributions whose versions are recorded in a run that uses it
    grows: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """{"sample" or "publish": (what takes most of its memory then, its key to lower)}, for memory errors."""

    def missing(self) -> Missing | None:
        """What it needs and this machine lacks, found without starting it; None where it can run."""
        return None

    def check(self, *, plain_kernels: bool) -> None:  # noqa: B027 (most engines have nothing to refuse)
        """Checks the keys together; UserError by the engine's own key, such as `answers`.

        plain_kernels: whether the trainer's base is computed as transformers and PEFT do it (model.kernels=plain).
        """

    def unserved(self, modules: Modules) -> str | None:
        """Why it cannot load an adapter on these modules, such as "it ..."; None if it can."""
        return None

    def why_no_images(self, kind: str, device: str) -> Missing | None:
        """Why it does not sample prompts with images for models of this type, such as "gemma3"; None if it does.

        device: torch's type of the trainer's device.
        """
        return Missing(f"{self.title} does not sample prompts with images", "use generation=transformers")

    def serves_experts(self, device: str) -> bool:
        """Whether it can serve an adapter on a mixture of experts, whatever it is on; `device` is "cpu" or "cuda"."""
        return True

    @property
    def rounds(self) -> bool:
        """Whether its log-probs are off by hundredths even where the trainer computes in float32."""
        return False

    @property
    def is_corrected(self) -> bool:
        """Whether `algorithm.mismatch: auto` corrects that, too."""
        return self.rounds

    @property
    def needs_sums(self) -> bool:
        """Whether its config asks for sums of base and adapter that may be rounded."""
        return self.on_trainers_base and self.rounds

    @property
    def rounds_sums(self) -> bool:
        """Whether it rounds the sums of the base's weights and the adapter to the base's dtype."""
        return False

    def base_sharing_obstacle(self, *, device: str, itemsize: int, quantized: bool) -> str | None:
        """Why it holds a base of its own next to the trainer's; None where one copy serves both, "" where it has none.

        An engine that shares is `shared`, and its generator has `adopt`.

        Args:
            device: the trainer's, such as "cuda" or "cuda:1".
            itemsize: bytes of a weight.
            quantized: whether the trainer's base is quantised.
        """
        return ""

    def check_device(self, *, device: str, itemsize: int, quantized: bool) -> None:  # noqa: B027
        """Checks the keys again, knowing the trainer's device and weights, before any weight is loaded.

        The arguments are those of `base_sharing_obstacle`. UserError by the engine's own key, such as `share_base`.
        """

    def settled(
        self, lora: LoraSettings | None, modules: Modules, fits: Callable[[Self], bool], device: str, quantized: bool
    ) -> Self:
        """The engine with values in place of those of its `auto` keys that decide numbers; a resumed run keeps them.

        Args:
            lora: the shape of the adapters that it will load; None if it loads none.
            fits: whether the run has enough memory for the engine with other values.
            device, quantized: as in `base_sharing_obstacle`.
        """
        return self

    def quantization_obstacle(self) -> str | None:
        """Why it cannot hold a base in 4 bits, as the trainer's is with `model.quantization`; None if it can."""
        return None

    @property
    def at_once(self) -> int:
        """The most completions that it computes together: what one of several engines gets in a call (`EnginePool`).

        An engine that is not `divisible` cuts what it gets into such parts itself, so that both ways give the same.
        """
        return 1

    def standalone(self) -> Self:
        """The engine for a process without the trainer's base. UserError by its own key if it cannot run there."""
        return self

    def with_gpus(self, gpus: int) -> Self:
        """The engine for a process of its own in which it computes on `gpus` GPUs. UserError if it cannot."""
        if gpus > 1:
            problem, remedy = f"{self.title} computes on one GPU", "set it to 1, or use generation=vllm"
            raise UserError("cluster.gpus_per_engine", problem, got=gpus, remedy=remedy)
        return self

    def memory(self, model: ModelSizes, load: Load) -> EngineMemory:
        """What it takes of the trainer's device, without a base that it shares with the trainer."""
        return EngineMemory()

    def smaller(self, model: ModelSizes, load: Load, room: int) -> Iterator[Self]:
        """The same engine with one key changed so that it fits into `room`, bytes that the rest of the run leaves."""
        yield from ()

    def check_teacher(  # noqa: B027
        self, *, device: str, quantized: bool, share: float, samples_here: bool, runs_here: bool
    ) -> None:
        """Checks that it can compute the teacher on the trainer's device; UserError by the whole key.

        Args:
            quantized: whether the teacher's weights are.
            share: share of a GPU's memory for the teacher.
            samples_here: whether it samples in this process, too.
            runs_here: False if the run is only planned.
        """

    def teacher_memory(self, model: ModelSizes, load: TeacherLoad) -> EngineMemory:
        """What a teacher of these sizes takes of the trainer's device; its parts have their whole keys."""
        part = MemoryPart(name="teacher", bytes=model.base_bytes, when=When.always, key="snapshot.teacher")
        return EngineMemory(parts=(part,))

    def least_teacher_share(self, model: ModelSizes, load: TeacherLoad) -> float | None:
        """The smallest share of a GPU's memory in which it starts with this teacher; None where it takes no share."""
        return None

    def teacher_settings(self, settings: TeacherSettings) -> TeacherSettings:
        """The settings with those of its own keys that a teacher has as well."""
        return settings

    def open_teacher(self, settings: TeacherSettings) -> Any:
        """The live teacher (as in `rlft.generation.vllm.teacher`); whoever opens it closes it."""
        raise NotImplementedError(f"{self.title} computes no teacher")

    @abstractmethod
    def open(self, args: EngineArgs) -> Generator:
        """The live generator; whoever opens it closes it."""


def units_of(at_once: int, *, divisible: bool, num_engines: int) -> Callable[[int, int], int]:
    """How many prompts an engine gets in one call, as a function of (completions of a prompt, number of prompts).

    at_once: number of completions that it computes together.
    divisible: whether results do not depend on which groups are in one call, so that every engine can get some.
    """

    def unit(n: int, num_prompts: int) -> int:
        size = max(1, at_once // n)
        return max(1, min(size, -(-num_prompts // num_engines))) if divisible else size

    return unit
