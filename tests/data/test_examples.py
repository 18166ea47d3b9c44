"""Demonstrations, rankings, texts and what a teacher reads as tokens: what is kept, left out and refused."""

import hashlib
import importlib
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reward_groups import group_of
from transformers import AutoTokenizer
from turn_shapes import SHAPES, shaped_tokenizer

from rlft.config.model import KernelChoice, ModelConfig
from rlft.config.schema import PromptsConfig
from rlft.data import examples
from rlft.data.arithmetic import split_of
from rlft.data.examples import Text, TextTokens, load_texts, scan_demonstrations, scan_rankings, scan_texts, turns_of
from rlft.data.files import files_at
from rlft.data.prompts import permutation, prompts_for_step, tokenizer_fingerprint
from rlft.loop.metrics import text_loss
from rlft.model.backbone import ends_of
from rlft.model.forward import Forward, choose
from rlft.model.packing import micro_batches
from rlft.tokens.text import RunTokenizer, rendered, turn_ends
from rlft.types import Demonstration, Outputs, Prompt, Ranking, Split, UserError
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

PROMPTS = PromptsConfig(max_tokens=64, over_limit="drop", style="chat")
SCRIPTS = Path(__file__).parents[2] / "scripts"
END = 2
"""<|im_end|> in the embedded vocabulary."""


def asked(question, **metadata):
    return Prompt(id=question, messages=({"role": "user", "content": question},), answer="", metadata=metadata)


def demonstrated(question, completion, ids=(), **metadata):
    return Demonstration(prompt=asked(question, **metadata), completion=completion, completion_ids=tuple(ids))


def ranked(question, *completions, **metadata):
    """Best first, n - 1 down to 0."""
    scores = tuple(float(len(completions) - 1 - i) for i in range(len(completions)))
    return Ranking(prompt=asked(question, **metadata), completions=completions, scores=scores)


@pytest.fixture
def scan(backbone):
    """Scans demonstrations or rankings with the embedded model's tokenizer."""

    def scanned(given, limit=64, **keys):
        scan_them = scan_rankings if isinstance(given[0], Ranking) else scan_demonstrations
        return scan_them(given, backbone.tokenizer, replace(PROMPTS, **keys), limit, Split.train)

    return scanned


def ids_of(backbone, text):
    return backbone.tokenizer(text, add_special_tokens=False)["input_ids"]


# -- demonstrations ----------------------------------------------------------------------------------------------------
def test_a_demonstration_is_its_prompt_as_it_is_sampled_from_and_its_text_with_an_end(backbone, scan, make_prompt):
    """Sampled tokens are kept exactly, whatever their text says, and without an end where none was sampled."""
    assert turn_ends(backbone.tokenizer, "chat").closing == (END,)
    mine = tokenizer_fingerprint(backbone.tokenizer)
    sampled = demonstrated("1?", "other words", [7, 7], tokenizer=mine)
    text, kept = scan([demonstrated("What is 1 + 2?", "<answer>3</answer>"), sampled]).texts
    assert tuple(text.ids[: text.num_given]) == make_prompt("What is 1 + 2?").token_ids
    assert text.ids[text.num_given :].tolist() == [*ids_of(backbone, "<answer>3</answer>"), END]
    assert kept.ids[kept.num_given :].tolist() == [7, 7]


def test_without_a_special_token_in_the_chat_template_the_end_token_ends_a_turn(tiny_path):
    tokenizer = RunTokenizer(AutoTokenizer.from_pretrained(tiny_path))
    for template in ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None):
        tokenizer.own.chat_template = template
        assert turn_ends(tokenizer, "chat").closing == (END,)
    tokenizer.own.eos_token = None
    assert turn_ends(tokenizer, "chat").ids == ()
    with pytest.raises(UserError, match=r"^model\.path: its tokenizer has no end token"):
        scan_demonstrations([demonstrated("1 + 1?", "2")], tokenizer, PROMPTS, 64, Split.train)


def test_tokens_of_another_tokenizer_are_refused(scan):
    with pytest.raises(UserError, match=r"^demonstrations: was sampled with another .*\(0123\).*token_ids=text"):
        scan([demonstrated("1?", "x", [7], tokenizer="0123")])
    with pytest.raises(UserError, match=r"^preferences: was sampled with another tokenizer \(0123\)"):
        scan([ranked("1?", "x", "y", tokenizer="0123")])


