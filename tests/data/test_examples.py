"""Demonstrations and rankings as tokens: where a completion ends, what is kept, left out and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer
from turn_shapes import SHAPES, shaped_tokenizer

from rlft.config.model import KernelChoice, ModelConfig
from rlft.config.schema import PromptsConfig
from rlft.data.examples import Examples, Rankings, scan_demonstrations, scan_rankings, turns_of
from rlft.data.prompts import tokenizer_fingerprint
from rlft.model.backbone import Backbone, ends_of
from rlft.tokens.text import RunTokenizer, rendered, turn_ends
from rlft.types import Demonstration, Prompt, Ranking, Split, UserError
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

PROMPTS = PromptsConfig(max_tokens=64, over_limit="drop", style="chat")
END = 2
"""<|im_end|> in the embedded vocabulary."""


def asked(question: str, **metadata: str) -> Prompt:
    return Prompt(id=question, messages=({"role": "user", "content": question},), answer="", metadata=metadata)


def demonstrated(question: str, completion: str, ids: Sequence[int] = (), **metadata: str) -> Demonstration:
    return Demonstration(prompt=asked(question, **metadata), completion=completion, completion_ids=tuple(ids))


def ranked(question: str, *completions: str, **metadata: str) -> Ranking:
    """Best first, n - 1 down to 0."""
    scores = tuple(float(len(completions) - 1 - i) for i in range(len(completions)))
    return Ranking(prompt=asked(question, **metadata), completions=completions, scores=scores)


@pytest.fixture
def scan(backbone: Backbone) -> Callable[..., Examples]:
    def scanned(demonstrations: Sequence[Demonstration], limit: int = 64, **keys: Any) -> Examples:
        prompts = replace(PROMPTS, **keys)
        return scan_demonstrations(demonstrations, backbone.tokenizer, prompts, limit, Split.train)

    return scanned


@pytest.fixture
def scan_ranked(backbone: Backbone) -> Callable[..., Rankings]:
    def scanned(rankings: Sequence[Ranking], limit: int = 64, **keys: Any) -> Rankings:
        return scan_rankings(rankings, backbone.tokenizer, replace(PROMPTS, **keys), limit, Split.train)

    return scanned


def ids_of(backbone: Backbone, text: str) -> list[int]:
    return backbone.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


# -- where a completion ends -------------------------------------------------------------------------------------------
@pytest.fixture
def own_tokenizer(tiny_path: Path) -> RunTokenizer:
    """The embedded tokenizer, to be changed."""
    return RunTokenizer(AutoTokenizer.from_pretrained(tiny_path))


LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
    "<|eot_id|>{% endfor %}"
)


def test_a_turn_ends_with_what_the_chat_template_puts_behind_it(own_tokenizer: RunTokenizer) -> None:
    """As in Llama 3's first release: the end token ends a text, and the end of a turn has no name in the tokenizer."""
    for name in ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        own_tokenizer.add_tokens(AddedToken(name, special=True))  # type: ignore[arg-type]  # transformers has its own stub
    own_tokenizer.own.eos_token = "<|endoftext|>"
    own_tokenizer.own.chat_template = LLAMA
    eot, text_end = (own_tokenizer.convert_tokens_to_ids(name) for name in ("<|eot_id|>", "<|endoftext|>"))
    assert eot not in own_tokenizer.all_special_ids
    assert turn_ends(own_tokenizer, "chat").closing == (eot,)
    assert turn_ends(own_tokenizer, "raw").closing == (text_end,)


def test_the_embedded_models_turns_end_with_im_end_and_the_line_break_behind_it_is_not_learned(
    backbone: Backbone, scan: Callable[..., Examples]
) -> None:
    assert turn_ends(backbone.tokenizer, "chat").closing == (END,)
    [text] = scan([demonstrated("1 + 1?", "2")]).texts
    assert text.ids[text.num_given :].tolist() == [*ids_of(backbone, "2"), END]


def test_without_a_chat_template_or_a_special_token_in_it_the_end_token_ends_a_turn(
    own_tokenizer: RunTokenizer,
) -> None:
    own_tokenizer.own.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert turn_ends(own_tokenizer, "chat").closing == (END,)
    own_tokenizer.own.chat_template = None
    assert turn_ends(own_tokenizer, "chat").closing == (END,)


