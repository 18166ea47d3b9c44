"""A teacher in vLLM: without an engine, and the real one in this process, beside transformers with the same weights.

One teacher is started for the module.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fused_engine import logprobs_of
from real_engines import open_vllm
from transformers import AutoModelForCausalLM

import rlft
from rlft.generation.vllm import teacher as vllm_teacher
from rlft.generation.vllm.memory import TEACHER_BATCHED_TOKENS
from rlft.generation.vllm.teacher import TeacherSettings, VLLMTeacher, _within
from rlft.types import UserError

ASSETS = Path(rlft.__file__).parent / "assets"
SETTINGS = TeacherSettings(
    model_path=str(ASSETS / "tiny-arithmetic"), dtype="float32", trust_remote_code=False, quantization=None,
    row_tokens=70, gpu_memory_utilization=0.3, batch_invariant=False,
)  # fmt: skip
ROWS = [[3 + (5 * i + j) % 200 for j in range(length)] for i, length in enumerate((2, 70, 7, 33))]
TOLERANCE = 1e-4
"""Natural log. Both sides compute in float32 with other kernels; seen: 2e-5."""


# -- without an engine -----------------------------------------------------------------------------------------------
class FakeLLM:
    """Has a vocabulary of 8 whose tokens from 6 on are no tokenizer's; the most likely are 7, 6, 5, .., each 1 less."""

    def __init__(self):
        self.asked = []
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 8), step=None)


@pytest.fixture
def fake(monkeypatch):
    """Opens teachers over a FakeLLM; the arguments of vLLM's engine come with them."""
    given = {}
    llm = FakeLLM()

    def asked(self, rows, width):
        llm.asked.append(([list(row) for row in rows], width))
        most_likely = torch.arange(7, 7 - width, -1)
        return [
            (
                torch.cat([torch.tensor(row)[1:, None], most_likely.expand(len(row) - 1, width)], 1),
                torch.cat([torch.full((len(row) - 1, 1), -9.0), (most_likely - 8.0).expand(len(row) - 1, width)], 1),
            )
            for row in rows
        ]

    monkeypatch.setattr(vllm_teacher, "guest_while_starting", lambda invariant: nullcontext())
    monkeypatch.setattr(vllm_teacher, "start", lambda options: given.update(options) or llm)
    monkeypatch.setattr(vllm_teacher, "end", lambda llm, on_cpu: None)
    monkeypatch.setattr(VLLMTeacher, "_prompt_logprobs", asked)

    def opened(on_cpu=True, **changes):
        monkeypatch.setattr(vllm_teacher, "runs_on_cpu", lambda: on_cpu)
        return VLLMTeacher(replace(SETTINGS, **changes)), llm, given

    return opened


def test_it_has_room_for_the_longest_row_and_the_token_after_it_and_its_share_of_a_gpu(fake):
    _, _, given = fake()
    assert (given["max_model_len"], given["max_num_batched_tokens"]) == (71, TEACHER_BATCHED_TOKENS)
    assert (given["enable_prefix_caching"], given["enable_chunked_prefill"]) == (False, False)
    assert "gpu_memory_utilization" not in given
    _, _, given = fake(row_tokens=2000)
    assert given["max_num_batched_tokens"] == 2001, "a row is never computed in parts on a CPU"
    _, _, given = fake(on_cpu=False, row_tokens=5000, gpu_memory_utilization=0.4, quantization="4bit")
    assert (given["gpu_memory_utilization"], given["quantization"]) == (0.4, "bitsandbytes")
    assert (given["max_num_batched_tokens"], given["enable_chunked_prefill"]) == (TEACHER_BATCHED_TOKENS, True)


def test_tokens_that_no_tokenizer_has_are_not_among_the_most_likely_and_others_are_asked_for(fake):
    """Of the three most likely two are 6 and 7, beyond the student's vocabulary: the row is asked again, for six."""
    teacher, llm, _ = fake()
    [(own, ids, logprobs)] = teacher.logprobs([[1, 2, 3]], 3, 6)
    assert llm.asked[1:] == [([[1, 2, 3]], 3), ([[1, 2, 3]], 6)]
    assert own.tolist() == [-9, -9]
    assert ids.tolist() == [[5, 4, 3], [5, 4, 3]]
    assert logprobs.tolist() == [[-3, -4, -5], [-3, -4, -5]]
    llm.asked.clear()
    [(_, ids, _)] = teacher.logprobs([[1, 2]], 5, 5)
    assert [width for _, width in llm.asked] == [5, 8], "at most the whole vocabulary"
    assert ids.tolist() == [[4, 3, 2, 1, 0]]


