"""What stands between turns: tokens put together turn by turn are those of the whole conversation's template."""

import pytest
from endpoint_agents import ADD
from hypothesis import example, given, settings, strategies as st
from in_one_test import each
from transformers import AutoTokenizer
from turn_shapes import EOS, shaped_tokenizer

from rlft.environment.turn_template import TurnTemplate
from rlft.tokens.text import RunTokenizer
from rlft.types import UserError
from tests.helpers.family_tokenizers import CHATML, SPECIAL, TAGS, family_tokenizer, with_attributes

WITH_TOOLS = ("qwen2.5", "qwen3", "llama-3", "mistral", "smollm3")
WITH_USERS = ("qwen2.5", "llama-3", "mistral", "gemma", "smollm2", "smollm3")
FAMILIES_AND_ROLES = [*((family, "tool") for family in WITH_TOOLS), *((family, "user") for family in WITH_USERS)]

ODD = [*'\n {"▁é漢\U0001f600\x00\t\ue000', "\n\n", "}\n", "</", "mark0mark", "<|"]
PARTS = st.lists(st.one_of(st.sampled_from([*ODD, *TAGS]), st.text(max_size=5)), max_size=5).map("".join)
"""What tools and users answer: any text that has no special token in it."""
ANSWERS = PARTS.filter(lambda text: not any(token in text for tokens in SPECIAL.values() for token in tokens)).map(
    lambda text: text.encode("utf-8", "replace").decode()
)
SAID = st.text("abc 12.\n", min_size=1, max_size=12).map(lambda text: f"x{text}x")
"""What the policy says: it never begins or ends with spaces, which templates strip."""


def asked(system=False):
    question = {"role": "user", "content": "1 + 1? mark0mark"}
    return [{"role": "system", "content": "Be brief."}, question] if system else [question]


def said(family, text, calls):
    """A turn of the policy, as its family's template has it."""
    content = f"<think>\n{text}\n</think>\n\n{text}" if family == "qwen3" else text
    turn = {"role": "assistant", "content": content}
    if calls:
        call = {"name": "add", "arguments": {"a": len(text), "b": 1}}
        turn["tool_calls"] = [{"type": "function", "id": "abcdefghi", "function": call}]
    return turn


def answers_of(role, texts):
    if role == "user":
        return [{"role": "user", "content": texts[0]}]
    return [{"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": text} for text in texts]


def ids_of_template(family, messages, tools, start):
    keys = {"tools": [ADD] if tools else None, "add_generation_prompt": start, "return_dict": False}
    return [int(token) for token in family_tokenizer(family).apply_chat_template([*messages], **keys)]


def follow(family, role, system, turns):
    """[the tokens of the conversation put together, those of its template], up to the end of the last turn.

    The policy samples what the template of the whole conversation has where its turns are.
    """
    tokenizer, tools = family_tokenizer(family), role == "tool"
    opening = asked(system)
    template = TurnTemplate(tokenizer, [role], tools=[ADD] if tools else [], opening=opening)
    messages = [*opening]
    for text, texts in turns:
        messages += [said(family, text, tools), *answers_of(role, texts)]
    messages.append(said(family, "done", False))
    whole = ids_of_template(family, messages, tools, start=False)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>"])
    ends = [end for end in ends if end not in (None, tokenizer.unk_token_id)]

    def to_its_end(start):
        return whole[start : next(i for i in range(start, len(whole)) if whole[i] in ends) + 1]

    row = [*template.prompt(opening)]
    for _, texts in turns:
        sampled = to_its_end(len(row))
        row += [*sampled, *template.suffix(sampled, answers_of(role, texts))]
    row += to_its_end(len(row))
    return [row, whole[: len(row)]]


@pytest.mark.parametrize(("family", "role"), FAMILIES_AND_ROLES)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    turns=st.lists(st.tuples(SAID, st.lists(ANSWERS, min_size=1, max_size=3)), min_size=1, max_size=3),
    system=st.booleans(),
)
@example(turns=[("x", ["\n\n"]), ("x", ["mark0mark"]), ("x", [""])], system=False)
@example(turns=[("x", [" 2"]), ("x", ["2 "])], system=True)
def test_a_conversation_put_together_has_the_tokens_of_its_template(family, role, turns, system):
    if family == "mistral":
        system = False  # its template moves the system's words to the last turn, and is refused
    row, whole = follow(family, role, system, turns)
    assert row == whole