# -- demonstrations ----------------------------------------------------------------------------------------------------
def test_a_demonstration_is_the_prompt_as_it_is_sampled_from_and_the_completion_with_an_end(
    backbone: Backbone, scan: Callable[..., Examples], make_prompt: Callable[..., Prompt]
) -> None:
    [text] = scan([demonstrated("What is 1 + 2?", "<answer>3</answer>")]).texts
    prompt = make_prompt("What is 1 + 2?").token_ids
    assert tuple(text.ids[: text.num_given]) == prompt
    assert text.ids[text.num_given :].tolist() == [*ids_of(backbone, "<answer>3</answer>"), END]


def test_sampled_tokens_are_kept_exactly_even_where_the_text_would_be_others(
    backbone: Backbone, scan: Callable[..., Examples]
) -> None:
    """7, 7 are two tokens, whatever the text says; no end is added, as none was sampled."""
    mine = tokenizer_fingerprint(backbone.tokenizer)
    found = scan([demonstrated("1?", "other words", [7, 7], tokenizer=mine), demonstrated("2?", "x")])
    assert found.texts[0].ids[found.texts[0].num_given :].tolist() == [7, 7]
    assert found.texts[1].ids[found.texts[1].num_given :].tolist() == [*ids_of(backbone, "x"), END]


def test_tokens_of_another_tokenizer_are_refused(
    scan: Callable[..., Examples], scan_ranked: Callable[..., Rankings]
) -> None:
    with pytest.raises(UserError, match=r"^demonstrations: was sampled with another .*\(0123\).*token_ids=text"):
        scan([demonstrated("1?", "x", [7], tokenizer="0123")])
    with pytest.raises(UserError, match=r"^preferences: was sampled with another tokenizer \(0123\)"):
        scan_ranked([ranked("1?", "x", "y", tokenizer="0123")])


def test_what_exceeds_a_limit_is_dropped_with_a_word_or_refused(scan: Callable[..., Examples]) -> None:
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


def test_demonstrations_of_one_prompt_are_one_group(scan: Callable[..., Examples]) -> None:
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


def rows_of(batch: Any) -> Any:
    return zip(batch.token_ids, batch.loss_mask, batch.attention_mask, strict=True)


def completions(batch: Any) -> list[tuple[int, ...]]:
    """The learned tokens of each row."""
    return [tuple(ids[learned].tolist()) for ids, learned, _ in rows_of(batch)]


def test_an_updates_examples_depend_on_nothing_but_seed_and_step(
    backbone: Backbone, scan: Callable[..., Examples]
) -> None:
    found = scan([demonstrated(f"{i}?", f"{i}") for i in range(20)])
    forwards = [completions(found.at(3, step, 4)) for step in range(10)]
    assert [completions(found.at(3, step, 4)) for step in reversed(range(10))][::-1] == forwards
    for start in (0, 5):  # a pass over 20 takes 5 updates of 4, and none comes twice in it
        assert len({row for update in forwards[start : start + 5] for row in update}) == 20
    assert forwards[:5] != forwards[5:]
    assert [completions(found.at(4, step, 4)) for step in range(10)] != forwards
    # A value of the stream itself: a change here breaks the resumption of runs begun before it.
    assert sorted(backbone.decode(row[:-1]) for row in forwards[0]) == ["0", "1", "17", "19"]


def test_the_fingerprint_covers_tokens_order_and_where_the_prompt_ends(scan: Callable[..., Examples]) -> None:
    a, b = demonstrated("1?", "ab"), demonstrated("2?", "b")
    known = [
        scan([a, b]),
        scan([b, a]),
        scan([a]),
        scan([a, demonstrated("2?", "c")]),
        scan([a, b], style="raw"),
        scan([demonstrated("1?a", "b"), b], style="raw"),  # the same tokens as the one before, parted elsewhere
    ]
    assert len({found.fingerprint for found in known}) == len(known)
    assert scan([a, b], limit=50).fingerprint == known[0].fingerprint  # a limit that nothing exceeds


