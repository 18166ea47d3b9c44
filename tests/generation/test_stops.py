"""Where a completion ends by its text, and what is shown of it; every engine is held to this."""

import random
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from rlft.generation.stops import GrowingText, ShownText, StopStrings, check_stops, cut, plain_decoder, shown_texts
from rlft.generation.transformers import TransformersGenerator
from rlft.tokens.text import RunTokenizer
from rlft.types import Sampling, UserError


def sampling(*stop, tokens=(), include=False, max_tokens=48):
    how = {"stop": stop, "stop_token_ids": tokens, "include_stop_str_in_output": include}
    return Sampling(max_tokens=max_tokens, temperature=1.0, **how)


class Pieces:
    """A tokenizer whose token i is these bytes; a byte sequence that is no character is written as tokenizers do."""

    def __init__(self, *pieces):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]

    def decode(self, ids, **_):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def batch_decode(self, rows, **_):
        return [self.decode(row) for row in rows]


def ends_at(pieces, *stop, prompt=()):
    """How many tokens the completion has that says all these pieces, in order, if it is stopped by these strings."""
    watch = StopStrings(stop, Pieces(*pieces).decode, [list(prompt)])
    for token in range(len(pieces)):
        if watch.completes(0, token):
            assert watch.stopped == {0}
            return token + 1
    assert not watch.stopped
    return None


EURO = "€".encode()  # three bytes


def test_rows_and_prompts_are_no_part_of_each_others_text():
    watch = StopStrings(["ab"], Pieces("a", "b", "ab").decode, [[0], []])
    assert [watch.completes(*told) for told in ((0, 1), (1, 0), (0, 0), (1, 1))] == [False, False, False, True]
    assert watch.stopped == {1}
    assert watch.completes(0, 2)


@pytest.mark.parametrize(("pieces", "stop", "expected"), [
    (["a</b></answer> more", "x"], ["</answer>"], 1),  # inside one
    (["ab", "ab", "ac"], ["abac"], 3),  # a beginning that comes to nothing, and begins again
    (["", "", "a", "", "b"], ["ab"], 5),  # tokens without text
    ([EURO[:1], EURO[1:], "b"], ["€b", "b"], 3),
    ([b"ab" + EURO[:1], EURO[1:], "c"], ["ab"], 2),  # seen once the character is whole, as by vLLM
    (["a", EURO[:1], "b", "c"], ["bc"], 4),  # bytes that never become a character hide nothing after them
    (["x", "long stop", " string here"], ["stop string", "ere!"], 3),
])  # fmt: skip
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(pieces, stop, expected):
    assert ends_at(pieces, *stop) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_any_cutting_of_a_text_into_tokens_ends_at_the_first_whole_stop_string(length):
    draw = random.Random(length)
    for _ in range(200):
        text = "".join(draw.choice("ab€") for _ in range(30))
        data, pieces = text.encode(), []
        while data:
            size = draw.randint(1, 4)
            pieces.append(data[:size])
            data = data[size:]
        stop = "".join(draw.choice("ab€") for _ in range(length))
        # The plain way: decode everything after each token, and look for the string where no character is torn.
        whole = [b"".join(pieces[:n]).decode(errors="replace") for n in range(1, len(pieces) + 1)]
        expected = next((n for n, said in enumerate(whole, 1) if stop in said and said[-1] != "\ufffd"), None)
        assert ends_at(pieces, stop) == expected, (pieces, stop)


@pytest.mark.parametrize("include", [False, True])
def test_what_is_shown_in_pieces_is_the_text_that_is_shown_at_the_end_and_never_a_stop(include):
    draw = random.Random(include)
    pieces = ["a", "b", "ab", "€", "€".encode()[:1], "€".encode()[1:], "c"]
    tokenizer, num_held = RunTokenizer(Pieces(*pieces)), 0
    for _ in range(500):
        stop = tuple("".join(draw.choice("ab€") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(0, 2)))
        given = sampling(*stop, tokens=(6,), include=include)
        watch, shown, ids = StopStrings(stop or ("x",), tokenizer.decode, [()]), ShownText(tokenizer.decode, given), []
        told, stopped = "", False
        while len(ids) < 12 and not stopped:
            ids.append(draw.randrange(len(pieces)))
            stopped = watch.completes(0, ids[-1]) or ids[-1] == 6
            told += shown.add(ids[-1])
            [text] = shown_texts(tokenizer, [ids], [stopped], given)
            assert text.startswith(told), "nothing is shown that has to be taken back"
            num_held += len(text) > len(told)
        if stopped and ids[-1] != 6 and stop:
            assert told == text
    assert num_held


def test_growing_text_is_that_of_the_real_tokenizer(tiny_path):
    tokenizer = RunTokenizer(AutoTokenizer.from_pretrained(tiny_path))
    text = "<think>47 + 85 = 132 € é 漢字</think><answer>132</answer>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for decode in (plain_decoder(tokenizer), lambda ids: tokenizer.decode(ids, skip_special_tokens=True)):
        growing = GrowingText(decode, ids[:5])
        assert "".join(growing.add(token) for token in [*ids, tokenizer.eos_token_id]) == text