def test_what_exceeds_a_limit_is_dropped_with_a_word_or_refused(scan):
    # A letter is a token. "abc" and its end are 4 tokens: at the limit; "abcd" is over it, and so is the prompt of 80.
    given = [demonstrated("1?", "abc"), demonstrated("2?", "abcd"), demonstrated("x" * 80, "abc")]
    found = scan(given, limit=4)
    assert len(found.texts) == 1
    said = "2 of 3 train demonstrations exceed prompts.max_tokens=64 or max_completion_tokens=4"
    assert found.notes == (f"{said}: dropped",)
    assert scan(given[:1], limit=4).notes == ()
    with pytest.raises(UserError) as refusal:
        scan(given, limit=4, over_limit="refuse")
    assert str(refusal.value) == f"max_completion_tokens: {said}; raise them, or set prompts.over_limit=drop"
    with pytest.raises(UserError, match=r"^max_completion_tokens: 1 of 1 train demonstrations .*raise them, or"):
        scan(given[1:2], limit=4)


def test_demonstrations_of_one_prompt_are_one_group(scan):
    given = [("1?", "a"), ("2?", "b"), ("1?", "c"), ("3?", "d"), ("1?", "a")]
    found = scan([demonstrated(question, completion) for question, completion in given])
    batch = found.batch(range(5))
    prompts = [tuple(ids[~learned & there].tolist()) for ids, learned, there in rows_of(batch)]
    assert sorted(prompts) == sorted(tuple(t.ids[: t.num_given].tolist()) for t in found.texts)
    # The same group if and only if the same prompt, and siblings side by side, as a batch of samples has them.
    groups = batch.group_ids.tolist()
    assert [prompts[a] == prompts[b] for a in range(5) for b in range(5)] == [a == b for a in groups for b in groups]
    assert groups == sorted(groups)
    assert set(groups) == {0, 1, 2}


def rows_of(batch):
    return zip(batch.token_ids, batch.loss_mask, batch.attention_mask, strict=True)


def completions(batch):
    """The learned tokens of each row."""
    return [tuple(ids[learned].tolist()) for ids, learned, _ in rows_of(batch)]


def test_an_updates_examples_depend_on_nothing_but_seed_and_step(backbone, scan):
    found = scan([demonstrated(f"{i}?", f"{i}") for i in range(20)])
    forwards = [completions(found.at(3, step, 4)) for step in range(10)]
    assert [completions(found.at(3, step, 4)) for step in reversed(range(10))][::-1] == forwards
    for start in (0, 5):  # a pass over 20 takes 5 updates of 4, and none comes twice in it
        assert len({row for update in forwards[start : start + 5] for row in update}) == 20
    assert forwards[:5] != forwards[5:]
    assert [completions(found.at(4, step, 4)) for step in range(10)] != forwards
    # A value of the stream itself: a change here breaks the resumption of runs begun before it.
    assert sorted(backbone.decode(row[:-1]) for row in forwards[0]) == ["0", "1", "17", "19"]


def test_the_fingerprint_covers_tokens_order_and_where_the_prompt_ends(scan):
    a, b = demonstrated("1?", "ab"), demonstrated("2?", "b")
    known = [scan(given) for given in ([a, b], [b, a], [a], [a, demonstrated("2?", "c")])]
    # The last has the same tokens as the one before, parted elsewhere.
    known += [scan(given, style="raw") for given in ([a, b], [demonstrated("1?a", "b"), b])]
    assert len({found.fingerprint for found in known}) == len(known)
    assert scan([a, b], limit=50).fingerprint == known[0].fingerprint  # a limit that nothing exceeds


# -- rankings ----------------------------------------------------------------------------------------------------------
def test_a_ranking_keeps_its_order_scores_and_sampled_tokens_and_each_other_completion_has_an_end(
    backbone, scan, make_prompt
):
    mine = ranked("2?", "x", "y", tokenizer=tokenizer_fingerprint(backbone.tokenizer))
    given = [ranked("1?", "abc", "d", "ef"), replace(mine, completion_ids=((9, 9), (8,)))]
    ranking, sampled = scan(given).rankings
    assert sampled.completions == ((9, 9), (8,))
    assert ranking.prompt == make_prompt("1?").token_ids
    assert ranking.completions == tuple((*ids_of(backbone, text), END) for text in ("abc", "d", "ef"))
    assert ranking.scores == (2.0, 1.0, 0.0)


