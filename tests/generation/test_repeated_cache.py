"""The cache of any model; that its rows are the right ones is seen in tests/model/kernels/test_prefix_cache.py."""

import pytest

from rlft.generation.repeated_cache import cache_argument


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_the_cache_is_given_by_the_name_that_the_model_has_for_it_under_peft_too(name):
    class New:
        def forward(self, input_ids, cache=None): ...

    class Old:
        def forward(self, input_ids, past_key_values=None, **kwargs): ...

    class OldMamba:
        def forward(self, input_ids, cache_params=None, **kwargs): ...

    class Wrapped:
        def forward(self, *args, **kwargs): ...

        def get_base_model(self):
            return model

    model = {"cache": New, "past_key_values": Old, "cache_params": OldMamba}[name]()
    assert cache_argument(model) == cache_argument(Wrapped()) == name
