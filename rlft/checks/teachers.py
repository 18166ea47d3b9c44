"""Rules for a teacher that is a model of its own: its config and tokenizer are read, never its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlft.generation.config import section_of
from rlft.generation.vllm import not_installed
from rlft.generation.vllm_sharing import why_not_invariant
from rlft.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.config.schema import RunConfig

KEY, ENGINE_KEY = "snapshot.teacher", "snapshot.teacher_engine"


@contextmanager
def teacher_is_meant() -> Iterator[None]:
    """Puts the teacher's key in the place of `model.path` in refusals inside, remedies included."""
    try:
        yield
    except UserError as error:
        remedy = error.remedy.replace("model.path", KEY)
        raise UserError(error.key.replace("model.path", KEY), error.problem, got=error.got, remedy=remedy) from None


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Refuses more of the teacher's likeliest tokens than the student's vocabulary has.

    A teacher never has fewer: `check_embeddings`.
    """
    if top_k > vocabulary:
        problem = f"is more than the model's vocabulary of {vocabulary} tokens"
        raise UserError("algorithm.top_k", problem, got=top_k, remedy="use for instance 16")


def missing_engine(config: RunConfig, *, runs_here: bool) -> str | None:
    """A note where the teacher's engine is missing and the run is only planned, else None.

    Raises:
        UserError: it is missing, and the run begins on this machine.
    """
    missing = not_installed() if config.snapshot.teacher_engine == "vllm" else None
    if missing is None:
        return None
    remedy = missing.remedy.replace("generation=transformers", f"{ENGINE_KEY}=transformers")
    if runs_here:
        raise UserError(ENGINE_KEY, missing.problem, got="vllm", remedy=remedy)
    return f"{missing.problem} here, and the teacher needs it where the run is: {remedy}"


def check_teacher_engine(config: RunConfig, engine: str, device: str, *, runs_here: bool) -> None:
    """Checks what is asked of a teacher's vLLM against the device.

    Args:
        config: of a run with a teacher.
        engine: what samples the policy.
        device: the trainer's, as "cuda:0".
        runs_here: whether the run begins on this machine.

    Raises:
        UserError: it cannot compute so, or the shares of both engines are more than the device.
    """
    snapshot, own = config.snapshot, config.generation.engines["vllm"]
    if snapshot.teacher_engine != "vllm":
        return
    if own.batch_invariant and runs_here and (why := why_not_invariant(device)) is not None:
        raise UserError("generation.vllm.batch_invariant", why, got="true", remedy="set it to false")
    shares = snapshot.teacher_gpu_memory_utilization + own.gpu_memory_utilization
    if device.startswith("cuda") and section_of(engine) == "vllm" and not config.cluster.engines and shares > 1:
        raise UserError(
            "snapshot.teacher_gpu_memory_utilization",
            f"with generation.vllm.gpu_memory_utilization={own.gpu_memory_utilization:g} it is more than a device has",
            got=snapshot.teacher_gpu_memory_utilization,
            remedy="lower both, so that the trainer has room beside them",
        )


def check_teacher(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, longest_prompt: int, vocabulary: int
) -> str | None:
    """The fingerprint of the teacher's model, None where it is no model of its own.

    Args:
        config: of the run.
        tokenizer: the student's.
        longest_prompt: tokens of the longest prompt that the teacher may read.
        vocabulary: token ids that the student may sample: rows of its embedding.

    Raises:
        UserError: the model cannot be read, has another vocabulary or a smaller embedding, or a context too short for
            the longest row.
    """
    from rlft.checks.rules import context_of
    from rlft.model.backbone import fingerprint, load_tokenizer, read_config
    from rlft.model.config import teacher_settings

    settings = teacher_settings(config.snapshot, config.model)
    if settings is None:
        return None
    with teacher_is_meant():
        model, own = read_config(settings), load_tokenizer(settings)
    check_vocabulary(tokenizer, own, settings.path)
    check_embeddings(vocabulary, model.get_text_config().vocab_size, settings.path)
    context, longest = context_of(model), longest_prompt + config.generation.max_tokens
    sampled = " and the token that vLLM samples after it" if config.snapshot.teacher_engine == "vllm" else ""
    if context is not None and longest + bool(sampled) > context:
        raise UserError(
            KEY,
            f"its context of {context} tokens is shorter than the longest row of {longest}{sampled}",
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
    """Refuses a teacher in whose vocabulary a token is missing, or has another id.

    path: of the teacher, for the refusal.
    """
    here, there = student.get_vocab(), teacher.get_vocab()
    odd = sorted(token for token in here.keys() | there.keys() if here.get(token) != there.get(token))
    if odd:
        ids = [str(vocabulary.get(odd[0], "none")) for vocabulary in (here, there)]
        raise UserError(
            KEY,
            f"has another vocabulary: {len(odd)} tokens differ, e.g. {odd[0]!r} is {ids[0]} here and {ids[1]} there",
            got=path,
            remedy="use a teacher with the same tokenizer; of another one learn by its samples (rlft sample, rlft sft)",
        )