def test_a_completion_over_the_limit_leaves_its_ranking_and_a_ranking_without_a_pair_is_dropped(scan):
    # Limit 3: "ab" and its end fit, "abc" does not. Of the second ranking one completion is left, which is no pair.
    found = scan([ranked("1?", "abc", "ab", "b"), ranked("2?", "abc", "ab")], limit=3)
    [ranking] = found.rankings
    assert ranking.scores == (1.0, 0.0)
    assert [len(ids) for ids in ranking.completions] == [3, 2]
    assert found.notes[0].startswith("1 of 2 train rankings exceed ")
    cut = "kept train rankings have 1 completion beyond max_completion_tokens=3"
    assert found.notes[1] == f"{cut}: dropped"
    with pytest.raises(UserError) as refusal:
        scan([ranked("1?", "abc", "ab", "b")], limit=3, over_limit="refuse")
    assert str(refusal.value) == f"max_completion_tokens: {cut}; raise it, or set prompts.over_limit=drop"
    with pytest.raises(UserError, match=r"^max_completion_tokens: 1 of 1 train rankings exceed "):
        scan([ranked("2?", "abc", "ab")], limit=3)
    tied = Ranking(prompt=asked("1?"), completions=("abc", "ab", "b"), scores=(2.0, 1.0, 1.0))  # once "abc" has left
    assert len(scan([tied, ranked("2?", "a", "b")], limit=3).rankings) == 1


def test_rankings_of_an_update_depend_on_seed_step_and_what_they_are_for(scan):
    found = scan([ranked(f"{i}?", "a", "b") for i in range(12)])

    def prompts(seed, purpose):
        return [found.rankings[i].prompt for step in range(6) for i in found.positions(seed, step, 2, purpose)]

    assert prompts(1, "rankings") == prompts(1, "rankings")
    assert len(set(prompts(1, "rankings"))) == 12
    assert prompts(1, "rankings") != prompts(2, "rankings")
    assert prompts(1, "rankings") != prompts(1, "replay")


def test_the_fingerprint_of_rankings_covers_their_scores(scan):
    mine = ranked("1?", "a", "b")
    others = [replace(mine, scores=(2.0, 0.0)), replace(mine, completions=("b", "a")), ranked("2?", "a", "b")]
    assert len({scan([one]).fingerprint for one in (mine, *others)}) == 4


# -- prompts that have begun to say something --------------------------------------------------------------------------
def test_a_think_that_the_prompt_has_opened_is_not_taught_a_second_time():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = with_attributes(family_tokenizer("qwen3"), chat_template=template)
    forms = ["<think>\n2 + 3</think>5", "<think>2 + 3</think>5", "2 + 3</think>5"]
    demonstrations = [demonstrated(f"q{k}", text) for k, text in enumerate(forms)]
    found = scan_demonstrations(demonstrations, tokenizer, PROMPTS, 64, Split.train)
    for text in found.texts:
        learned = tokenizer.decode(text.ids[text.num_given :])
        assert learned.startswith("2 + 3</think>5<|im_end|>")
        assert tokenizer.decode(text.ids).count("<think>") == 1
    # The template writes the opened block in a prompt alone, and the first form as it is.
    assert found.notes[0].startswith("2 of 3 train demonstrations are not learned as the chat template writes them")
    rankings = scan_rankings([ranked("q", *forms[:2], "5")], tokenizer, PROMPTS, 64, Split.train).rankings
    first, second, bare = rankings[0].completions
    assert first == second
    assert tokenizer.decode(bare).startswith("5")
    [turn], note = turns_of([(asked("q"), forms[2])], tokenizer, "raw", "demonstrations")
    assert (tokenizer.decode(list(turn)), note) == (f"{forms[2]}{tokenizer.eos_token}", None)
    inside = scan_demonstrations([demonstrated("q", "5")], tokenizer, PROMPTS, 64, Split.train)
    assert any("1 train demonstration is learned inside <think>" in note for note in inside.notes)


# -- turns as their template writes them, or there is a note -----------------------------------------------------------
LONG_PROMPTS = replace(PROMPTS, max_tokens=900, over_limit="refuse")
ASKED = Prompt(id="p", messages=({"role": "user", "content": "2 + 3?"},), answer="5")
NEXT = {"role": "user", "content": "And 4?"}


