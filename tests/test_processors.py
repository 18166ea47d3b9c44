"""The numeric tests pass as other processors compute: with narrower vector instructions, with one thread and with two.

Which instructions a sum is made with decides its last bits. What holds on the machine at hand only is found here by
telling torch and MKL to leave its widest instructions alone. The whole suite runs so by hand:

    ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 RLFT_TEST_THREADS=2 python -m pytest -n 2 --dist loadfile
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DECODING = "tests/generation/test_transformers.py::test_"
COMPARING = [
    f"{DECODING}completions_do_not_depend_on_the_batch_size_or_on_what_else_is_in_the_batch",
    f"{DECODING}logprobs_are_those_of_a_plain_forward_at_this_temperature",
    f"{DECODING}whatever_is_multiplied_with_it_samples_the_policy",
    "tests/model/test_lora_config.py::test_an_adapter_that_peft_made_elsewhere_is_read_rightly",
    "tests/model/test_roles.py::test_passes_made_together_give_what_each_gives_alone",
    "tests/model/kernels/test_decoder_layer.py::test_sums_that_are_lent_and_passes_without_gradient_give_the_same",
    *(f"tests/model/kernels/test_{name}.py" for name in ("lora_linear", "elementwise", "lm_head", "prefix_cache")),
]
"""Where two ways to the same number are compared, and quick."""
PINNED = "tests/whole_runs/test_pinned_numbers.py"
"""Numbers of runs that hold everywhere."""

PROCESSORS = {
    "without vector extensions, two threads": ("default", "SSE4_2", "2", [*COMPARING, PINNED]),
    "with AVX2, one thread": ("avx2", "AVX2", "1", COMPARING),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_comparisons_hold_as_another_processor_computes(processor):
    capability, instructions, threads, tests = PROCESSORS[processor]
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": capability,
        "MKL_ENABLE_INSTRUCTIONS": instructions,
        "RLFT_TEST_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",  # two threads that wait by spinning take minutes on a machine with other work
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_the_setting_reaches_torch():
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "DEFAULT"