# -- rankings ----------------------------------------------------------------------------------------------------------
def test_a_ranking_keeps_its_order_and_scores_and_each_completion_has_an_end(
    backbone: Backbone, scan_ranked: Callable[..., Rankings], make_prompt: Callable[..., Prompt]
) -> None:
    [ranking] = scan_ranked([ranked("1?", "abc", "d", "ef")]).rankings
    assert ranking.prompt == make_prompt("1?").token_ids
    assert ranking.completions == tuple((*ids_of(backbone, text), END) for text in ("abc", "d", "ef"))
    assert ranking.scores == (2.0, 1.0, 0.0)


def test_sampled_rankings_keep_their_tokens(backbone: Backbone, scan_ranked: Callable[..., Rankings]) -> None:
    mine = ranked("1?", "x", "y", tokenizer=tokenizer_fingerprint(backbone.tokenizer))
    [ranking] = scan_ranked([replace(mine, completion_ids=((9, 9), (8,)))]).rankings
    assert ranking.completions == ((9, 9), (8,))


def test_a_completion_over_the_limit_leaves_its_ranking_and_a_ranking_without_a_pair_is_dropped(
    scan_ranked: Callable[..., Rankings],
) -> None:
    # Limit 3: "ab" and its end fit, "abc" does not. Of the second ranking one completion is left, which is no pair.
    found = scan_ranked([ranked("1?", "abc", "ab", "b"), ranked("2?", "abc", "ab")], limit=3)
    [ranking] = found.rankings
    assert ranking.scores == (1.0, 0.0)
    assert [len(ids) for ids in ranking.completions] == [3, 2]
    assert found.notes[0].startswith("1 of 2 train rankings exceed ")
    cut = "kept train rankings have 1 completion beyond max_completion_tokens=3"
    assert found.notes[1] == f"{cut}: dropped"
    with pytest.raises(UserError) as refusal:
        scan_ranked([ranked("1?", "abc", "ab", "b")], limit=3, over_limit="refuse")
    assert str(refusal.value) == f"max_completion_tokens: {cut}; raise it, or set prompts.over_limit=drop"
    with pytest.raises(UserError, match=r"^max_completion_tokens: 1 of 1 train rankings exceed "):
        scan_ranked([ranked("2?", "abc", "ab")], limit=3)


def test_what_is_left_of_a_ranking_may_be_tied_and_is_dropped(scan_ranked: Callable[..., Rankings]) -> None:
    tied = Ranking(prompt=asked("1?"), completions=("abc", "ab", "b"), scores=(2.0, 1.0, 1.0))
    assert len(scan_ranked([tied, ranked("2?", "a", "b")], limit=3).rankings) == 1


def test_rankings_of_an_update_depend_on_seed_step_and_what_they_are_for(scan_ranked: Callable[..., Rankings]) -> None:
    found = scan_ranked([ranked(f"{i}?", "a", "b") for i in range(12)])

    def prompts(seed: int, purpose: str) -> list[tuple[int, ...]]:
        return [found.rankings[i].prompt for step in range(6) for i in found.positions(seed, step, 2, purpose)]

    assert prompts(1, "rankings") == prompts(1, "rankings")
    assert len(set(prompts(1, "rankings"))) == 12
    assert prompts(1, "rankings") != prompts(2, "rankings")
    assert prompts(1, "rankings") != prompts(1, "replay")


def test_the_fingerprint_of_rankings_covers_their_scores(scan_ranked: Callable[..., Rankings]) -> None:
    mine = ranked("1?", "a", "b")
    others = [replace(mine, scores=(2.0, 0.0)), replace(mine, completions=("b", "a")), ranked("2?", "a", "b")]
    assert len({scan_ranked([one]).fingerprint for one in (mine, *others)}) == 4


# -- prompts that have begun to say something --------------------------------------------------------------------------
def test_a_think_that_the_prompt_has_opened_is_not_taught_a_second_time() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = with_attributes(family_tokenizer("qwen3"), chat_template=template)
    forms = ["<think>\n2 + 3</think>5", "<think>2 + 3</think>5", "2 + 3</think>5"]
    demonstrations = [demonstrated(f"q{k}", text) for k, text in enumerate(forms)]
    examples = scan_demonstrations(demonstrations, tokenizer, PROMPTS, 64, Split.train)
    for text in examples.texts:
        learned = tokenizer.decode(text.ids[text.num_given :])
        assert learned.startswith("2 + 3</think>5<|im_end|>")
        assert tokenizer.decode(text.ids).count("<think>") == 1
    # The template writes the opened block in a prompt alone, and the first form as it is.
    assert examples.notes[0].startswith("2 of 3 train demonstrations are not learned as the chat template writes them")
    rankings = scan_rankings([ranked("q", *forms[:2], "5")], tokenizer, PROMPTS, 64, Split.train).rankings
    first, second, bare = rankings[0].completions
    assert first == second
    assert tokenizer.decode(bare).startswith("5")
    inside = scan_demonstrations([demonstrated("q", "5")], tokenizer, PROMPTS, 64, Split.train)
    assert any("1 train demonstration is learned inside <think>" in note for note in inside.notes)


