"""Decoding and publishing on the pretended card: few launches, hardly any waits, and in CUDA graphs the same bits."""

import card_graphs
import pytest
from card_decoding import LAYERED, OTHERS, TOKENS
from slow_cases import slow, slow_but

MOST_LAUNCHES = 25
"""Of a layer and token, with an adapter in 16 bits."""

READS = 1
"""Of the tokens that are counted: one in eight, whatever the number of rows; with a callback each of them is read."""


@pytest.mark.parametrize("name", ["qwen2", *(slow(name) for name in (*LAYERED, *OTHERS) if name != "qwen2")])
def test_a_token_takes_few_launches_and_waits_and_a_publish_a_few_waits(on_card, name):
    """Launches are as many for any number of rows, and waits of a publish for any number of layers: what the engine
    holds is read back per kind of tensors."""
    found = on_card.found("card_decoding:counted", name)
    few, many = found["launches"]
    assert few == many
    assert len(found["waits"]) == 4
    for way, lines in found["waits"].items():
        assert 0 < sum(lines.values()) <= (TOKENS if way == "a callback" else READS), (way, lines)
    if name in LAYERED:
        assert 0 < sum(found["layer"].values()) <= MOST_LAUNCHES, found["layer"]
        shallow, deep = found["published"]
        assert shallow == deep


@pytest.mark.slow
def test_a_rehearsal_takes_what_drafts_and_ways_of_sampling_take_at_most_and_the_plan_counts_it(on_card):
    found = on_card.found("card_decoding:widest")
    assert found.keys() == {"0", "12", "96", "top_p"}
    for rows, (planned, rehearsed, taken) in found.items():
        assert rehearsed == pytest.approx(taken, rel=0.01), (rows, found)
        assert taken <= planned <= 1.35 * taken, (rows, found)
    assert found["96"][1] > 3 * found["0"][1]
    assert found["top_p"][1] > 1.4 * found["0"][1]


# -- in CUDA graphs: the bits of the steps that they record, a launch a token, no waits --------------------------------
@pytest.mark.parametrize("name", slow_but("qwen2", ("qwen2", "no biases", "norms over heads", "few adapters")))
def test_a_replay_gives_the_bits_of_the_step_in_one_launch_a_token_and_one_wait_for_several(on_card, name):
    """For chunks of 12, 8 and 20 rows, versions of the adapter, and ways of sampling; rows end at different times."""
    found = on_card.found("card_graphs:case", name)
    assert len(found["same"]) == len(card_graphs.WAYS) + 2
    for way, (is_same, lengths, replays, problem) in found["same"].items():
        assert is_same, way
        assert problem is None, way
        assert replays > 8, way
        assert len(lengths) > 4 or "greedy" in way, way
    launches, waits, uploads = found["counted"]["graphs"]
    assert launches["graph"] == TOKENS
    assert sum(launches.values()) <= TOKENS + 2, launches
    assert list(waits.values()) == [1]
    assert not uploads
    one_by_one, *others = found["counted"]["without"]
    assert sum(one_by_one.values()) > 40 * TOKENS
    assert others == [waits, {}], "nothing is read in between there either"


QUICK_FAULTS, FAULTS = card_graphs.QUICK_FAULTS, card_graphs.FAULTS


FREED = "keys that moved, unwatched"


@pytest.mark.parametrize(
    "names", [QUICK_FAULTS, slow([name for name in FAULTS if name not in QUICK_FAULTS])], ids=["quick", "others"]
)
def test_what_would_make_replays_wrong_is_seen(on_card, names):
    """A fault gives other results, unless the engine notices it and computes the steps without graphs."""
    found = on_card.found("card_graphs:faults", *names)
    seen = {name: [same, said and said.partition(" @ ")[0], *more] for name, (same, said, *more) in found.items()}
    if seen.get(FREED, [False, None])[1] == "a replay of 4 rows differs from the step that was recorded":
        seen[FREED][1] = None  # by chance: what is freed may have other numbers already at the first replay
    expected = {name: FAULTS[name] for name in names}
    assert seen == {name: [fault.same, fault.said, fault.races, fault.left] for name, fault in expected.items()}


def test_memory_of_graphs_is_lost_with_the_next_replay_of_another_one_and_with_the_graph(on_card):
    assert on_card.found("card_graphs:stand_in") == [[9, 9], [2, 9], [9, 3], [2, 9], [9, 9]]


DECODINGS = {"quick": ["all", "longer prompts later"], "all": [*card_graphs.DECODINGS]}


@pytest.mark.parametrize("which", slow_but("quick", DECODINGS))
def test_the_plan_has_the_memory_that_graphs_hold(on_card, which):
    found = on_card.found("card_graphs:memory", *DECODINGS[which])
    assert [*found] == DECODINGS[which]
    for name, (planned, counted) in found.items():
        assert set(planned) == {"keys and values for graphs", "CUDA graphs"}
        assert 0.9 < sum(planned.values()) / counted < 1.15, (name, planned, counted)


KINDS = {"quick": card_graphs.QUICK_KINDS, "all": [*card_graphs.KINDS]}


@pytest.mark.parametrize("which", slow_but("quick", KINDS))
def test_each_kind_of_model_has_graphs_or_says_why_not(on_card, which):
    found = on_card.found("card_graphs:kinds", *KINDS[which])
    assert [*found] == [*KINDS[which]]
    for name, (row, same, replays, problem, uncovered) in found.items():
        value, why = card_graphs.KINDS[name][1]
        assert (row, same, problem, uncovered) == ([value, why], True, None, 0), name
        assert (replays > 8) == (value != "no"), name
