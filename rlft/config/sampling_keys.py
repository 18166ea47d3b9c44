"""Sampling settings of other libraries that rlft refuses, each with its reason.

A policy's gradient is computed from its log-probs. Settings that change the model's distribution make the engine sample
from another distribution than the one the trainer computes, so that ratios, KL and entropy would be those of a policy
from which nobody samples.
"""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS = ("", "generation", "eval", "sampling", "sampling_params")
"""Sections, besides those of engines, whose keys are sampling settings; `algorithm.length_penalty` is not one."""

_WITH_HISTORY = "makes a token's probability depend on how often it was said, unlike the trainer's log-probs"
_TOKENS = "takes tokens out of the distribution or shifts them, and the trainer's log-probs count them as they are"
_TAIL = "leaves unlikely tokens out, and the trainer's log-probs count them"
_SEARCH = "searches for likely completions, and a policy learns from its own samples"
_LENGTH = "forbids the end token, whose probability the trainer's log-probs count"

_LEARN = "let the policy learn it instead: reward=[...,repetition]"
_STOP = "write the text or the token id into the list generation.stop"

REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
        (_WITH_HISTORY, _LEARN),
    ),
    **dict.fromkeys(
        ("logit_bias", "bad_words", "bad_words_ids", "allowed_token_ids", "suppress_tokens", "sequence_bias"),
        (_TOKENS, "leave it out; a reward, for instance reward=[...,format], can ask for a form"),
    ),
    **dict.fromkeys(
        ("guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        (_TOKENS, "leave it out; reward=[...,format] teaches a form, also by a regular expression"),
    ),
    **dict.fromkeys(
        ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "top_a", "tfs"),
        (_TAIL, "leave it out (rlft eval, rlft sample and rlft chat take generation.min_p, top_p and top_k)"),
    ),
    **dict.fromkeys(
        ("num_beams", "use_beam_search", "beam_width", "best_of", "length_penalty", "penalty_alpha", "num_beam_groups"),
        (_SEARCH, "leave it out; rlft sample n=8 keep=best keeps the best of several samples"),
    ),
    **dict.fromkeys(
        ("min_tokens", "min_new_tokens", "min_length", "ignore_eos"),
        (_LENGTH, "let the policy learn it instead: reward=[...,length]"),
    ),
    **dict.fromkeys(("stop_strings", "stop_token_ids", "stop_sequences"), ("there is no such key", _STOP)),
}
"""{name: (what is wrong with it, what to do instead)}."""


def refusal(key: str) -> tuple[str, str] | None:
    """(what is wrong, what to do) for a key that would change how tokens are drawn; None for any other key.

    >>> refusal("generation.stop_strings")[1]
    'write the text or the token id into the list generation.stop'
    >>> refusal("algorithm.length_penalty") is None
    True
    """
    section, _, name = key.rpartition(".")
    is_of_sampling = section in SECTIONS or section.rpartition(".")[0] == "generation"
    return REFUSED.get(name.lower().replace("-", "_")) if is_of_sampling else None
