import copy
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from in_one_test import each
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import rlft
from rlft.data import prompts
from rlft.data.arithmetic import Arithmetic
from rlft.data.prompts import fingerprinted, permutation, prompts_for_step, scan, tokenizer_fingerprint
from rlft.tokens.text import RunTokenizer
from rlft.types import Prompt, Split, UserError
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

TINY = Path(rlft.__file__).parent / "assets" / "tiny-arithmetic"


@pytest.fixture(scope="module")
def tokenizer():
    return RunTokenizer(AutoTokenizer.from_pretrained(TINY))


def fingerprint(prompts):
    return hashlib.sha256(b"".join(map(fingerprinted, prompts))).hexdigest()


def prompt(name, text, answer="1"):
    return Prompt(id=name, messages=({"role": "user", "content": text},), answer=answer)


THREE = [prompt("a", "What is 1 + 2?"), prompt("b", "What is 11 + 22?"), prompt("c", "What is 1111 + 2222?")]


# -- scan --------------------------------------------------------------------------------------------------------------
def test_token_ids_are_the_chat_template_with_the_start_of_the_answer(tokenizer):
    found = scan(THREE, tokenizer, 100, "refuse", Split.train)
    for given, scanned in zip(THREE, found.prompts, strict=True):
        text = tokenizer.apply_chat_template([*given.messages], add_generation_prompt=True, tokenize=False)
        assert scanned.token_ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert replace(scanned, token_ids=()) == given
    # Characters are tokens here: the three questions differ by 2 and 4 characters.
    a, b, c = (len(p.token_ids) for p in found.prompts)
    assert (b - a, c - b) == (2, 4)
    assert [*found.num_tokens] == [a, b, c]
    assert found.notes == ()


def test_prompts_over_the_limit_are_dropped_and_counted_or_refused_by_number_and_name(tokenizer):
    a, b, c = (len(p.token_ids) for p in scan(THREE, tokenizer, 100, "drop", Split.train).prompts)
    found = scan(THREE, tokenizer, b, "drop", Split.train)  # exactly at the limit is within
    assert [p.id for p in found.prompts] == ["a", "b"]
    assert [*found.num_tokens] == [a, b]
    assert found.notes == (f"1 train prompt longer than prompts.max_tokens={b} was dropped",)
    assert [p.id for p in scan(THREE, tokenizer, b - 1, "drop", Split.train).prompts] == ["a"]
    with pytest.raises(UserError, match=r"^prompts\.max_tokens: 3 of 3 train prompts are longer, first a with"):
        scan(THREE, tokenizer, a - 1, "drop", Split.train)
    with pytest.raises(UserError) as refusal:
        scan(THREE, tokenizer, a, "refuse", Split.held_out)
    assert str(refusal.value) == (
        f"prompts.max_tokens: 2 of 3 held_out prompts are longer, first b with {b}, got {a}; "
        f"raise prompts.max_tokens (the longest has {c}), or set prompts.over_limit=drop"
    )


def test_a_prompt_without_a_token_an_empty_split_and_ids_that_occur_twice_are_refused(tokenizer):
    tokenless = [THREE[0], prompt("b", ""), THREE[2]]
    for given, problem in (
        (tokenless, "^data: 1 of 3 {} prompts have no token, .*, got b; leave them out, or"),
        ([], "the {} split is empty"),
        ([THREE[0], THREE[1], THREE[0]], "the {} split has 1 id more than once, got a"),
    ):
        for split in Split:
            with pytest.raises(UserError, match=problem.format(split)):
                scan(given, tokenizer, 100, "drop", split, "raw")