def test_what_is_learned_is_what_the_template_writes():
    for name, shape in SHAPES.items():
        tokenizer = shaped_tokenizer(name)
        given = Demonstration(prompt=ASKED, completion="5", completion_ids=())
        found = scan_demonstrations([given], tokenizer, LONG_PROMPTS, 900, Split.train)
        learned = "".join([shape.turn, shape.lead, *shape.closing])
        [prompt] = rendered(tokenizer, [ASKED.messages], start=True)
        ids = found.texts[0].ids.tolist()
        assert tokenizer.decode(ids) == prompt + learned, name
        assert ids == tokenizer(prompt + learned)["input_ids"], name
        ranked = Ranking(prompt=ASKED, completions=("5", "6"), scores=(1.0, 0.0))
        [ranking] = scan_rankings([ranked], tokenizer, LONG_PROMPTS, 900, Split.train).rankings
        assert [*ranking.prompt, *ranking.completions[0]] == ids, name
        if shape.note:
            assert any(shape.note in note for note in found.notes), name
            continue
        assert found.notes == (), name
        # Where there is no note about it, the template's own conversation begins with these tokens, when it goes on
        # or when it ends; an end that the template has not is in the notes of `turn_ends`.
        answered = [*ASKED.messages, {"role": "assistant", "content": "5"}]
        wholes = rendered(tokenizer, [answered, [*answered, NEXT]])
        has_end = "no special token" not in (notes := "".join(turn_ends(tokenizer, "chat").notes))
        own = ids if has_end and "inside" not in notes else ids[:-1]
        assert any(tokenizer(whole)["input_ids"][: len(own)] == own for whole in wholes), name


def test_turns_that_a_template_refuses_or_drops_a_part_of_are_learned_as_texts():
    tokenizer = shaped_tokenizer("a base with another end")
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    tokenizer = with_attributes(tokenizer, chat_template=refusing + str(tokenizer.chat_template))
    [turn], note = turns_of([(ASKED, "no")], tokenizer, "chat", "demonstrations")
    assert tokenizer.decode(list(turn)) == "no<|im_end|>"
    assert "it refuses them (not this)" in note
    tokenizer = shaped_tokenizer("a prompt that opens thinking")
    for said in ("<think>\n2 + 3</think>5", "2 + 3</think>5"):
        [turn], note = turns_of([(ASKED, said)], tokenizer, "chat", "demonstrations")
        assert tokenizer.decode(list(turn)) == "2 + 3</think>5<|end_of_sentence|>"
        drops = "1 of 1 demonstrations are not learned as the chat template writes them: it drops a part of their text"
        assert note.startswith(drops)
    [turn], note = turns_of([(ASKED, "2 + 3</think>5")], tokenizer, "raw", "demonstrations")
    assert (tokenizer.decode(list(turn)), note) == ("2 + 3</think>5<|endoftext|>", None)


def test_a_models_ends_are_those_of_its_files(tmp_path, tiny_path):
    """generation_config.json names further ends; without it config.json does."""
    tokenizer = shaped_tokenizer("a base with another end")
    own = turn_ends(tokenizer, "chat").ids
    config = (tiny_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"eos_token_id": 2', '"eos_token_id": 5'))
    model = ModelConfig(
        path=str(tmp_path), revision=None, dtype="auto", device="cpu", quantization=None, trust_remote_code=False,
        attn_implementation="auto", gradient_checkpointing="auto", kernels=KernelChoice.auto,
    )  # fmt: skip
    assert ends_of(model, "chat", tokenizer).ids == (*own, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 6]}')
    assert ends_of(model, "chat", tokenizer).ids == (*own, 7, 6)
    assert ends_of(model, "raw", tokenizer).ids == (own[1], 7, 6)


# -- pretraining texts -------------------------------------------------------------------------------------------------
def test_texts_come_in_file_order_and_as_they_stand_with_what_is_given_before_them(write, tmp_path):
    rows = [("", " a\n"), (" q\n", "é <|im_end|>"), (" ", "a"), ("", "a")]
    file = str(write(tmp_path / "a.jsonl", *({"before": before, "body": body} for before, body in rows)))
    assert load_texts(file, "body", None) == [Text(context="", text=text) for _, text in rows]
    assert load_texts(file, "body", "before") == [Text(context=before, text=text) for before, text in rows]


