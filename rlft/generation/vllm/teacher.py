"""A teacher in vLLM, in this process: the log-probs of rows' own tokens and of the most likely ones in their places.

They are vLLM's `prompt_logprobs`: of the model's own logits, at temperature 1 whatever a request's temperature is, and
computed afresh, since vLLM reads no prefix cache for such requests. The order and the composition of what is computed
together follow from the rows of a call alone. Read in vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlft.generation.engine import TeacherSettings
from rlft.generation.vllm.guest import answers, end, explained, guest_while_starting, of_tokens, runs_on_cpu, start
from rlft.generation.vllm.memory import CPU_BLOCK_SIZE, TEACHER_BATCHED_TOKENS, TEACHER_SEQS, cpu_cache_of
from rlft.types import UserError


class VLLMTeacher:
    """The live teacher; whoever opens it closes it.

    Raises UserError: with `snapshot.teacher_engine`, vLLM cannot start with it.
    """

    def __init__(self, settings: TeacherSettings) -> None:
        self.settings = settings
        with guest_while_starting(settings.batch_invariant):
            self._on_cpu = runs_on_cpu()
            self._llm: Any = None
            room = "make room for it (snapshot.teacher_gpu_memory_utilization), or "
            doing, remedy = "vLLM could not start with the teacher", "choose snapshot.teacher_engine=transformers"
            try:
                with explained(doing, remedy, "snapshot.teacher_engine", room=room):
                    self._llm = start(self._options())
                    # What it cannot compute, or has no memory for, shows in the longest row and not in the first step.
                    self._prompt_logprobs([[0] * settings.row_tokens], 0)
            except UserError:
                self.close()
                raise
        self._vocabulary = int(self._llm.llm_engine.model_config.get_vocab_size())

    def _options(self) -> dict[str, Any]:
        settings = self.settings
        row = settings.row_tokens + 1  # vLLM insists on sampling a token after it
        options: dict[str, Any] = {
            "model": settings.model_path,
            "dtype": settings.dtype,
            "trust_remote_code": settings.trust_remote_code,
            "revision": None,
            "quantization": "bitsandbytes" if settings.quantization == "4bit" else None,
            "skip_tokenizer_init": True,  # it is given token ids and asked for no text
            "generation_config": "vllm",
            "max_model_len": row,
            "max_num_seqs": TEACHER_SEQS,
            "max_logprobs": -1,  # as many as the vocabulary has
            "enable_prefix_caching": False,
            "enforce_eager": True,  # CUDA graphs are for decoding, and nothing is decoded
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        if not self._on_cpu:
            return options | {
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "max_num_batched_tokens": TEACHER_BATCHED_TOKENS,
                "enable_chunked_prefill": True,
            }
        return options | {
            "block_size": CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": cpu_cache_of(options),
            "max_num_batched_tokens": max(TEACHER_BATCHED_TOKENS, row),
            "enable_chunked_prefill": False,
        }

    def logprobs(
        self, rows: Sequence[Sequence[int]], top_k: int, vocabulary: int
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each row of T token ids: log-probs of its tokens but the first `[T - 1]`, the top_k most likely tokens in
        the place of each (int64 `[T - 1, K]`), and theirs `[T - 1, K]`; at temperature 1, float32, on the CPU.

        rows: of 2 .. `row_tokens` token ids. vocabulary: tokens from this one on are not among the most likely; a model
        may have more than its tokenizer.
        """
        if self._llm is None:
            raise ValueError("this teacher is closed")
        for row in rows:
            if not 2 <= len(row) <= self.settings.row_tokens:
                raise ValueError(f"a teacher's row has 2 .. {self.settings.row_tokens} tokens, not {len(row)}")
        done: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        remaining, width = list(range(len(rows))), top_k
        while remaining:
            results = self._prompt_logprobs([rows[i] for i in remaining], width)
            done |= {
                i: own for i, made in zip(remaining, results, strict=True) if (own := _within(*made, top_k, vocabulary))
            }
            remaining, width = [i for i in remaining if i not in done], min(2 * width, self._vocabulary)
        return [done[i] for i in range(len(rows))]

    def _prompt_logprobs(self, rows: Sequence[Sequence[int]], width: int) -> list[tuple[Tensor, Tensor]]:
        """Of each row its tokens, each with the `width` most likely, and their log-probs, `[T - 1, 1 + width]`."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        params = [
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=width, flat_logprobs=True, detokenize=False)
            for _ in rows
        ]
        outputs = answers(self._llm, of_tokens(rows), params, self._on_cpu)
        return [
            (
                torch.tensor(output.prompt_logprobs.token_ids).view(len(row) - 1, 1 + width),
                torch.tensor(output.prompt_logprobs.logprobs, dtype=torch.float32).view(len(row) - 1, 1 + width),
            )
            for row, output in zip(rows, outputs, strict=True)
        ]

    def close(self) -> None:
        """Ends the engine. Safe to call twice."""
        if self._llm is not None:
            end(self._llm, self._on_cpu)
            self._llm = None


def _within(ids: Tensor, logprobs: Tensor, top_k: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """What `logprobs` says of a row; None where fewer than top_k of the most likely tokens are in the vocabulary.

    ids, logprobs: as `_prompt_logprobs` gives them.
    """
    inside = ids[:, 1:] < vocabulary
    if int(inside.sum(1).min()) < top_k:
        return None
    first = (~inside).long().argsort(dim=1, stable=True)[:, :top_k]  # those inside, in their order
    return logprobs[:, 0], ids[:, 1:].gather(1, first), logprobs[:, 1:].gather(1, first)