def test_most_likely_tokens_keep_their_order_where_others_stand_between():
    ids, logprobs = torch.tensor([[0, 9, 2, 8, 1], [0, 3, 4, 9, 5]]), -torch.arange(10.0).view(2, 5)
    found = _within(ids, logprobs, 2, 6)
    assert [values.tolist() for values in found] == [[0, -5], [[2, 1], [3, 4]], [[-2, -4], [-6, -7]]]
    assert _within(ids, logprobs, 3, 6) is None
    assert _within(ids[:, :1], logprobs[:, :1], 0, 6)[1].shape == (2, 0)


def test_rows_that_it_was_not_made_for_and_any_of_a_closed_one_are_an_error(fake):
    teacher, _, _ = fake()
    for row in ([4], list(range(71))):
        with pytest.raises(ValueError, match=rf"2 \.\. 70 tokens, not {len(row)}"):
            teacher.logprobs([row], 0, 6)
    teacher.close()
    teacher.close()
    with pytest.raises(ValueError, match="closed"):
        teacher.logprobs([[1, 2]], 0, 6)


def test_the_longest_row_is_computed_before_the_first_step_and_an_engine_that_cannot_is_ended(fake, monkeypatch):
    assert fake()[1].asked == [([[0] * 70], 0)]

    ended = []
    monkeypatch.setattr(VLLMTeacher, "_prompt_logprobs", Mock(side_effect=RuntimeError("Unsupported head size")))
    monkeypatch.setattr(vllm_teacher, "end", lambda llm, on_cpu: ended.append(llm))
    with pytest.raises(UserError, match="Unsupported head size"):
        fake()
    assert len(ended) == 1
    monkeypatch.setattr(vllm_teacher, "start", Mock(side_effect=ValueError("No room for a single row")))
    refusal = r"^snapshot\.teacher_engine: .*: No room for a single row, got vllm; make room"
    with pytest.raises(UserError, match=refusal):
        VLLMTeacher(SETTINGS)


# -- with the engine -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def teacher():
    live = VLLMTeacher(SETTINGS)
    yield live
    live.close()


@pytest.fixture(scope="module")
def by_transformers():
    """Log-probs `[T - 1, V]` of one row."""
    model = AutoModelForCausalLM.from_pretrained(SETTINGS.model_path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(row):
        return model(input_ids=torch.tensor([list(row)]), use_cache=False).logits[0, :-1].log_softmax(-1)

    return logprobs


@pytest.mark.parametrize("top_k", [0, 16])
def test_the_log_probs_are_those_of_transformers(teacher, by_transformers, top_k):
    """16 of 272: the k-th log-prob is compared and not the token, since two may be equal but for a rounding."""
    for row, (own, ids, most_likely) in zip(ROWS, teacher.logprobs(ROWS, top_k, 272), strict=True):
        expected = by_transformers(row)
        torch.testing.assert_close(own, expected.gather(1, torch.tensor(row)[1:, None])[:, 0], rtol=0, atol=TOLERANCE)
        assert ids.shape == most_likely.shape == (len(row) - 1, top_k)
        torch.testing.assert_close(most_likely, expected.topk(top_k, 1).values, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(most_likely, expected.gather(1, ids), rtol=0, atol=TOLERANCE)
    [(_, ids, most_likely)] = teacher.logprobs([ROWS[2]], 4, 20)
    smaller = by_transformers(ROWS[2])[:, :20].topk(4, 1)
    assert torch.equal(ids, smaller.indices), "tokens beyond a smaller vocabulary are left out"
    torch.testing.assert_close(most_likely, smaller.values, rtol=0, atol=TOLERANCE)


def test_the_same_rows_in_the_same_order_have_the_same_bits(teacher):
    first = teacher.logprobs(ROWS, 4, 272)
    teacher.logprobs(ROWS[::-1], 0, 272)  # nothing of another call is left
    for one, other in zip(first, teacher.logprobs(ROWS, 4, 272), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_the_policys_engine_works_beside_it_and_after_it(teacher, by_transformers):
    """The policy's base is another model; a second teacher ends before both."""
    row, model = ROWS[3], AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-chains", dtype=torch.float32).eval()
    [expected] = logprobs_of(model, [row])
    generator = open_vllm(ASSETS / "tiny-chains", lora_rank=4, max_sequence_tokens=71)
    try:
        assert generator.score([row])[0] == pytest.approx(expected, abs=TOLERANCE)
        second = VLLMTeacher(replace(SETTINGS, row_tokens=40))
        [(own, _, _)] = second.logprobs([row], 0, 272)
        second.close()
        assert generator.score([row])[0] == pytest.approx(expected, abs=TOLERANCE)
    finally:
        generator.close()
    [(still, _, _)] = teacher.logprobs([row], 0, 272)
    for expected in (own, by_transformers(row).gather(1, torch.tensor(row)[1:, None])[:, 0]):
        torch.testing.assert_close(still, expected, rtol=0, atol=TOLERANCE)