def test_the_script_gives_the_text_that_ships_about_problems_of_the_training_split(backbone, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    maker = importlib.import_module("make_arithmetic_examples")
    texts = load_texts("embedded:arithmetic-text", "text", "given")
    assert maker.make_texts(backbone.tokenizer.own, 1350, seed=0) == texts
    assert maker.make_texts(backbone.tokenizer.own, 20, seed=1) != texts[:20]
    [file] = files_at("embedded:arithmetic-text", "pretrain.path")
    assert file.stat().st_size <= 200_000
    pattern = r"<\|im_start\|>user\nWhat is (\d+) (.) (\d+)\?<\|im_end\|>\n<\|im_start\|>assistant\n"
    problems = [re.fullmatch(pattern, text.context).groups() for text in texts]
    assert len(set(problems)) == len(texts) == 1350, "each once"
    assert {split_of(int(a), operation, int(b)) for a, operation, b in problems} == {Split.train}


LIMITS = {"max_tokens": 256, "sequences_per_update": 1, "held_out": 1, "updates_per_step": 1}


def letters(texts, **keys):
    """A tokenizer whose tokens are characters, with their code points: a is 97."""
    return {"input_ids": [[ord(sign) for sign in text] for text in texts]}


def parted(texts):
    """Texts written as given^learned, or as learned alone."""
    return [Text(context=given, text=text) for given, _, text in (written.rpartition("^") for written in texts)]


def pretraining(texts, **keys):
    return scan_texts(parted(texts), letters, **LIMITS | keys)


def words(texts):
    return ["".join(map(chr, text.ids)) for text in texts]


def written(texts):
    """Each as given^learned."""
    parts = zip(words(texts), [text.num_given for text in texts], strict=True)
    return [f"{word[:number]}^{word[number:]}" for word, number in parts]


def texts_in(batch):
    """The texts of a batch."""
    kept = (ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.attention_mask, strict=True))
    return ["".join(map(chr, ids)) for ids in kept]


def digest(text):
    """sha256 of the tokens, int32 with the lowest byte first."""
    return hashlib.sha256(b"".join(ord(sign).to_bytes(4, "little") for sign in text)).digest()


# -- texts as tokens ---------------------------------------------------------------------------------------------------
def test_texts_are_cut_at_the_limit_and_dropped_below_two_tokens_with_a_word():
    # Of 5 texts "a" has 1 token; "bcdef" has 5 and "ghij" 4, which are more than 3; "klm" is exactly at the limit.
    found = pretraining(["a", "bcdef", "ghij", "klm", "no"], max_tokens=3)
    assert sorted(words([*found.train_texts, *found.held_out_texts])) == ["bcd", "ghi", "klm", "no"]
    assert found.note == (
        "of 5 pretraining texts 2 were cut after pretrain.max_tokens=3, "
        "1 with no token to learn within pretrain.max_tokens=3 were dropped"
    )
    assert pretraining(["klm", "no"], max_tokens=3).note is None
    said = "of 3 pretraining texts 1 with no token to learn within pretrain.max_tokens=256 were dropped"
    assert pretraining(["klm", "no", "p"]).note == said


def test_what_is_given_counts_towards_the_limit_and_is_never_learned():
    # 4 tokens in all: "ab^cdef" loses "ef"; "ghij^k" and "lmnop^q" have nothing left to learn; "rst^u" just fits; of
    # "^vw" and "xy" the first token is given.
    texts = ["ab^cdef", "ghij^k", "lmnop^q", "rst^u", "^vw", "xy", "z^0"]
    found = pretraining(texts, max_tokens=4)
    assert sorted(written([*found.train_texts, *found.held_out_texts])) == ["ab^cd", "rst^u", "v^w", "x^y", "z^0"]
    assert found.note == (
        "of 7 pretraining texts 1 were cut after pretrain.max_tokens=4, "
        "2 with no token to learn within pretrain.max_tokens=4 were dropped"
    )


def test_what_is_given_and_what_is_learned_are_tokenised_each_for_itself():
    def pairs(texts, **keys):
        """A tokenizer whose tokens are characters, except that "ab" is one, "X"."""
        return letters([text.replace("ab", "X") for text in texts])

    found = scan_texts(parted(["ca^bd", "cab^d"]), pairs, **LIMITS)
    assert sorted(written([*found.train_texts, *found.held_out_texts])) == ["cX^d", "ca^bd"]


def test_special_tokens_in_a_text_are_read_as_such_and_none_are_added(backbone, caplog):
    long = "<|im_start|>" + "A" * 600  # more than the model's 512
    with caplog.at_level(logging.WARNING):
        found = scan_texts(parted([long, "A<|im_end|>"]), backbone.tokenizer, **LIMITS | {"max_tokens": 3})
    # <|im_start|> and <|im_end|> are 1 and 2, then come the bytes in the order of their signs: "!" is 3, "A" is 35.
    assert sorted(text.ids.tolist() for text in (*found.train_texts, *found.held_out_texts)) == [[1, 35, 35], [35, 2]]
    assert caplog.text == ""


