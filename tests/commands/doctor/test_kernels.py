"""What `rlft doctor` says of kernels that agree with plain ones, are off, or are not there."""

import math

import pytest
import torch
from slow_cases import slow

from rlft.commands.doctor import kernels
from rlft.system.terminal import Status


def test_kernels_that_agree_with_plain_ones_are_within_float32s_rounding(tiny_trial):
    [row] = kernels.kernel_rows(tiny_trial())
    assert row.status in (Status.ok, Status.slow)  # of speed nothing can be said on a busy machine
    # 4 sqrt(2 x 8 roundings x 4 layers) x (2^-24 + sqrt(128) 2^-24)
    bound = pytest.approx(4 * 8 * (1 + math.sqrt(128)) * 2**-24)
    assert row.numbers["logprobs_bound_nats"] == row.numbers["gradients_bound_share"] == bound
    assert 0 < row.numbers["logprobs_nats"] < row.numbers["logprobs_bound_nats"]
    assert 0 < row.numbers["gradients_share"] < row.numbers["gradients_bound_share"]


@pytest.mark.slow
def test_kernels_in_16_bits_are_compared_with_what_16_bits_do_to_plain_ones(tiny_trial, monkeypatch):
    [row] = kernels.kernel_rows(tiny_trial(**{"model.dtype": "bfloat16"}))
    assert row.status in (Status.ok, Status.slow)
    # Some tens of roundings of 2^-9 one after the other; this model's logits are of order 10, and some tokens unlikely.
    assert 1e-3 < row.numbers["mean_nats"] <= row.numbers["mean_bound_nats"] < 0.1
    assert row.numbers["mean_nats"] < row.numbers["logprobs_nats"] <= row.numbers["logprobs_bound_nats"] < 1
    assert 1e-3 < row.numbers["gradients_share"] <= row.numbers["gradients_bound_share"] < 0.2
    monkeypatch.setattr(kernels, "free_bytes", lambda device: 0)
    [row] = kernels.kernel_rows(tiny_trial(**{"model.dtype": "bfloat16"}))
    assert row.numbers["logprobs_bound_nats"] == kernels.rounding(torch.bfloat16, 4, 128)


def test_the_bounds_of_16_bits_are_twice_what_plain_kernels_lose():
    plain = kernels.Differences(logprobs=0.02, mean=0.002, gradients=1e-6, where="")
    assert kernels.bounds_of(plain, 1e-5) == kernels.Differences(logprobs=0.04, mean=0.004, gradients=1e-5)


@pytest.mark.parametrize(
    ("scale", "shift", "dtype"), [slow(1.0, 1e-2, "float32"), (1.001, 0.0, "float32"), slow(1.0, 0.1, "bfloat16")]
)
def test_kernels_that_are_off_are_wrong(scale, shift, dtype, tiny_trial, monkeypatch):
    """By 1e-2 in the log-probs alone (0.1 in bfloat16), and by a thousandth in the gradients, too.

    They are not off yet where a run tries them before it chooses them.
    """
    from rlft.model import forward

    head, calls = forward.head_logprobs, []

    def off(*arguments):
        logprobs, entropy = head(*arguments)
        calls.append(1)
        return (logprobs if len(calls) == 1 else logprobs * scale + shift), entropy

    monkeypatch.setattr(forward, "head_logprobs", off)
    [row] = kernels.kernel_rows(tiny_trial(**{"model.dtype": dtype}))
    assert row.status is Status.wrong
    assert (row.numbers["gradients_share"] > row.numbers["gradients_bound_share"]) == (scale != 1.0)


def test_kernels_that_a_run_would_leave_aside_are_wrong(tiny_trial, monkeypatch):
    from rlft.model import forward

    head = forward.head_logprobs
    monkeypatch.setattr(forward, "head_logprobs", lambda *given: (head(*given)[0] + 1e-2, None))
    [row] = kernels.kernel_rows(tiny_trial())
    assert row.status is Status.wrong
    assert row.value.startswith("padded rows: packed and padded log-probs differ by 1.0e-02")


def test_kernels_are_skipped_where_there_are_none_to_compare(tiny_trial):
    with pytest.raises(kernels.NotReadyError, match="there is nothing to compare"):
        kernels.kernel_rows(tiny_trial(**{"model.kernels": "plain"}))


def test_kernels_that_a_model_has_lost_are_wrong(tiny_trial, monkeypatch):
    made = kernels.measured_pass

    def plain(trial, choice, batch):
        return made(trial, kernels.KernelChoice.plain, batch)

    monkeypatch.setattr(kernels, "measured_pass", plain)
    [row] = kernels.kernel_rows(tiny_trial())
    assert row.status is Status.wrong


def test_the_bound_of_16_bits_is_wider_by_their_rounding():
    # u = 2^-8 and 2^-24 sqrt(896), of 24 layers: 4 sqrt(384) (0.0039 + 0.0000018)
    assert kernels.rounding(torch.bfloat16, 24, 896) == pytest.approx(4 * math.sqrt(384) * (2**-8 + 29.933 * 2**-24))


BOUNDS = kernels.Differences(logprobs=1e-3, mean=1e-3, gradients=1e-3)


LAID = {"reason": "", "is_packed": True}


def test_a_nan_of_a_kernel_is_a_difference():
    gradients = {"a": torch.ones(2), "b": torch.ones(2)}
    plain = kernels.Pass(logprobs=torch.zeros(3), gradients=gradients, seconds=1.0, are_plain=True, **LAID)
    broken = kernels.Pass(
        logprobs=torch.tensor([0.0, math.nan, 0.0]), gradients={**gradients, "b": torch.tensor([1.0, math.nan])},
        seconds=1.0, are_plain=False, **LAID,
    )  # fmt: skip
    found = kernels.differences(broken, plain)
    assert found == kernels.Differences(logprobs=math.inf, mean=math.inf, gradients=math.inf, where="b")
    assert kernels.kernel_row(found, 1.0, BOUNDS).status is Status.wrong
    slow = kernels.Differences(logprobs=0.0, mean=0.0, gradients=0.0, where="")
    assert kernels.kernel_row(slow, 0.5, BOUNDS).status is Status.slow
