"""torch behind a name that imports it at its first use."""

import subprocess
import sys

import torch

from rlft.system import lazy


def test_its_attributes_are_those_of_torch():
    assert lazy.torch.where is torch.where
    assert lazy.torch.nn.functional is torch.nn.functional
    assert vars(lazy.torch)["where"] is torch.where, "looked up once"


def test_a_function_without_gradients_keeps_its_name_and_has_none():
    @lazy.no_grad
    def double(value, *, times):
        """Twice."""
        return value * times

    found = double(torch.ones(2, requires_grad=True), times=2)
    assert found.tolist() == [2.0, 2.0]
    assert not found.requires_grad
    assert torch.is_grad_enabled()
    assert (double.__name__, double.__doc__) == ("double", "Twice.")


def test_an_algorithm_is_made_and_asked_without_torch():
    code = (
        "import sys, rlft\n"
        "names = ('grpo', 'ppo', 'reinforce', 'kimi', 'opd')\n"
        "print([rlft.load_algorithm(name).min_group_size for name in names], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[2, 1, 1, 2, 1] False"