def test_held_out_texts_are_those_of_the_lowest_hashes_in_the_order_of_the_file():
    texts = [f"text {i}" for i in range(40)]
    found = pretraining(texts, held_out=6)
    lowest = set(sorted(texts, key=digest)[:6])
    assert words(found.held_out_texts) == [text for text in texts if text in lowest]
    assert words(found.train_texts) == [text for text in texts if text not in lowest]
    # So another order moves none, and holding out more only adds to them.
    assert set(words(pretraining(texts[::-1], held_out=6).held_out_texts)) == lowest
    assert set(words(pretraining(texts, held_out=9).held_out_texts)) > lowest


def test_a_text_that_is_held_out_is_trained_on_nowhere():
    # Each text three times, once with an end that is cut off: after the cut all three are the same.
    texts = [f"{i:03d}{end}" for end in ("", "", " more") for i in range(40)]
    found = pretraining(texts, max_tokens=3, held_out=10)
    held_out, train = words(found.held_out_texts), words(found.train_texts)
    assert len(held_out) == len(set(held_out)) == 10  # measured once each
    assert len(train) == 3 * 30  # what the file repeats, training repeats
    assert not set(held_out) & set(train)
    # Nor where another part of the same tokens is given.
    found = pretraining([*(f"a^{text}" for text in texts[:20]), *(f"a0^{text[1:]}" for text in texts[:20])], held_out=5)
    held_out, train = words(found.held_out_texts), words(found.train_texts)
    assert len(held_out) == len(set(held_out)) == 5
    assert len(train) == 2 * 15
    assert not set(held_out) & set(train)


def test_the_fingerprint_covers_the_tokens_of_all_texts_which_are_given_and_their_order():
    # Each text: how many tokens are given, in 4 bytes with the lowest first, and the digest of all its tokens.
    one = b"\x01\0\0\0"
    by_hand = hashlib.sha256(one + digest("ab") + one + digest("cde") + one + digest("f g")).hexdigest()
    assert pretraining(["ab", "cde", "f g"]).fingerprint == by_hand
    assert pretraining(["ab", "cde", "f g", "x"]).fingerprint == by_hand  # one token: dropped
    assert pretraining(["ab", "cde", "f g"], held_out=2).fingerprint == by_hand  # a key of its own
    others = [["ab", "cde"], ["cde", "ab", "f g"], ["abc", "de", "f g"], ["ab", "cde", "f h"]]
    assert len({by_hand, *(pretraining(other).fingerprint for other in others)}) == 5
    assert pretraining(["a^b", "c^de", "f g"]).fingerprint == by_hand  # the first token is given in any case
    two = hashlib.sha256(one + digest("ab") + b"\x02\0\0\0" + digest("cde") + one + digest("f g")).hexdigest()
    assert pretraining(["ab", "cd^e", "f g"]).fingerprint == two


