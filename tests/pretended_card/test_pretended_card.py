"""The pretended card itself: what it shares with a real one (card_checks.py), in a process of its own."""


def test_the_card_does_what_a_card_does(on_card):
    found = on_card.found("card_checks:main", CUDA_VISIBLE_DEVICES="7,5")
    assert len(found) == 7
    assert not any(found.values()), "\n".join(filter(None, found.values()))


def test_a_base_is_one_copy(on_card):
    found = on_card.found("card_shared:main")
    assert found.pop("freed") == found.pop("model")
    assert all(found.values()), found


def test_a_publish_into_an_engines_own_matrices_takes_as_many_launches_for_any_number_of_layers(on_card):
    """11 for each of the four shapes of a model of Qwen2's; its check reads the adapter back as well."""
    few, many = on_card.found("card_shared:copied").values()
    assert few == many
    assert not any(few["wrong"])
    assert few["load"] == [45, 1]
    assert few["check"][0] < 100
    assert few["check"][1] == 2
