"""Small tokenizers whose chat templates end turns as those of families of models do, written for the tests.

Each shape has the tokens and the structure of its family: where a turn's end stands, and what else stands there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlft.tokens.text import RunTokenizer

EOS = "<|endoftext|>"


@dataclass(frozen=True)
class Shape:
    """A template, and what is right for it.

    Attributes:
        template: the chat template.
        special: special tokens besides the tokenizer's end token.
        closing: the tokens that are learned after an assistant's text.
        ends: the tokens at which sampling ends, in order.
        lead: plain text between the assistant's text and `closing`.
        turn: what is learned for the text "5" without its end; "" if that is only noted.
        note: a part of the note about demonstrations.
    """

    template: str
    special: Sequence[str]
    closing: Sequence[str]
    ends: Sequence[str]
    lead: str = ""
    turn: str = "5"
    note: str = ""


def shape(template: str, special: str, closing: str, ends: str = "", **more: str) -> Shape:
    """Of tokens with spaces between them; without `ends` they are `closing` and the tokenizer's own end."""
    return Shape(template, special.split(), closing.split(), (ends or f"{closing} {EOS}").split(), **more)


CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool>{{ c.function.arguments }}</tool>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """\
<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}\
{% if m.tool_calls %}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
PHI = """\
{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""
COMMAND = """\
{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>\
{% if m.tool_calls %}<|START_ACTION|>{{ m.tool_calls[0].function.arguments }}<|END_ACTION|>\
{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}\
{% else %}<|USER_TOKEN|>{{ m.content }}{% endif %}\
<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"""
HARMONY = """\
{% for m in messages %}{% if m.role == 'assistant' %}\
{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}\
{% if m.tool_calls %}<|start|>assistant to=tool<|message|>{{ m.tool_calls[0].function.arguments }}<|call|>\
{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}\
{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}\
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
OPEN = """\
{% for m in messages %}<|{{ m.role }}_start|>{{ m.content }}\
{% if not loop.last or m.role == 'user' %}<|{{ m.role }}_end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant_start|>{% endif %}"""
R1 = """\
<|begin|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}\
{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""
QWEN3 = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}<think>

</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NEMOTRON = """\
{% for m in messages %}<SPECIAL_11>{{ m.role }}
{{ m.content }}
{% if m.role == 'assistant' %}<SPECIAL_12>
{% endif %}{% endfor %}{% if add_generation_prompt %}<SPECIAL_11>assistant
{% endif %}"""
SOLAR = """\
{% for m in messages %}{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}\
<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\
{% endif %}"""
GLM = """\
[gMASK]{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

SHAPES = {
    "a base with another end": shape(CHATML, "<|im_start|> <|im_end|>", "<|im_end|>"),
    "an end for calls": shape(
        LLAMA, "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>", "<|eot_id|>",
        ends=f"<|eot_id|> <|eom_id|> {EOS}",
    ),
    "an end of the conversation behind the turn's": shape(PHI, "<|user|> <|assistant|> <|end|>", "<|end|>"),
    "two tokens, and always the next turn's start": shape(
        COMMAND,
        "<|START_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|USER_TOKEN|> <|END_OF_TURN_TOKEN|> <|START_ACTION|> "
        "<|END_ACTION|> <|START_RESPONSE|> <|END_RESPONSE|>", "<|END_RESPONSE|> <|END_OF_TURN_TOKEN|>",
        ends=f"<|END_OF_TURN_TOKEN|> {EOS}", turn="<|START_RESPONSE|>5",
    ),
    "channels": shape(
        HARMONY, "<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>", "<|return|>",
        ends=f"<|return|> <|call|> {EOS}", turn="<|channel|>final<|message|>5",
    ),
    "a last turn that is left open":
        shape(OPEN, "<|user_start|> <|user_end|> <|assistant_start|> <|assistant_end|>", "<|assistant_end|>"),
    "a prompt that opens thinking": shape(
        R1, "<|begin|> <|User|> <|Assistant|> <|end_of_sentence|>", "<|end_of_sentence|>",
        note="it does not write the end of the prompt, '<think>\\n', in a conversation",
    ),
    "thinking that only the turn has":
        shape(QWEN3, "<|im_start|> <|im_end|>", "<|im_end|>", turn="<think>\n\n</think>\n\n5"),
    "a line break before the end": shape(NEMOTRON, "<SPECIAL_11> <SPECIAL_12>", "<SPECIAL_12>", lead="\n"),
    "an end that is also inside":
        shape(SOLAR, "<|begin|> <|think|> <|content|> <|end|>", f"<|end|> {EOS}", ends=EOS, turn="<|content|>5"),
    "no end but the next turn": shape(GLM, "[gMASK] <|user|> <|assistant|>", EOS, ends=EOS),
}  # fmt: skip


@cache
def shaped_tokenizer(name: str) -> RunTokenizer:
    """A byte tokenizer with this shape's template, whose end token is `<|endoftext|>`; the same one each time."""
    own = byte_tokenizer(name, SHAPES[name].template, (EOS, *SHAPES[name].special), eos_token=EOS)
    return RunTokenizer(own)


def byte_tokenizer(name: str, template: str, special: Sequence[str], **ends: str | None) -> PreTrainedTokenizerFast:
    """A token for each byte and these special tokens, without a pad token; ends: which are its first and last."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))  # noqa: B010
    setattr(made, "decoder", decoders.ByteLevel())  # noqa: B010
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    how = {"chat_template": template, "name_or_path": name, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=made, **how, **ends)