REFUSALS = {
    "no second token": (
        {"max_tokens": 1},
        "pretrain.max_tokens: a text's first token is given, so it needs a second one to learn from, got 1; "
        "use 2 or more",
    ),
    # "ab" twice, "cd", "ef", and "x", which is too short. "ab" has the lowest hash: both are held out by held_out=1.
    "nothing left to train on": (
        {"held_out": 3},
        "pretrain.held_out: there are only 3 different texts with a token to learn within pretrain.max_tokens=256, and "
        "some must be left to train on, got 3; use fewer, more text, or a higher pretrain.max_tokens",
    ),
    "an update that cannot be filled": (
        {"sequences_per_update": 3},
        "pretrain.sequences_per_update: pretrain.held_out=1 leaves only 2 texts to train on, got 3; "
        "use at most 2, a lower pretrain.held_out, or more text",
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSALS.values(), ids=REFUSALS)
def test_too_little_text_is_refused(keys, message):
    texts = ["ab", "cd", "ef", "ab", "x"]
    with pytest.raises(UserError) as refusal:
        pretraining(texts, **keys)
    assert str(refusal.value) == message
    note = str(pretraining(texts, max_tokens=2, held_out=2).note)
    assert note.startswith("of 5 pretraining texts 1 with no token to learn")
    assert words(pretraining(texts, sequences_per_update=2).train_texts) == ["cd", "ef"]


# -- batches -----------------------------------------------------------------------------------------------------------
def tokens(ids, num_given):
    return TextTokens(ids=np.array(ids, dtype=np.int32), num_given=num_given)


def test_a_text_is_a_row_whose_given_tokens_are_the_prompt_and_the_rest_predicted():
    # Token 0 is a token like others, also at the end of a text: lengths say what is padding.
    batch = examples.as_batch([tokens([7, 5, 0], 1), tokens([3, 4], 1), tokens([0, 6, 8, 9], 3)])
    assert batch.token_ids.tolist() == [[7, 5, 0, 0], [3, 4, 0, 0], [0, 6, 8, 9]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert batch.group_ids.tolist() == [0, 1, 2]
    assert batch.rewards.tolist() == [0.0] * 3
    assert batch.sampled_logprobs.tolist() == [[0.0] * 4] * 3
    assert (batch.token_ids.dtype, batch.group_ids.dtype) == (torch.int64, torch.int64)
    assert (batch.attention_mask.dtype, batch.loss_mask.dtype) == (torch.bool, torch.bool)


@pytest.fixture
def ten():
    """9 texts to train on, 2 an update, 3 updates a step."""
    return pretraining([f"text {i}" for i in range(10)], sequences_per_update=2, updates_per_step=3)


def test_updates_go_through_the_texts_pass_after_pass(ten):
    # A pass of 9 texts has 4 whole updates; so updates 0..3 (step 0, and the first of step 1) are one pass, and so on.
    updates = [texts_in(ten.batch(5, step, update)) for step in range(8) for update in range(3)]
    for start in range(0, 24, 4):
        taken = [text for update in updates[start : start + 4] for text in update]
        assert len(taken) == len(set(taken)) == 8
    assert {text for update in updates for text in update} == set(words(ten.train_texts))
    assert updates[0] != updates[4]


def test_an_updates_texts_depend_on_nothing_but_seed_step_and_update(ten):
    forwards = [texts_in(ten.batch(5, step, update)) for step in range(8) for update in range(3)]
    permutation.cache_clear()
    backwards = [texts_in(ten.batch(5, step, update)) for step in reversed(range(8)) for update in reversed(range(3))]
    assert backwards[::-1] == forwards
    assert [texts_in(ten.batch(6, step, update)) for step in range(8) for update in range(3)] != forwards
    train = words(ten.train_texts)
    assert forwards[:3] != [[train[i] for i in prompts_for_step(9, 2, 5, turn)] for turn in range(3)], "as prompts do"
    # A value of the stream itself: a change here breaks the resumption of runs begun before it.
    assert forwards[:2] == [["text 2", "text 4"], ["text 9", "text 7"]]


def test_an_update_that_a_step_does_not_have_is_refused(ten):
    for update in (-1, 3):
        with pytest.raises(ValueError, match="a step has 3 updates"):
            ten.batch(5, 0, update)


class Known:
    """A forward whose log-prob of token t in row b is -token / 10, the worse the higher; notes how it was called."""

    def __init__(self):
        self.temperatures = []
        self.sizes = []

    def __call__(self, batch, temperature, layout):
        assert layout == "its layout"
        assert not torch.is_grad_enabled()
        self.temperatures.append(temperature)
        self.sizes.append(len(batch.rewards))
        return Outputs(logprobs=(-batch.token_ids.float() / 10).where(batch.loss_mask, 0.0))

    def micro_batches(self, batch, chosen, token_budget):
        return micro_batches(batch, chosen, token_budget)

    parts = Forward.parts

    def placed(self, batches):
        return [SimpleNamespace(batch=self.on_device(batch), layout="its layout") for batch in batches]

    def on_device(self, batch):
        return batch


@pytest.mark.parametrize(("token_budget", "sizes"), [(100, [3]), (6, [2, 1]), (1, [1, 1, 1])])
def test_the_loss_is_the_mean_over_tokens_however_the_texts_are_split(make_batch, token_budget, sizes):
    batch = make_batch([(0, [9], [1, 2]), (1, [9], [10, 20]), (2, [9], [30])])
    roles = SimpleNamespace(forward=Known())
    # (0.1 + 0.2 + 1 + 2 + 3) / 5 = 1.26; a mean over texts would be (0.15 + 1.5 + 3) / 3 = 1.55. Exact in float32 to
    # 1e-7 relative.
    assert text_loss(roles, batch, token_budget) == pytest.approx(1.26, rel=1e-7)
    assert roles.forward.sizes == sizes
    assert set(roles.forward.temperatures) == {1.0}


def test_each_micro_batch_goes_to_the_device(make_batch):
    roles = SimpleNamespace(forward=Known())
    roles.forward.on_device = lambda batch: replace(batch, token_ids=batch.token_ids * 2)
    batch = make_batch([(0, [9], [1, 2]), (1, [9], [3])])
    assert text_loss(roles, batch, 3) == pytest.approx(0.4, rel=1e-7)  # 2 * (0.1 + 0.2 + 0.3) / 3


def test_the_loss_is_that_of_each_text_by_itself(backbone):
    """Each text alone in the model's own forward, without packing, padding or masks, is the reference."""
    answer = "<think>3+4=7</think><answer>7</answer><|im_end|>"
    texts = parted(["<|im_start|>user\n^What is 1 + 2?", "2+2=4", "a^b", f"3 + 4?^{answer}"])
    found = scan_texts(texts, backbone.tokenizer, **LIMITS | {"max_tokens": 20, "sequences_per_update": 3})
    roles = SimpleNamespace(forward=choose(backbone.model))
    assert roles.forward.packed
    total = tokens = 0.0
    for text in found.train_texts:
        ids_1T = torch.tensor(text.ids.tolist())[None]
        with torch.no_grad():
            logits_TV = backbone.model(input_ids=ids_1T).logits[0, text.num_given - 1 : -1].double()
        total += torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, text.num_given :], reduction="sum").item()
        tokens += len(text.ids) - text.num_given
    for token_budget in (1, 30, 1000):
        # float32 logits of some 10 nats: 1e-6 each. A mean over texts would be another.
        assert text_loss(roles, found.batch(0, 0, 0), token_budget) == pytest.approx(total / tokens, rel=2e-6)