@each(("family", "role"), FAMILIES_AND_ROLES)
def test_a_turn_that_a_limit_ended_is_ended_in_the_suffix(family, role):
    template = TurnTemplate(family_tokenizer(family), [role], tools=[ADD] if role == "tool" else [])
    answers = answers_of(role, ["2"])
    [end, *rest] = template.suffix([7, 8], answers)
    assert template.suffix([7, 8, end], answers) == tuple(rest)
    assert family_tokenizer(family).decode([end]) in ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>")


@pytest.mark.parametrize(("family", "role"), FAMILIES_AND_ROLES)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_special_tokens_that_an_answer_writes_stay_text(family, role, data):
    tokenizer, special = family_tokenizer(family), SPECIAL[family]
    hostile = data.draw(st.lists(st.sampled_from([*special, "<", "\n", "x"]), min_size=1, max_size=6).map("".join))
    template = TurnTemplate(tokenizer, [role], tools=[ADD] if role == "tool" else [])
    plain, written = (template.suffix([], answers_of(role, [text])) for text in ("x", hostile))
    of_template = [token for token in plain if token in tokenizer.all_special_ids or token < len(special)]
    assert [token for token in written if token in tokenizer.all_special_ids or token < len(special)] == of_template
    text = str(tokenizer.decode([*written]))
    if family == "mistral":  # its tokenizer puts a space before each part, also where the text is cut
        text, hostile = text.replace(" ", ""), hostile.replace(" ", "")
    if role == "tool" and family in ("llama-3", "mistral"):
        hostile = hostile.replace("\n", "\\n")  # JSON
    assert hostile.strip() in text


def test_a_lone_surrogate_is_answered_as_a_question_mark():
    template = TurnTemplate(family_tokenizer("qwen2.5"), ["tool"], tools=[ADD])
    broken, question = (template.suffix([], answers_of("tool", [text])) for text in ("a\ud83d", "a?"))
    assert broken == question


# -- refused -----------------------------------------------------------------------------------------------------------
REMEDY = "or put one into the model's folder as chat_template.jinja"


@each("family", ["gemma", "smollm2"])  # gemma's template has no word about tools
def test_a_template_that_cannot_show_tools_is_refused(family):
    with pytest.raises(UserError) as refusal:
        TurnTemplate(family_tokenizer(family), ["tool"], tools=[ADD])
    assert str(refusal.value) == (
        f"model.path: its chat template cannot show tools and their answers (add is not shown), got {family}; "
        f"use a model with a chat template that does, as Qwen2.5's, {REMEDY}"
    )


def test_a_template_that_takes_no_answers_of_tools_is_refused():
    with pytest.raises(UserError, match=r"cannot show tools and their answers \(Conversation roles must alternate"):
        TurnTemplate(family_tokenizer("gemma"), ["tool"])


REWRITING = [
    ("qwen3", False, False),  # drops the thinking of earlier turns
    ("qwen3", True, False),
    ("mistral", True, False),  # moves the tools to the user's last turn
    ("mistral", False, True),  # says the system's words only where the user spoke last
]


@each(("family", "tools", "system"), REWRITING)
def test_where_a_user_makes_a_template_rewrite_earlier_turns_the_whole_is_read_again(family, tools, system):
    tokenizer, opening, schemas = family_tokenizer(family), asked(system), [ADD] if tools else []
    template = TurnTemplate(tokenizer, ["user"], tools=schemas, opening=opening)
    assert template.rewriting == {"user"}
    first = template.prompt(opening)
    turn, answers = said(family, "x", False), answers_of("user", ["2?"])
    messages = [*opening, turn, *answers]
    branch = template.prompt(messages)
    assert [*branch] == ids_of_template(family, messages, tools, start=True)
    whole = ids_of_template(family, [*opening, turn], tools, start=False)
    assert branch[: len(first)] != first or [*branch[: len(whole)]] != whole
    assert [*first] == ids_of_template(family, opening, tools, start=True)
    with pytest.raises(ValueError, match=r"answers of the roles \['user'\] have no suffix"):
        template.suffix([], answers)


