"""How much of a device vLLM takes, from shapes. No vLLM is started."""

from dataclasses import replace
from types import SimpleNamespace

import vision_folders
from real_engines import vllm_engine

from rlft.generation.memory import Load, ModelSizes, When, peak
from rlft.generation.vllm import memory as vllm_memory
from rlft.model.activations import LayerModules

GIB = 2**30
MODEL = ModelSizes(
    parameters=7_600_000_000, base_bytes=15_200_000_000, itemsize=2, lora=40_000_000, adapted=6_500_000_000,
    largest_adapted=3584 * 18944,
    adapter=None, key_size=2 * 4 * 128 * 28, padded="", kernels=None, linear=6_500_000_000,
    config=SimpleNamespace(vocab_size=152_064, hidden_size=3584, intermediate_size=18944),
    modules=LayerModules(),
)  # fmt: skip
LOAD = Load(decodings=(), max_tokens=512, max_sequence_tokens=1024, device="cuda", device_memory=24 * GIB)


def engine(**changes):
    return vllm_engine(**{"gpu_memory_utilization": 0.85, "enforce_eager": False, **changes})


def sizes(model=MODEL, **keys):
    return {part.name: (part.bytes, part.when) for part in engine(**keys).memory(model, LOAD).parts}


def test_a_shared_base_is_counted_once_and_stays_while_the_cache_sleeps():
    whole = int(0.85 * 24 * GIB)
    cache = "vLLM, its KV cache (it shares the base)"
    assert sizes() == {cache: (whole - MODEL.base_bytes, When.always)}
    assert sizes(sleep=True) == {
        cache: (whole - MODEL.base_bytes - vllm_memory.GRAPHS, When.sampling),
        "vLLM's CUDA graphs": (vllm_memory.GRAPHS, When.always),
    }
    apart = {"vLLM, its base and KV cache": (whole, When.sampling)}
    assert sizes(share_base=False, sleep=True) == apart
    awake = {"vLLM, awake while it gets weights": (whole, When.publishing)}
    for largest, elements in ((2**20, 2**26), (5120 * 27648, 5120 * 27648)):  # the latter an MLP's of Qwen2.5-32B
        model = replace(MODEL, largest_adapted=largest)
        sums = {"a block of the policy's weights": (elements * (4 + 2), When.publishing)}
        assert sizes(model, weights="copy", sleep=True) == apart | awake | sums
        lasting = {"vLLM, its base and KV cache": (whole, When.always)}
        assert sizes(model, weights="copy") == lasting | sums, "the base counts twice"
    copying = engine(weights="copy", sleep=True)
    assert peak(copying.memory(MODEL, LOAD).parts) == whole + 3584 * 18944 * (4 + 2), "load wakes it"
    assert [engine(weights=way).rounds_sums for way in ("copy", "adapter")] == [True, False]


def test_a_share_in_which_it_does_not_start_is_told_and_so_is_the_smallest_in_which_it_does():
    # 8,192 tokens x (3 x 18,944 + 3 x 3,584) x 2 bytes, logits of 8 rows twice in float32, 1,024 tokens of 57,344 bytes
    least = 15_200_000_000 + 8192 * 67584 * 2 + 2 * 8 * 152064 * 4 + 1024 * 2 * 28672
    assert vllm_memory.least_bytes(MODEL, LOAD, {}, 8) == least
    small = engine(gpu_memory_utilization=0.45)
    assert small.memory(MODEL, LOAD).lacks == least - int(0.45 * 24 * GIB)
    share = vllm_memory.least_share(MODEL, LOAD, {}, 8)
    assert replace(small, gpu_memory_utilization=share).memory(MODEL, LOAD).lacks == 0
    assert replace(small, gpu_memory_utilization=round(share - 0.01, 2)).memory(MODEL, LOAD).lacks > 0
    # The rest of the run leaves 6 GiB beside the base: 20.2 GiB of 24 for the engine with the base.
    assert [e.gpu_memory_utilization for e in small.smaller(MODEL, LOAD, 6 * GIB)] == [0.83, 0.45]
    eight_bits = engine(options={"quantization": "fp8"})
    assert vllm_memory.base_bytes(MODEL, eight_bits.options) == 6_500_000_000 + 2 * 1_100_000_000


def test_the_cache_has_blocks_of_the_widest_layers_keys(tmp_path):
    folder = vision_folders.folder_of(tmp_path / "gemma4", "gemma4")
    options = {"model": str(folder), "trust_remote_code": False, "revision": None, "dtype": "float32"}
    # Keys and values of 4 layers with 2 heads of 64; those with a window have heads of 32.
    of_token = 2 * 4 * 2 * 64 * 4
    held = vllm_memory.cpu_cache_of({**options, "max_model_len": 64, "max_num_seqs": 1})
    assert held == of_token * (64 + vllm_memory.CPU_BLOCK_SIZE)
