"""Whether a run fits, and what to change where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from in_one_test import each

from rlft.commands.plan_command import read_bytes
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.memory import peak
from rlft.plan.fit import largest_budget, remedies
from rlft.plan.memory_demand import sizes_of
from rlft.plan.memory_parts import parts
from rlft.types import UserError

MIB = 2**20


@pytest.fixture(scope="module")
def wide():
    """(model, demand) of a run whose activations are what is largest."""
    plan = resolve(compose(["+recipe=grpo_arithmetic", "generation=transformers", "token_budget=16000"])).plan()
    model = sizes_of(plan.config.model, plan.config.lora)
    return model, plan.demand(model, recompute=False)


@each(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("1.5 GB", 1_500_000_000), ("512mib", 512 * MIB), ("8000000000", 8_000_000_000)],
)
def test_sizes_are_read_as_they_are_written(text, expected):
    assert read_bytes(text) == expected


@each("text", ["", "GiB", "24 gigs", "-3GB", "0", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match=r"^device_memory: must be a size, .*write it as 24GiB"):
        read_bytes(text)


def test_the_largest_budget_fits_and_a_larger_one_does_not(wide):
    model, demand = wide
    limit = peak(parts(model, demand, 0)) - 100 * MIB
    found = largest_budget(model, demand, 0, limit)
    assert found is not None
    assert peak(parts(model, replace(demand, token_budget=found), 0)) <= limit
    group = demand.prompt_tokens + demand.group * demand.completion_tokens
    assert peak(parts(model, replace(demand, token_budget=found + 64 + group), 0)) > limit


def test_where_not_even_the_longest_row_fits_there_is_no_budget(wide):
    model, demand = wide
    assert largest_budget(model, demand, 0, model.base_bytes) is None


def test_every_way_that_is_told_fits(wide):
    model, demand = wide
    needed = peak(parts(model, demand, 0))
    limit = needed - 150 * MIB
    told = {key: way for way in remedies(model, demand, 0, limit) for key in way.changes}
    assert {"token_budget", "model.gradient_checkpointing"} <= told.keys()
    assert all(way.peak <= limit and len(way.changes) == 1 for way in told.values())
    budget = int(told["token_budget"].changes["token_budget"])
    assert peak(parts(model, replace(demand, token_budget=budget), 0)) == told["token_budget"].peak


def test_where_no_single_key_suffices_the_least_is_told_if_it_does(wide):
    model, demand = wide
    longest = demand.prompt_tokens + demand.completion_tokens
    bare = replace(demand, token_budget=longest, recompute=True, engine=None, adapters=demand.adapters + 1)
    limit = peak(parts(model, bare, 0)) + 4 * MIB  # the completions of one group, but no sums
    [least] = remedies(model, demand, 0, limit)
    assert str(least) == (
        f"token_budget={longest} model.gradient_checkpointing=true generation.transformers.batch_size=8"
        " generation.transformers.weights=apart"
    )
    assert least.peak <= limit
    assert remedies(model, demand, 0, model.base_bytes) == []