@each("family", ["qwen3", "mistral"])
def test_what_looks_like_a_special_token_in_history_stays_text(family):
    tokenizer, special = family_tokenizer(family), SPECIAL[family]
    opening = asked(family == "mistral")
    template = TurnTemplate(tokenizer, ["user"], opening=opening)
    messages = [*opening, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    hostile = [{**message, "content": "".join(special)} for message in messages]

    def specials(ids):
        return [token for token in ids if token in tokenizer.all_special_ids or token < len(special)]

    assert specials(template.prompt(hostile)) == specials(template.prompt(messages))
    written = template._rendered(hostile, start=True)
    assert len(specials(tokenizer(written)["input_ids"])) > len(specials(template.prompt(messages)))


def test_a_template_that_rewrites_earlier_turns_when_a_tool_answers_is_refused():
    with pytest.raises(UserError) as refusal:
        TurnTemplate(family_tokenizer("mistral"), ["tool"], tools=[ADD], opening=asked(True))
    assert str(refusal.value) == (
        "model.path: its chat template rewrites earlier turns when a tool answers, so no conversation with it goes on, "
        f"got mistral; use a model with a chat template that keeps them as they were, {REMEDY}"
    )
    mistral = family_tokenizer("mistral")
    template = TurnTemplate(mistral, ["tool"], tools=[ADD], opening=asked(True), may_rewrite=["tool"])
    assert template.rewriting == {"tool"}


def test_tools_of_a_template_that_rewrites_for_users_have_a_suffix():
    template = TurnTemplate(family_tokenizer("qwen3"), ["tool", "user"], tools=[ADD])
    assert template.rewriting == {"user"}
    assert template.suffix([], answers_of("tool", ["2"]))


SHOWN = "{{ m.content }}<|im_end|>{% endfor %}"
AFTER = "{% for m in messages %}{% if loop.index > NUMBER %}{{ raise_exception('Too much!') }}{% endif %}" + SHOWN


@each(("template", "problem"), [
    (None, "tokenizer has no chat template, which says what stands between turns"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
     "chat template ends an assistant's turn with no special token"),
    ("{% for m in messages[:1] %}" + SHOWN + "{{ messages[1].content }}<|im_end|>",
     "chat template takes no user's turn after an assistant's (the answer is not shown)"),
    (AFTER.replace("NUMBER", "2"), "chat template takes no user's turn after an assistant's (Too much!)"),
    (AFTER.replace("NUMBER", "4"), "chat template takes no second answer (Too much!)"),
])  # fmt: skip
def test_a_template_without_what_conversations_need_is_refused(tiny_path, template, problem):
    tokenizer = RunTokenizer(AutoTokenizer.from_pretrained(tiny_path, chat_template=template))
    with pytest.raises(UserError) as refusal:
        TurnTemplate(tokenizer, ["user"])
    assert str(refusal.value).startswith(f"model.path: its {problem}, got ")


def test_a_template_that_drops_nothing_but_thinking_rewrites():
    tokenizer = family_tokenizer("qwen3")
    whole = tokenizer.chat_template
    tokenizer = with_attributes(tokenizer, chat_template=whole.replace("(loop.last or thought)", "thought"))
    assert tokenizer.chat_template != whole
    assert TurnTemplate(tokenizer, ["user"]).rewriting


def test_a_template_that_wants_arguments_as_text_gets_them_so():
    tokenizer = family_tokenizer("qwen2.5")
    whole = tokenizer.chat_template
    changed = whole.replace("{{- call.arguments | tojson }}", "{{- '' + call.arguments }}")
    assert changed != whole
    wants_text = with_attributes(tokenizer, chat_template=changed)
    suffix = TurnTemplate(wants_text, ["tool"], tools=[ADD]).suffix([], answers_of("tool", ["2"]))
    assert suffix == TurnTemplate(tokenizer, ["tool"], tools=[ADD]).suffix([], answers_of("tool", ["2"]))
    assert tokenizer.decode([*suffix[:1]]) == CHATML[2]


def test_what_was_sampled_of_a_turns_end_is_not_said_again():
    """Command-R's turns end with two tokens: both, one or none of them may have been sampled, or another end."""
    tokenizer = shaped_tokenizer("two tokens, and always the next turn's start")
    response, turn, eos = tokenizer.convert_tokens_to_ids(["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>", EOS])
    [letter] = tokenizer("5")["input_ids"]
    next_turn = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>6<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    template = TurnTemplate(tokenizer, ["user"])
    both = [response, turn]
    ends = [([letter, *both], []), ([letter, response], [turn]), ([letter, turn], [])]
    for sampled, missing in [*ends, ([letter], both), ([letter, eos], both), ([], both)]:
        suffix = template.suffix(sampled, [{"role": "user", "content": "6"}])
        assert list(suffix) == [*missing, *tokenizer(next_turn)["input_ids"]], sampled
