"""What devices can do, of kinds that are not here."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlft.config.trainer import ClusterConfig
from rlft.model.kernels.flash_attention import obstacle
from rlft.plan.rules import check_cluster_has_devices
from rlft.system import device as devices
from rlft.system.device import (
    KINDS,
    buckets,
    copied,
    copy_each,
    fork_rng,
    free_bytes,
    kind_of,
    on_host,
    peak_memory_bytes,
    repeatable,
    resolve_device,
    resolve_dtype,
    total_bytes,
    type_of,
    widest,
)
from rlft.types import UserError

CPU, CARD = torch.device("cpu"), torch.device("cuda:1")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cuda", "xpu", "mps"])
def test_a_device_that_is_not_there_is_refused(name, monkeypatch):
    for module in (torch.cuda, torch.xpu, torch.mps):
        monkeypatch.setattr(module, "is_available", lambda: name == "cuda:99")
        monkeypatch.setattr(module, "device_count", lambda: 1)
    with pytest.raises(UserError, match=rf"^model\.device: .*, got {name}; "):
        resolve_device(name)


def test_auto_is_a_cuda_device_where_there_is_one_and_the_dtype_that_a_device_computes_fast(monkeypatch):
    for is_there, kind in ((False, "cpu"), (True, "cuda")):
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda answer=is_there: answer)
            assert resolve_device("auto").type == kind
    monkeypatch.setattr(torch.version, "hip", None)
    assert {name: type_of(name) for name in KINDS if type_of(name) != name} == {"rocm": "cuda"}
    dtypes = {"cpu": torch.float32, "cuda": torch.bfloat16, "xpu": torch.bfloat16, "mps": torch.float32}
    for kind, dtype in dtypes.items():
        device = torch.device(kind)
        assert resolve_dtype("auto", device) == dtype
        assert resolve_dtype("float16", device) == torch.float16
        assert kind_of(device) is KINDS[kind]
        assert torch.zeros(1, dtype=widest(device)).double().dtype == torch.float64
        assert (widest(device) == torch.float64) == (kind != "mps")


def test_auto_fits_the_card_and_a_dtype_that_it_lacks_is_refused_by_key(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, auto in (((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert resolve_dtype("auto", CARD) == auto
        assert resolve_dtype("float32", CARD) == torch.float32
        assert resolve_dtype("float16", CARD) == torch.float16
        if auto is torch.bfloat16:
            assert resolve_dtype("bfloat16", CARD) == torch.bfloat16
            continue
        with pytest.raises(UserError) as refused:
            resolve_dtype("bfloat16", CARD)
        assert str(refused.value) == (
            "model.dtype: bfloat16 needs compute capability 8.0, which Tesla T4 lacks, got bfloat16; "
            "use model.dtype=float16, or auto, which is float16 on this card"
        )


def test_a_card_of_amd_gets_bfloat16_ranks_and_no_kernel_that_was_not_tried_there(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kind_of(CARD) is KINDS["rocm"]
    assert resolve_dtype("auto", CARD) == torch.bfloat16
    assert obstacle(torch.bfloat16, 64, CARD) == ("flash attention was tried on NVIDIA's GPUs only, not on an AMD GPU")
    check_cluster_has_devices(ClusterConfig(ranks=2, engines=2), CARD)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_one_process_uses_a_device_on_which_processes_exchange_no_tensors(kind):
    device = torch.device(kind)
    check_cluster_has_devices(ClusterConfig(), device)
    for cluster, key in ((ClusterConfig(ranks=2), "cluster.ranks"), (ClusterConfig(engines=1), "cluster.engines")):
        with pytest.raises(UserError, match=rf"^{key}: .* model.device is an (Intel|Apple) GPU, got \d; set {key}="):
            check_cluster_has_devices(cluster, device)
        check_cluster_has_devices(cluster, CPU)


def test_memory_is_that_of_the_device_or_of_the_machine_which_an_apple_gpu_shares(monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda: 7)
    monkeypatch.setattr(devices, "peak_resident_bytes", lambda: 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (3, 9))
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: type("P", (), {"total_memory": 9}))
    monkeypatch.setattr(torch.xpu, "max_memory_allocated", lambda: 4)
    assert [free_bytes(torch.device(kind)) for kind in ("cpu", "mps", "xpu")] == [7, 7, 3]
    assert total_bytes(torch.device("xpu")) == 9
    assert peak_memory_bytes() == 5
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert peak_memory_bytes() == 4


def test_random_numbers_of_the_host_and_of_one_device_are_forked(monkeypatch, recwarn):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: asked.append(device) or "state")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: asked.append((state, device)))
    before = torch.get_rng_state()
    for device, of_cards in ((CARD, [CARD, ("state", CARD)]), (CPU, [])):
        asked.clear()
        with fork_rng(device):
            torch.rand(1)
        assert asked == of_cards
        assert torch.equal(torch.get_rng_state(), before)
    assert not recwarn.list


@pytest.mark.parametrize("copies", [copied, on_host])
def test_copies_are_equal_apart_and_made_by_as_many_operations_for_any_number_of_tensors(copies):
    dice = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 8, generator=dice, requires_grad=True)
    tensors = {f"half {i}": whole[i] for i in range(6)} | {
        "turned": whole.t(),
        "16 bits": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.ones(0, 4),
        "number": torch.tensor(1.5),
    }
    made = copies(tensors)
    assert list(made) == list(tensors)
    for name, copy in made.items():
        assert copy.dtype == tensors[name].dtype
        assert torch.equal(copy, tensors[name]), name
        assert not copy.requires_grad
    storages = {copy.untyped_storage().data_ptr() for copy in made.values() if copy.numel()}
    assert len(storages) == len(tensors) - 1
    assert whole.untyped_storage().data_ptr() not in storages
    few, many = (launched(lambda n=n: copies({str(i): torch.ones(4) for i in range(n)})) for n in (2, 30))
    assert few == many
    assert sum(few.values()) == 1
    assert copies({}) == {}


def test_a_copy_on_the_host_is_brought_there_in_buckets(monkeypatch):
    monkeypatch.setattr(devices, "BUCKET", 40)
    tensors = {"long": torch.arange(27.0), "short": torch.arange(3.0), "bytes": torch.arange(50, dtype=torch.uint8)}
    made = on_host(tensors)
    assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
    assert launched(lambda: on_host(tensors))["cat"] == 5  # 30 numbers of 4 bytes in three, 50 of one byte in two


def test_tensors_of_several_kinds_are_copied_each_into_its_own():
    dice = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 3, generator=dice).to(dtype) for dtype in (torch.float32, torch.bfloat16) * 3]
    targets = [torch.zeros(2, 3, dtype=dtype) for dtype in (torch.bfloat16,) * 4 + (torch.float32,) * 2]
    copy_each(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))
    with pytest.raises(ValueError, match="shorter"):
        copy_each(targets, sources[1:])


def test_what_is_written_counts_as_changed(monkeypatch):
    """On a GPU torch's kernels for lists count no versions, by which copies of adapters are known to be old."""
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: [t.data.copy_(s) for t, s in zip(to, of, strict=True)])
    parameter = torch.nn.Parameter(torch.ones(3))
    version = parameter._version
    copy_each([parameter.detach()], [torch.full((3,), 2.0)])
    assert parameter._version > version
    assert parameter.tolist() == [2.0] * 3


