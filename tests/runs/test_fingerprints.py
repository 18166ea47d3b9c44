"""Which parts of a model two records differ in; tests/plan/test_identity.py has how the parts are made."""

from in_one_test import each

from rlft.runs.fingerprints import described, differing, models_in, recorded

NOW = {
    "base_fingerprint": "all", "base_weights_fingerprint": "w", "base_config_fingerprint": "bytes/read",
    "base_tokenizer_fingerprint": "t", "base_commit_fingerprint": "c",
}  # fmt: skip


@each(("changes", "parts"), [
    ({}, ""),
    ({"weights": "v"}, "weights (v then, w now)"),
    ({"config": "bytes/other"}, ""),  # the same bytes, which a library reads otherwise
    ({"config": "other/read"}, ""),  # written again
    ({"config": "other/another"}, "config.json (another then, read now)"),
    ({"tokenizer": None}, ""),  # the hub's cache had not all files then
    ({"commit": "d"}, ""),  # which may hold the same weights
    ({"commit": "d", "weights": None}, "commit on the hub (d then, c now)"),
    ({"commit": None, "weights": None}, "commit on the hub (none then, c now)"),
    ({"weights": "v", "tokenizer": "u"}, "weights (v then, w now), tokenizer (u then, t now)"),
])  # fmt: skip
def test_a_part_with_two_digests_is_the_same_if_one_of_them_is(changes, parts):
    before = NOW | {f"base_{part}_fingerprint": digest for part, digest in changes.items()}
    found = differing({name: digest for name, digest in before.items() if digest is not None}, NOW)
    assert (found.both, bool(found)) == (parts, bool(parts))
    assert not found.without(["weights", "tokenizer", "config", "commit"])


def test_what_is_older_than_parts_has_one_digest_of_all_files():
    assert not differing({"base_fingerprint": "all"}, NOW)
    assert differing({"base_fingerprint": "other"}, NOW).then == "files (other then)"
    assert described({"base_fingerprint": "all"}, NOW, "base") == "files"
    assert described(NOW, NOW, "base") == "weights, config.json, tokenizer, commit on the hub"


def test_the_base_is_told_from_other_models():
    both = NOW | {"teacher_config_fingerprint": "x", "data_fingerprint": "y"}
    assert models_in(both) == ["base", "teacher"]
    assert recorded(both) == NOW
