"""Rules for a teacher that is a separate model: its config and tokenizer are read, never its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlft.config.schema import section_of
from rlft.generation.vllm.engine import not_installed
from rlft.generation.vllm.sharing import why_not_invariant
from rlft.model.positions import limit_of
from rlft.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.config.schema import RunConfig

KEY, ENGINE_KEY = "snapshot.teacher", "snapshot.teacher_engine"
OWN_KEYS = {
    "model.path": KEY,
    "model.dtype": "snapshot.teacher_dtype",
    "model.quantization": "snapshot.teacher_quantization",
}
"""{key of the base: that of a teacher which is a separate model}."""


@contextmanager
def teacher_is_meant() -> Iterator[None]:
    """Replaces the base's keys by the teacher's in UserErrors raised inside, also in their remedies."""
    try:
        yield
    except UserError as error:
        key, remedy = error.key, error.remedy
        for base, own in OWN_KEYS.items():
            key, remedy = key.replace(base, own), remedy.replace(base, own)
        raise UserError(key, error.problem, got=error.got, remedy=remedy) from None


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Refuses more of the teacher's most likely tokens than the student's vocabulary has.

    A teacher never has fewer: `check_embeddings`.
    """
    if top_k > vocabulary:
        problem = f"is more than the model's vocabulary of {vocabulary} tokens"
        raise UserError("algorithm.top_k", problem, got=top_k, remedy="use for instance 16")


def missing_engine(config: RunConfig, *, runs_here: bool) -> str | None:
    """A note that the teacher's engine is missing, for a run that is only planned; None if it is not missing.

    Raises:
        UserError: it is missing, and the run starts on this machine.
    """
    missing = not_installed() if config.snapshot.teacher_engine == "vllm" else None
    if missing is None:
        return None
    remedy = missing.remedy.replace("generation=transformers", f"{ENGINE_KEY}=transformers")
    if runs_here:
        raise UserError(ENGINE_KEY, missing.problem, got="vllm", remedy=remedy)
    return f"{missing.problem} here, and the teacher needs it where the run is: {remedy}"


def check_teachers_machine(config: RunConfig, *, runs_here: bool) -> None:
    """Checks that this machine can hold the weights of a teacher that is a separate model, as `rules.check_machine`."""
    from rlft.config.model import teacher_settings
    from rlft.plan.rules import check_machine

    settings = teacher_settings(config.snapshot, config.model)
    if settings is not None:
        with teacher_is_meant():
            check_machine(settings, runs_here=runs_here)


def check_teacher_engine(config: RunConfig, engine: str, device: str, *, runs_here: bool) -> None:
    """Checks the keys of a teacher that vLLM computes against the device.

    Args:
        config: the config of a run with a teacher.
        engine: the engine that samples from the policy.
        device: the trainer's device, such as "cuda:0".
        runs_here: whether the run starts on this machine.

    Raises:
        UserError: the device cannot compute this way, or both engines' shares of its memory add up to more than 1.
    """
    snapshot, vllm = config.snapshot, config.generation.engines["vllm"]
    if snapshot.teacher_engine != "vllm":
        return
    if vllm.batch_invariant and runs_here and (why := why_not_invariant(device)) is not None:
        raise UserError("generation.vllm.batch_invariant", why, got="true", remedy="set it to false")
    shares = snapshot.teacher_gpu_memory_utilization + vllm.gpu_memory_utilization
    if device.startswith("cuda") and section_of(engine) == "vllm" and not config.cluster.engines and shares > 1:
        raise UserError(
            "snapshot.teacher_gpu_memory_utilization",
            f"with generation.vllm.gpu_memory_utilization={vllm.gpu_memory_utilization:g} it is more than a device has",
            got=snapshot.teacher_gpu_memory_utilization,
            remedy="lower both, so that the trainer has room beside them",
        )


def check_teacher(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, longest_prompt: int, vocabulary: int
) -> str | None:
    """The fingerprint of the teacher's model; None if the teacher is not a separate model.

    Args:
        config: the typed config.
        tokenizer: the student's tokenizer.
        longest_prompt: number of tokens of the longest prompt that the teacher may read.
        vocabulary: number of token ids that the student may sample: the rows of its embedding.

    Raises:
        UserError: the model cannot be read, has another vocabulary or a smaller embedding, or a context too short for
            the longest row.
    """
    from rlft.config.model import teacher_settings
    from rlft.model.backbone import fingerprint, load_tokenizer, read_config

    settings = teacher_settings(config.snapshot, config.model)
    if settings is None:
        return None
    with teacher_is_meant():
        model, teacher_tokenizer = read_config(settings), load_tokenizer(settings)
    check_vocabulary(tokenizer, teacher_tokenizer, settings.path)
    check_embeddings(vocabulary, model.get_text_config().vocab_size, settings.path)
    limit, longest = limit_of(model), longest_prompt + config.generation.max_tokens
    and_sampled = " and the token that vLLM samples after it" if config.snapshot.teacher_engine == "vllm" else ""
    if limit is not None and longest + bool(and_sampled) > limit.tokens:
        raise UserError(
            KEY,
            f"the longest row of {longest} tokens{and_sampled} exceeds its {limit.words}",
            got=settings.path,
            remedy="lower prompts.max_tokens or generation.max_tokens, or use another teacher",
        )
    return fingerprint(settings)


def check_embeddings(student: int, teacher: int, path: str) -> None:
    """Refuses a teacher with fewer token ids than the student may sample, also such as its tokenizer does not use.

    Args:
        student, teacher: rows of their embeddings.
        path: of the teacher, for the refusal.
    """
    if student > teacher:
        raise UserError(
            KEY,
            f"has token ids up to {teacher - 1}, and the student may sample ids up to {student - 1}",
            got=path,
            remedy="use a teacher whose config.json has a vocab_size as large as the student's",
        )


def check_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, path: str) -> None:
    """Refuses a teacher whose vocabulary lacks a token of the student's, has another one, or gives it another id.

    Args:
        student: the student's tokenizer.
        teacher: the teacher's tokenizer.
        path: the path of the teacher's model, for the refusal.
    """
    students, teachers = student.get_vocab(), teacher.get_vocab()
    differing = sorted(t for t in students.keys() | teachers.keys() if students.get(t) != teachers.get(t))
    if differing:
        ids = [str(vocabulary.get(differing[0], "none")) for vocabulary in (students, teachers)]
        example = f"{differing[0]!r} is {ids[0]} here and {ids[1]} there"
        raise UserError(
            KEY,
            f"has another vocabulary: {len(differing)} tokens differ, e.g. {example}",
            got=path,
            remedy="use a teacher with the same tokenizer; of another one learn by its samples (rlft sample, rlft sft)",
        )
