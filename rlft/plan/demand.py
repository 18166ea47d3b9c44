"""What a planned run of any command asks of the trainer's device, by what asks for it; its bytes are `memory_parts`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rlft.config.model import Recompute
from rlft.config.trainer import OptimizerKind
from rlft.generation.engine import Engine
from rlft.generation.memory import Decoding, Load, ModelSizes, TeacherLoad
from rlft.plan.tower import TowerDemand
from rlft.system.device import MULTIPROCESSORS, type_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The networks of the roles."""

    adapters: int  # number of adapters of the run's rank on the base, without the engine's own copy
    trainable: int  # number of trained parameters
    matrices: int  # how many of them are in matrices, which Muon moves
    frozen: int = 0  # number of parameters of adapters that keep the rank of their folder
    whole_model: bool = False  # whether the model's own weights are trained
    copies: int = 0  # number of frozen copies of these weights, in other roles
    own_critic: bool = False  # whether the critic has an adapter, and so a forward and backward of its own
    rewards: int = 0  # bytes of learned rewards that have networks of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a step, each as long as the longest."""

    prompt_tokens: int
    completion_tokens: int
    group: int  # number of rows per prompt
    number: int  # of rows in a step
    in_update: int  # number of rows in an optimizer batch
    key: str = "prompts_per_step"  # the key that says how many groups a step has

    @property
    def tokens(self) -> int:
        """Number of tokens of each."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a loss computes of each predicted token."""

    through_head: bool = True  # whether the LM head computes log-probs; values alone need none
    entropy: bool = False  # whether it needs the entropy
    exact_kl: bool = False  # whether it compares the whole distribution with another policy's
    top_k: int = 0  # of how many of a teacher's most likely tokens it compares the distributions
    expert_bytes: int = 0  # bytes of the numbers of a token's experts that a step keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What the engine samples."""

    section: str = ""  # the engine's section in `generation`
    decodings: tuple[Decoding, ...] = ()  # those that happen one after the other, the first of them a step's
    max_tokens: int = 0  # the most tokens in a completion
    max_sequence_tokens: int = 0  # the most tokens in a prompt with its completion
    draft_tokens: int = 0  # as in `Load`
    apart: int = 0  # number of engines in other processes on this device, each with a base of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that share the forward and backward passes."""

    number: int = 1
    gradients: int = 1  # the most gradients that a rank holds at a time, those of its lanes
    held: float = 1.0  # the largest share of the optimizer's averages that a rank holds
    sharing: int = 1  # how many ranks share the tokens of each pass
    sharded: bool | None = None  # whether they divide the base's layers among them; None where they cannot


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDemand:
    """A teacher that is a separate model."""

    model: ModelSizes
    engine: Engine  # what computes it
    section: str  # the engine's section in `generation`
    row_tokens: int  # number of tokens of the longest row that it may read
    prompt_tokens: int  # number of prompt tokens, the hint included, of the longest row that it reads
    share: float  # the share of a GPU's memory that the engine gets for it, where it takes one

    def other_shares(self, load: TeacherLoad, room: int) -> Iterator[TeacherDemand]:
        """The same teacher with a share in which its engine starts, or with a smaller one that leaves room for others.

        room: bytes of the device's memory that the rest of the run leaves free.
        """
        least = self.engine.least_teacher_share(self.model, load) if load.device_memory else None
        if least is None:
            return
        fitting = int(100 * room / load.device_memory) / 100
        if self.share < least:
            yield replace(self, share=least)
        elif least <= fitting < self.share:
            yield replace(self, share=fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of the trainer's device."""

    networks: Networks
    rows: Rows
    optimizer: OptimizerKind = OptimizerKind.adamw
    loss: Loss = field(default_factory=Loss)
    token_budget: int  # the most tokens in a micro-batch
    recompute: Recompute  # what gradient checkpointing computes again
    device: str  # the kind of the trainer's device, one of `rlft.system.device.KINDS`
    device_memory: int = 0  # bytes of a GPU's memory; 0 if unknown
    multiprocessors: int = MULTIPROCESSORS  # their number on a GPU
    engine: Engine | None = None  # what samples completions; None if nothing does
    work: EngineWork = field(default_factory=EngineWork)
    ranks: Ranks = field(default_factory=Ranks)
    teacher: TeacherDemand | None = None  # a teacher that is a separate model; None if there is none
    tower: TowerDemand | None = None  # a vision tower; None if prompts have no images

    @property
    def trains(self) -> bool:
        return self.networks.trainable > 0

    def with_groups(self, number: int) -> Demand:
        """The same with so many groups of rows in a step."""
        rows, work, decodings = number * self.rows.group, self.work, self.work.decodings
        if decodings and self.rows.key == "prompts_per_step":  # the first one is a step's, and the others stay
            work = replace(work, decodings=(replace(decodings[0], num_prompts=number), *decodings[1:]))
        in_update = self.rows.in_update * rows // self.rows.number
        return replace(self, rows=replace(self.rows, number=rows, in_update=in_update), work=work)

    @property
    def load(self) -> Load:
        """The engine's work on this device."""
        return Load(
            decodings=self.work.decodings,
            max_tokens=self.work.max_tokens,
            max_sequence_tokens=self.work.max_sequence_tokens,
            draft_tokens=self.work.draft_tokens,
            device=type_of(self.device),
            device_memory=self.device_memory,
            tower=0 if self.tower is None else self.tower.weights,
        )

    @property
    def teacher_load(self) -> TeacherLoad:
        """The teacher's work on this device."""
        assert self.teacher is not None, "there is one"
        return TeacherLoad(
            row_tokens=self.teacher.row_tokens,
            device=self.device,
            device_memory=self.device_memory,
            share=self.teacher.share,
            libraries=self.teacher.section != self.work.section,
        )
