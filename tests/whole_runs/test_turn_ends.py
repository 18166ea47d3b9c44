"""A base whose tokenizer names another end than its template's: every command ends a turn where the template does."""

import json
import shutil
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from rlft import cli
from rlft.commands import chat, serve
from rlft.commands.export.command import export
from rlft.commands.export.model_card import prepare
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.environment.endpoint.app import bound
from rlft.environment.endpoint.bodies import Chat
from rlft.environment.endpoint.service import Request
from rlft.loop.parts import engine_args
from rlft.types import UserError

END, OTHER = 2, 0
"""<|im_end|> and <|endoftext|> of the embedded vocabulary. The embedded model has learned to end with the first."""
KEYS = ["generation=transformers", "generation.max_tokens=48", "model.device=cpu"]
KEYS += ["data=arithmetic", "data.size=32", "data.held_out_size=8", "scoring.workers=0", "eval.num_prompts=8"]


@pytest.fixture
def base(tmp_path, tiny_path):
    """The embedded model as a base such as Qwen2.5: end token `<|endoftext|>`, and a template with `<|im_end|>`."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_path, folder)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, "eos_token_id": OTHER}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == OTHER
    return folder


def evaluated(tmp_path, model, *keys):
    """What an evaluation of this model has sampled."""
    assert cli.run(["eval", f"model.path={model}", *KEYS, "generation.temperature=0", *keys]) == 0
    *_, file = sorted((tmp_path / "runs" / "eval").glob("*/evaluations/*.jsonl"), key=lambda f: f.stat().st_mtime_ns)
    lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    return [{name: line[name] for name in ("text", "finish_reason", "token_ids") if name in line} for line in lines]


def test_an_evaluation_ends_where_the_template_ends_a_turn(base, tiny_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine, usual = evaluated(tmp_path, base), evaluated(tmp_path, tiny_path)
    assert mine == usual
    assert {line["finish_reason"] for line in mine} == {"stop"}
    raw = evaluated(tmp_path, base, "prompts.style=raw")
    assert "stop" not in {line["finish_reason"] for line in raw}, "raw text ends with the tokenizer's token alone"


def test_chat_and_serve_end_where_the_template_ends_a_turn(base):
    said: list[str] = []
    for style in ("chat", "raw"):
        words = [f"model.path={base}", *KEYS, "generation.temperature=0", f"prompts.style={style}"]
        plain = {**compose(words), "environment": None}
        with chat.open_talk(chat.read(plain, True), None, True, said.append) as talk:
            completion = talk.ask("What is 12 + 30?").completion
            assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop") == (style == "chat")
        keys = serve.read_config(["serve.port=0"])
        body = Chat(messages=[{"role": "user", "content": "What is 12 + 30?"}], return_token_ids=True)
        request = Request(key="", body=body)
        with (
            bound(keys.host, 0, "serve") as listening,
            serve.opened(serve.read(plain), None, keys, listening, said.append) as (service, _),
        ):
            service.answer([request], lambda error: pytest.fail(str(error)))
        [choice] = request.reply.result(timeout=0)["choices"]
        assert (choice["finish_reason"], choice["token_ids"][-1]) == ("stop", END), style
        assert "<|" not in choice["message"]["content"]
    notes = [line for line in said if line.startswith("note: the end-of-turn token is <|im_end|>")]
    assert len(notes) == 3, "a chat of raw text ends with the tokenizer's own"


def test_a_plan_names_the_ends_and_says_where_they_are_not_the_tokenizers(base, tiny_path):
    said = "the end-of-turn token is <|im_end|>, as the chat template has it, while the tokenizer's end token is"
    for model, more, notes in ((base, "; <|endoftext|> would end it too", [said]), (tiny_path, "", [])):
        plan = resolve(compose([f"model.path={model}", *KEYS])).plan()
        assert plan.end_rows() == [("end-of-turn token", "<|im_end|>", f"learned and sampled, token 2{more}")]
        assert [note[: len(said)] for note in plan.notes if "end-of-turn token" in note] == notes
    with pytest.raises(UserError, match=r"^generation\.stop: holds the special token .*leave it out, since every"):
        resolve(compose([f"model.path={base}", *KEYS, "generation.stop=['<|im_end|>']"])).plan()


def test_what_is_learned_is_what_engines_end_with(base, tmp_path):
    file = tmp_path / "said.jsonl"
    file.write_text("".join(f'{{"prompt": "{i} + 1?", "completion": "{i + 1}"}}\n' for i in range(60)))
    keys = [f"model.path={base}", f"demonstrations.path={file}", "examples_per_step=4", "model.device=cpu"]
    keys += ["max_completion_tokens=64", "generation.max_tokens=64"]
    for style, end in (("chat", END), ("raw", OTHER)):
        plan = resolve(compose([*keys, f"prompts.style={style}"], command="sft")).plan()
        config = plan.config
        args = engine_args(config, config.lora)
        assert {int(text.ids[-1]) for text in plan.train.texts} == {end}
        assert args.ends.ids[0] == end
        assert plan.ends == args.ends


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_an_export_names_the_ends(policy_run, base, tiny_path, tmp_path, kind):
    place = policy_run(f"model.path={base}", "generation.stop=[65]")
    out = export(prepare(place, str(tmp_path / "out"), kind, None, lambda _: None), lambda _: None)
    its = json.loads((base / "generation_config.json").read_text())
    assert json.loads((out / "generation_config.json").read_text()) == {**its, "eos_token_id": [END, OTHER]}
    for settings in (out / "tokenizer_config.json", *out.glob("*/tokenizer_config.json")):
        assert "local_files_only" not in json.loads(settings.read_text())
    card = (out / "README.md").read_text()
    assert "| End-of-turn token | `<\\|im_end\\|>` (2) or `<\\|endoftext\\|>` (0) |" in card
    assert "eos_token_id=[2, 0, 65]" in card
    assert "stop_token_ids=[2, 0, 65]" in card
    assert "`--override-kv tokenizer.ggml.eot_token_id=int:2`" in card
    prompts = {**place.config["prompts"], "style": "raw"}
    raw = replace(place, config={**place.config, "prompts": prompts})
    out = export(prepare(raw, str(tmp_path / "raw"), kind, None, lambda _: None), lambda _: None)
    assert "| End-of-turn token | `<\\|endoftext\\|>` (0) |" in (out / "README.md").read_text()
    if kind == "model":
        assert (out / "generation_config.json").read_text() == (base / "generation_config.json").read_text()
