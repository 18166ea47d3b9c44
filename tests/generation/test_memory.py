"""Parts of memory, and when they are there."""

from rlft.generation.memory import MemoryPart, When, busiest, peak


def test_the_peak_is_what_is_always_there_and_the_larger_of_two_times():
    found = [
        MemoryPart(name=w, bytes=b, when=w) for w, b in ((When.always, 5), (When.sampling, 20), (When.updating, 30))
    ]
    assert peak(found) == 35
    assert busiest(found) is When.updating
    found += [MemoryPart(name="x", bytes=11, when=When.sampling)]
    assert (peak(found), busiest(found)) == (36, When.sampling)