@pytest.mark.parametrize(
    ("include", "expected"), [(False, ["so ", "no", "so . end"]), (True, ["so . e", "no!", "so . end"])]
)
def test_the_text_ends_before_the_stop_or_behind_it(include, expected):
    tokenizer = RunTokenizer(Pieces("so ", ". end", "no", "!"))
    rows, stopped = [[0, 1], [2, 3], [0, 1]], [True, True, False]  # the last was ended by its length
    assert shown_texts(tokenizer, rows, stopped, sampling(". e", tokens=(3,), include=include)) == expected
    # Of several strings the one that is complete first ends the text.
    assert cut("abcd", sampling("d", "bc", "bcd", include=include)) == ("abc" if include else "a")
    assert cut("abcd", sampling("x", include=include)) == "abcd"


# -- with the model --------------------------------------------------------------------------------------------------
@pytest.fixture
def generator(make_roles, backbone):
    return TransformersGenerator(make_roles(noise=0.02), backbone.tokenizer, backbone.device, 64)


@pytest.fixture
def prompts(make_prompt):
    return [make_prompt(f"What is {a} + {b}?") for a, b in ((12, 30), (47, 85), (9, 1))]


def completions(groups):
    return [rollout.completion for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [("</answer>",), ("</think><", "zz"), ("=", "+")], ids=str)
def test_what_is_sampled_until_the_stop_is_what_is_sampled_without_it(stop, include, generator, prompts):
    """A stop changes no token before it, and no log-prob beyond the rounding of batches of other sizes."""
    seeds, free = [100, 200, 300], completions(generator.sample(prompts, 4, [100, 200, 300], sampling()))
    found = completions(generator.sample(prompts, 4, seeds, sampling(*stop, include=include)))
    decode = plain_decoder(generator.tokenizer)
    num_stopped = 0
    for ours, whole in zip(found, free, strict=True):
        lengths = range(1, len(whole.token_ids) + 1)
        expected = next((n for n in lengths if any(s in decode(whole.token_ids[:n]) for s in stop)), None)
        num_stopped += expected is not None
        assert ours.token_ids == whole.token_ids[:expected]
        assert ours.logprobs == pytest.approx(whole.logprobs[:expected], abs=1e-5)
        assert ours.finish_reason == ("stop" if expected is not None else whole.finish_reason)
        said = decode(ours.token_ids)
        if expected is None:
            assert ours.text == whole.text
        elif include:
            assert said.startswith(ours.text)
            assert ours.text.endswith(stop)
        else:
            assert not any(s in ours.text for s in stop)
            assert said[len(ours.text) :].startswith(stop)
    assert num_stopped >= 6


def test_a_stop_token_ends_a_completion_and_stays_its_last_token(generator, prompts):
    [token] = generator.tokenizer("=", add_special_tokens=False)["input_ids"]
    for include in (False, True):
        found = completions(generator.sample(prompts, 4, [1, 11, 21], sampling(tokens=(token,), include=include)))
        ended = [c for c in found if c.token_ids[-1] == token]
        assert len(ended) >= 6
        for completion in ended:
            assert list(completion.token_ids).count(token) == 1
            assert completion.finish_reason == "stop"
            assert completion.text.endswith("=") == include


def test_a_stop_at_the_last_token_that_was_allowed_is_a_stop(generator, prompts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopStrings, "__init__", lambda *_: pytest.fail("a watch was made without stops"))
        [whole] = completions(generator.sample(prompts[:1], 1, [7], sampling()))
    text = plain_decoder(generator.tokenizer)
    limit = next(n for n in range(1, 99) if "=" in text(whole.token_ids[:n]))
    [found] = completions(generator.sample(prompts[:1], 1, [7], sampling("=", max_tokens=limit)))
    assert (len(found.token_ids), found.finish_reason) == (limit, "stop")
    [cut_off] = completions(generator.sample(prompts[:1], 1, [7], sampling("=", max_tokens=limit - 1)))
    assert (len(cut_off.token_ids), cut_off.finish_reason) == (limit - 1, "length")


# -- what is refused -------------------------------------------------------------------------------------------------
def test_a_special_token_is_refused_as_text_with_its_id_and_texts_and_ids_may_be_mixed(backbone, run_config):
    def check(*stops):
        generation = replace(run_config().generation, stop=stops)
        check_stops(generation, tokenizer, 272)
        return generation.sampling

    tokenizer = backbone.tokenizer
    name, number = next(
        (str(t), i) for i, t in tokenizer.added_tokens_decoder.items() if t.special and i != tokenizer.eos_token_id
    )
    with pytest.raises(UserError, match=rf"never shows, got .*use its token id, generation\.stop=\[{number}\]"):
        check(f"a{name}")
    with pytest.raises(UserError, match="leave it out, since every completion ends at it anyway"):
        check(tokenizer.eos_token)
    found = check("</answer>", number, "x")
    assert (found.stop, found.stop_token_ids) == (("</answer>", "x"), (number,))