def launched(call):
    """How often each operation is called that sends many tensors to a device, or brings them from there."""
    seen = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ == "_foreach_copy_":  # torch copies lists of several kinds one by one
                assert all(len({(t.dtype, t.device) for t in tensors}) == 1 for tensors in args[:2])
            seen[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))

    with Watch():
        call()
    return Counter({name: n for name, n in seen.items() if name in ("_foreach_copy_", "_to_copy", "clone", "cat")})


# -- buckets -----------------------------------------------------------------------------------------------------------
def test_buckets_have_all_elements_in_their_order_one_dtype_and_a_limit():
    """20 bytes: five numbers in 32 bits, two in 64, ten in 16."""
    sizes = ((3, torch.float32), (9, torch.float32), (1, torch.float64), (0, torch.float64), (4, torch.float64),
             (6, torch.float16))  # fmt: skip
    assert buckets([torch.zeros(n, dtype=dtype) for n, dtype in sizes], 20) == [
        [(0, 0, 3), (1, 0, 2)], [(1, 2, 7)], [(1, 7, 9)],
        [(2, 0, 1), (4, 0, 1)], [(4, 1, 3)], [(4, 3, 4)],
        [(5, 0, 6)],
    ]  # fmt: skip


# -- sums in a fixed order ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("only_warns", [False, True])
@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_what_it_sets_is_set_inside_alone(before, only_warns):
    at_first = settings()
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        with pytest.raises(ValueError, match="of the block"):
            fail_inside(only_warns)
        assert settings() == (*before, at_first[2])
    finally:
        torch.use_deterministic_algorithms(at_first[0], warn_only=at_first[1])


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def fail_inside(only_warns):
    with repeatable(only_warns=only_warns):
        assert settings() == (True, only_warns, False)
        raise ValueError("of the block")