@each("added", ["$A", "<bos> $A", "<bos> $A <eos>", "<bos> <bos> $A <eos> <eos>"])
def test_a_raw_prompt_begins_as_the_tokenizer_has_it_and_does_not_end(added):
    gemma = copy.deepcopy(family_tokenizer("gemma"))
    special_tokens = [(token, gemma.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    gemma.backend_tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=special_tokens)
    [plain] = gemma(["hi"], add_special_tokens=False)["input_ids"]
    begin = [gemma.bos_token_id] * ("<bos>" in added)
    found = scan([prompt("a", "hi")], gemma, 100, "refuse", Split.train, style="raw").prompts[0]
    assert list(found.token_ids) == [*begin, *plain]
    spelled = scan([prompt("a", "<bos>hi")], gemma, 100, "refuse", Split.train, style="raw").prompts[0].token_ids
    assert spelled.count(gemma.bos_token_id) == len(begin), "the text of a special token is text"
    gemma.init_kwargs["add_bos_token"] = True  # what its tokenizer.json may leave out
    found = scan([prompt("a", "hi")], gemma, 100, "refuse", Split.train, style="raw").prompts[0]
    assert list(found.token_ids) == [gemma.bos_token_id, *plain]


def test_raw_prompts_are_the_plain_texts_also_where_there_is_a_chat_template(tokenizer):
    turns = [("system", "1"), ("user", "2"), ("assistant", "3"), ("user", "4")]
    talk = Prompt(id="a", messages=tuple({"role": r, "content": c} for r, c in turns), answer="1")
    found = scan([talk], tokenizer, 100, "drop", Split.train, style="raw")
    assert found.prompts[0].token_ids == tuple(tokenizer("1\n\n2\n\n3\n\n4")["input_ids"])
    assert found.notes == ()
    assert scan([talk], tokenizer, 100, "drop", Split.train, style="chat").fingerprint != found.fingerprint
    plain = RunTokenizer(AutoTokenizer.from_pretrained(TINY))
    plain.own.chat_template = None
    for style in ("raw", "chat"):  # without a chat template there is no other way
        assert scan([talk], plain, 100, "drop", Split.train, style=style) == found  # as asked for: nothing to note


def test_a_template_that_takes_no_system_message_is_told_with_the_way_out():
    strict = RunTokenizer(AutoTokenizer.from_pretrained(TINY))
    strict.own.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    assert len(scan(THREE, strict, 100, "drop", Split.train).prompts) == 3
    with_system = replace(THREE[0], messages=({"role": "system", "content": "x"}, *THREE[0].messages))
    with pytest.raises(UserError, match=r"^data\.system_prompt: .*no system role.*; set data\.system_prompt=null"):
        scan([with_system], strict, 100, "drop", Split.train)


def test_a_call_of_the_tokenizer_takes_so_many_prompts_and_no_more_characters():
    def sizes(lengths):
        chunks = list(prompts.chunked(["x" * length for length in lengths], len))
        assert [len(text) for chunk in chunks for text in chunk] == lengths
        return [len(chunk) for chunk in chunks]

    assert sizes([1] * (2 * prompts.CHUNK + 1)) == [prompts.CHUNK, prompts.CHUNK, 1]
    assert sizes([prompts.CHUNK_CHARACTERS // 2] * 3) == [2, 1]
    assert sizes([9, prompts.CHUNK_CHARACTERS * 3, 9]) == [1, 1, 1], "one that is larger stands alone"
    assert sizes([]) == []


# -- fingerprint -------------------------------------------------------------------------------------------------------
def test_the_fingerprint_covers_ids_tokens_answers_and_order(tokenizer):
    found = scan(THREE, tokenizer, 100, "drop", Split.train)
    assert found.fingerprint == scan(list(THREE), tokenizer, 100, "drop", Split.train).fingerprint
    assert len(found.fingerprint) == 64
    a, b, c = found.prompts
    changed = [replace(a, answer="2"), replace(a, id="z"), replace(a, token_ids=(*a.token_ids, 0))]
    others = [*([one, b, c] for one in changed), [b, a, c], [a, b]]
    assert len({found.fingerprint, *(fingerprint(other) for other in others)}) == 6


def test_the_fingerprint_keeps_fields_apart():
    one = [replace(prompt("a", ""), token_ids=(1,), answer="23")]
    two = [replace(prompt("a", ""), token_ids=(1, 2), answer="3")]
    assert fingerprint(one) != fingerprint(two)
    # By hand: one JSON array a prompt, one line each.
    assert fingerprint(one) == hashlib.sha256(b'["a", [1], "23"]\n').hexdigest()


def test_a_tokenizers_fingerprint_changes_with_what_its_ids_mean(tokenizer):
    def changed(**keys):
        other = RunTokenizer(AutoTokenizer.from_pretrained(TINY))
        for name, value in keys.items():
            setattr(other.own, name, value)
        return tokenizer_fingerprint(other)

    one = tokenizer_fingerprint(tokenizer)
    assert one == changed()
    assert re.fullmatch("[0-9a-f]{12}", one)
    with_token = RunTokenizer(AutoTokenizer.from_pretrained(TINY))
    with_token.add_tokens(["<new>"])
    another_end = changed(eos_token=tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id - 1))
    assert len({one, changed(chat_template="x"), another_end, tokenizer_fingerprint(with_token)}) == 4


# -- prompts_for_step --------------------------------------------------------------------------------------------------
@each(("num_prompts", "per_step"), [(10, 5), (10, 3), (7, 7), (11, 6), (1, 1), (256, 32)])
def test_no_prompt_comes_twice_in_an_epoch_or_a_step(num_prompts, per_step):
    steps = num_prompts // per_step
    for epoch in range(20):
        taken = [i for s in range(steps) for i in prompts_for_step(num_prompts, per_step, 3, epoch * steps + s)]
        assert len(taken) == len(set(taken)) == steps * per_step
        assert set(taken) <= set(range(num_prompts))


def test_every_prompt_gets_its_turn_also_where_steps_do_not_fill_an_epoch():
    # 11 prompts, 6 a step: an epoch passes over 5, so a prompt misses 40 epochs with probability (5/11)**40 = 2e-14.
    counts = [0] * 11
    for step in range(40):
        for i in prompts_for_step(11, 6, 0, step):
            counts[i] += 1
    # Mean 40 * 6/11 = 21.8, standard deviation sqrt(40 * 6/11 * 5/11) = 3.1.
    assert min(counts) > 21.8 - 5 * 3.1
    assert max(counts) < 21.8 + 5 * 3.1


def test_with_fewer_prompts_than_a_step_takes_epochs_follow_without_a_gap():
    stream = [i for step in range(6) for i in prompts_for_step(3, 4, 0, step)]
    assert len(stream) == 24
    for epoch in range(8):
        assert sorted(stream[3 * epoch : 3 * epoch + 3]) == [0, 1, 2]


def test_a_step_depends_on_nothing_but_its_arguments():
    forwards = [prompts_for_step(50, 8, 1, step) for step in range(30)]
    permutation.cache_clear()
    assert [prompts_for_step(50, 8, 1, step) for step in reversed(range(30))] == forwards[::-1]
    assert prompts_for_step(50, 8, 2, 0) != forwards[0]  # another seed
    assert forwards[6] != forwards[0]  # 50 // 8 = 6 steps an epoch: the first step of the next one
    # A value of the stream itself: a change here breaks the resumption of runs begun before it.
    assert prompts_for_step(10, 5, 0, 0) == [6, 9, 8, 7, 3]


def test_the_steps_of_an_epoch_draw_one_permutation():
    permutation.cache_clear()
    for step in range(100):
        prompts_for_step(1_000_000, 64, 0, step)
    assert permutation.cache_info().misses == 1


def test_sizes_that_make_no_sense_are_refused():
    for arguments in ((0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, -1)):
        with pytest.raises(ValueError):
            prompts_for_step(*arguments)


def test_the_embedded_task_is_scanned_whole(tokenizer):
    data = Arithmetic(difficulty=2, operations=["+", "-"], size=4096, held_out_size=256, seed=0)
    assert len(scan(data.load(Split.train), tokenizer, 64, "refuse", Split.train).prompts) == 4096


# -- what a template makes of the messages -----------------------------------------------------------------------------
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SYSTEM = "Answer as <answer>a number</answer>, and nothing else."


def with_template(template):
    return with_attributes(family_tokenizer("qwen2.5"), chat_template=template)


def asked(*messages):
    return Prompt(id="p", messages=tuple({"role": role, "content": text} for role, text in messages), answer="1")


def test_the_words_of_every_message_must_be_in_what_the_template_writes():
    chat = [("system", SYSTEM), ("user", "What is 1 + 2?"), ("assistant", "<think>so</think>3"), ("user", "And 2 + 2?")]
    for dropped, key in (("system", "data.system_prompt"), ("user", "data"), ("assistant", "data")):
        drops = with_template(TURNS.replace("in messages", f"in messages if m.role != '{dropped}'") + START)
        with pytest.raises(UserError, match=f"leaves out the {dropped}'s message of prompt 'p'") as refused:
            scan([asked(*chat)], drops, 400, "refuse", Split.train)
        assert refused.value.key == key
    thoughtless = with_template(TURNS.replace("m.content", "(m.content.split('</think>') | last)") + START)
    for kept in (with_template(TURNS + START), thoughtless):
        scan([asked(*chat)], kept, 400, "refuse", Split.train)


def test_a_template_that_moves_a_message_or_reads_a_switch_in_it_leaves_nothing_out():
    moved = "{% for m in messages if m.role == 'user' %}[{{ m.content }}\n\n{{ messages[0].content }}]{% endfor %}"
    scan([asked(("system", f"  {SYSTEM}\n"), ("user", "2?"))], with_template(moved), 400, "refuse", Split.train)
    switch = with_template(TURNS.replace("m.content", "m.content.replace('/no_think', '')") + START)
    scan([asked(("system", "Be brief. /no_think"), ("user", "2?"))], switch, 400, "refuse", Split.train)
    scan([asked(("system", "/no_think"), ("user", "2?"))], switch, 400, "refuse", Split.train)


def test_an_error_of_the_template_is_refused_by_name():
    for broken, cause in (("{{ messages + 1 }}", "TypeError"), ("{{ 1 / 0 }}", "ZeroDivision")):
        with pytest.raises(UserError, match=f"^model.path: its chat template fails .{cause}"):
            scan(THREE, with_template(broken), 400, "refuse", Split.train)


def test_prompts_know_what_they_have_begun_to_say():
    thinking = with_template(TURNS + START.replace("{% endif %}", "<think>\n{% endif %}"))
    assert [p.tail for p in scan(THREE, thinking, 400, "refuse", Split.train).prompts] == ["<think>\n"] * 3
    plain = scan([prompt("a", "1 + 2?\n<think>")], thinking, 400, "refuse", Split.train, style="raw")
    assert plain.prompts[0].tail == "<think>"
