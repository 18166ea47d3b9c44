"""What the pretended card must have in common with a real one; each function is a check (test_card.py)."""

import traceback
from collections.abc import Callable

import pytest
import torch
from pretended_card import COUNTS, CardTensor, compiled
from torch.nn import functional as F


def main() -> dict[str, str | None]:
    """{name of a check: its traceback, or None if it passed}."""
    found = {}
    checks: dict[str, Callable[[], None]] = {n: f for n, f in globals().items() if n.startswith("check_")}
    for name, check in checks.items():
        COUNTS.clear()
        try:
            check()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    return found


def card(*sizes: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(sizes).numel()), device="cuda").reshape(sizes)


def done() -> tuple[int, int]:
    """(waits, uploads) since the last call."""
    counts = COUNTS.waits.total(), COUNTS.uploads.total()
    COUNTS.clear()
    return counts


def check_a_tensor_of_the_card_meets_none_of_the_host_but_scalars_and_indices() -> None:
    with pytest.raises(RuntimeError, match="two devices"):
        card(3) + torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.cat([card(3), torch.ones(3)])
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        card(3).numpy()
    assert (card(3) + torch.tensor(1.0)).tolist() == [1, 2, 3]
    done()
    assert type(card(3)[torch.tensor([2, 0])]) is CardTensor
    assert done() == (0, 1)


def check_a_tensor_of_one_card_meets_none_of_another() -> None:
    """This process sees two cards, by CUDA_VISIBLE_DEVICES."""
    first, second = card(3), card(3).to("cuda:1")
    for meet in (
        lambda: first + second, lambda: torch.cat([second, first]), lambda: first * second.sum(),
        lambda: first[second.long()], lambda: first.index_add_(0, torch.zeros(1, device="cuda:1").long(), first[:1]),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="two devices, cuda:1 and cuda:0"):
            meet()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:2")
    assert (first.to(second.device) + second).device == first.clone().copy_(second).to("cuda:1").device == second.device
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device == torch.device("cuda", torch.cuda.current_device()) == second.device
    assert torch.ones(1, device="cuda").device == first.device
    weight = torch.ones(3, device="cuda:1", requires_grad=True)
    (weight * second).sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == second.device
    torch.manual_seed(5)
    numbers = torch.rand(2, device="cuda:1")
    assert torch.equal(numbers.cpu(), torch.rand(2, device="cuda").cpu()), "each has numbers of its own"
    COUNTS.tensors.clear()
    torch.ones(1, device="cuda:1")
    assert COUNTS.tensors == {"5": 1}


def check_the_host_waits_where_it_needs_a_number() -> None:
    x, mask = card(4), card(4) > 1
    assert done() == (0, 0)
    waits = [
        lambda: float(x.sum()), lambda: x.tolist(), lambda: x.cpu(), lambda: x[mask], lambda: mask.nonzero(),
        lambda: bool(mask.any()), lambda: x.unique(), lambda: torch.equal(x, x), lambda: torch.empty(4).copy_(x),
        lambda: x.to("cpu", torch.float64), lambda: torch.cuda.synchronize(), lambda: x.masked_select(mask),
        lambda: x.clone().index_put_((mask,), card(2)), lambda: x.repeat_interleave(card(4).long()),
    ]  # fmt: skip
    for i, wait in enumerate(waits):
        wait()
        assert done() == (1, 0), i
    free = [
        lambda: x.where(mask, 0), lambda: x.clone().masked_fill_(mask, 1), lambda: x.index_select(0, mask.long()),
        lambda: x[mask.long()], lambda: x.clone().__setitem__(mask, 0.0), lambda: torch.isin(x, x), lambda: x.topk(2),
        lambda: x[1:3] + x.mean(), lambda: x.repeat_interleave(2), lambda: x.to(torch.bfloat16), lambda: x.to("cuda"),
    ]  # fmt: skip
    for i, run in enumerate(free):
        run()
        assert done() == (0, 0), i


def check_what_comes_from_the_host_is_an_upload() -> None:
    ours = [
        lambda: torch.tensor([1, 2], device="cuda"), lambda: torch.ones(2).to("cuda"), lambda: torch.ones(2).cuda(),
        lambda: card(2).copy_(torch.ones(2)), lambda: card(2).new_tensor([1.0, 2.0]),
        lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
    ]  # fmt: skip
    for i, upload in enumerate(ours):
        upload()
        assert done() == (0, 1), i
    for make in (torch.ones, torch.zeros, torch.empty, torch.rand):
        assert type(make(2, device="cuda")) is CardTensor
    assert done() == (0, 0)


def check_the_card_has_random_numbers_of_its_own() -> None:
    torch.manual_seed(5)
    host, expected = torch.get_rng_state(), torch.rand(3)
    torch.set_rng_state(host)
    first = F.dropout(torch.ones(64, device="cuda")).cpu()
    assert torch.equal(torch.get_rng_state(), host), "the host's numbers stay as they were"
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3, device="cuda").cpu(), expected)
    torch.cuda.manual_seed_all(5)
    assert torch.equal(F.dropout(torch.ones(64, device="cuda")).cpu(), first)
    own = torch.Generator(device="cuda").manual_seed(5)
    assert own.device.type == "cuda"
    assert torch.equal(torch.rand(3, device="cuda", generator=own).cpu(), expected)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def check_bytes_are_counted_while_they_live() -> None:
    before = COUNTS.live
    x = torch.zeros(1000, device="cuda")  # 4,000 bytes are rounded up to 4,096
    view = x[10:]
    assert COUNTS.live - before == 4096
    del x
    assert COUNTS.live - before == 4096
    del view
    assert COUNTS.live == before


def check_a_compiled_function_rounds_what_it_writes_alone() -> None:
    def scaled(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = x * 1.01
        total.add_(y)
        return y * 1.01

    x = torch.linspace(1, 2, 64, device="cuda").bfloat16()
    total = torch.zeros(64, device="cuda")
    COUNTS.clear()
    found = compiled(scaled)(x, total)
    assert dict(COUNTS.launches) == {"compiled scaled": 1}
    exact = x.float() * 1.01
    assert torch.equal(found, (exact * 1.01).bfloat16())
    assert torch.equal(total, exact), "written once, in full"