# -- turns as their template writes them, or there is a note -----------------------------------------------------------
LONG_PROMPTS = replace(PROMPTS, max_tokens=900, over_limit="refuse")
ASKED = Prompt(id="p", messages=({"role": "user", "content": "2 + 3?"},), answer="5")
NEXT = {"role": "user", "content": "And 4?"}


def test_what_is_learned_is_what_the_template_writes() -> None:
    for name, shape in SHAPES.items():
        tokenizer = shaped_tokenizer(name)
        found = scan_demonstrations(
            [Demonstration(prompt=ASKED, completion="5", completion_ids=())], tokenizer, LONG_PROMPTS, 900, Split.train
        )
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
        assert any(tokenizer(whole)["input_ids"][: len(own)] == own for whole in wholes), name  # type: ignore[index]


def test_a_thought_that_the_template_drops_is_learned_all_the_same_and_once() -> None:
    tokenizer = shaped_tokenizer("a prompt that opens thinking")
    end = turn_ends(tokenizer, "chat").closing
    for said in ("<think>\n2 + 3</think>5", "2 + 3</think>5"):
        [turn], note = turns_of([(ASKED, said)], tokenizer, "chat", "demonstrations")
        assert tokenizer.decode(list(turn[: -len(end)])) == "2 + 3</think>5"
        assert note is not None
        assert note.startswith(
            "1 of 1 demonstrations are not learned as the chat template writes them: it drops a part"
        )
    [turn], note = turns_of([(ASKED, "2 + 3</think>5")], tokenizer, "raw", "demonstrations")
    assert (tokenizer.decode(list(turn)), note) == ("2 + 3</think>5<|endoftext|>", None)


def test_turns_that_a_template_refuses_are_learned_as_texts() -> None:
    tokenizer = shaped_tokenizer("a base with another end")
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    tokenizer = with_attributes(tokenizer, chat_template=refusing + str(tokenizer.chat_template))
    [turn], note = turns_of([(ASKED, "no")], tokenizer, "chat", "demonstrations")
    assert tokenizer.decode(list(turn)) == "no<|im_end|>"
    assert note is not None
    assert "it refuses them (not this)" in note


def test_a_models_ends_are_those_of_its_files(tmp_path: Path, tiny_path: Path) -> None:
    """generation_config.json names further ends; without it config.json does."""
    tokenizer = shaped_tokenizer("a base with another end")
    own = turn_ends(tokenizer, "chat").ids
    (tmp_path / "config.json").write_text(
        (tiny_path / "config.json").read_text().replace('"eos_token_id": 2', '"eos_token_id": 5')
    )
    model = ModelConfig(
        path=str(tmp_path), revision=None, dtype="auto", device="cpu", quantization=None, trust_remote_code=False,
        attn_implementation="auto", gradient_checkpointing="auto", kernels=KernelChoice.auto,
    )  # fmt: skip
    assert ends_of(model, "chat", tokenizer).ids == (*own, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 6]}')
    assert ends_of(model, "chat", tokenizer).ids == (*own, 7, 6)
    assert ends_of(model, "raw", tokenizer).ids == (own[1], 7, 6)


def test_a_tokenizer_without_any_end_has_nothing_to_learn(own_tokenizer: RunTokenizer) -> None:
    own_tokenizer.own.chat_template = own_tokenizer.own.eos_token = None
    assert turn_ends(own_tokenizer, "chat").ids == ()
    with pytest.raises(UserError, match=r"^model\.path: its tokenizer has no end token"):
        scan_demonstrations([demonstrated("1 + 1?", "2")], own_tokenizer, PROMPTS, 64, Split.train)