def test_the_shipped_text_begins_at_the_loss_that_the_embedded_model_was_taught(backbone):
    """Only answers are learned: the questions, which the model was never taught, would cost it 10 nats per token."""
    texts = load_texts("embedded:arithmetic-text", "text", "given")
    found = scan_texts(texts, backbone.tokenizer, **LIMITS | {"held_out": 128})
    roles = SimpleNamespace(forward=choose(backbone.model))
    assert found.note is None
    assert text_loss(roles, found.held_out(), 4096) == pytest.approx(0.174, abs=0.0005)


# -- what a teacher reads that the student does not --------------------------------------------------------------------
def test_a_hint_stands_at_the_end_of_the_last_message_with_the_answer_in_it(make_prompt):
    hinted = examples.with_hint(make_prompt("What is 1 + 1?", "2"), "The answer is {answer}.")
    assert hinted.messages == ({"role": "user", "content": "What is 1 + 1?\n\nThe answer is 2."},)
    assert hinted.token_ids == ()


def test_each_completion_has_its_prompts_tokens_with_the_hint(make_prompt, backbone):
    one, two = make_prompt("1?", "1"), make_prompt("What is 20 + 20?", "40")
    groups = [group_of(one, [[5]] * 2), group_of(two, [[5]])]
    made = examples.teacher_prompts(groups, "It is {answer}.", backbone.tokenizer, "chat")
    expected = [make_prompt(f"{text}\n\nIt is {answer}.").token_ids for text, answer in (("1?", 1), (two.id, 40))]
    assert made.dtype == torch.int64
    assert [tuple(row[row >= 0].tolist()) for row in made] == [expected[0], expected[0], expected[1]]
    assert (made[0, len(expected[0]) :] == -1).all()
    assert examples.longest_with_hint([one, two], "It is {answer}.", backbone.tokenizer, "chat") == len(expected[1])


def test_an_answer_that_a_prompt_has_not_is_shown_to_no_teacher(make_prompt, backbone):
    prompts = [make_prompt("1?", "1"), make_prompt("2?", " "), make_prompt("3?", "")]
    with pytest.raises(UserError, match=r"2 train prompts have none, first 2\?, got 'It is {answer}\.'") as refused:
        examples.longest_with_hint(prompts, "It is {answer}.", backbone.tokenizer, "chat")
    assert refused.value.key == "snapshot.teacher_hint"
    assert examples.longest_with_hint(prompts, "Think.", backbone.tokenizer, "chat") > 0
