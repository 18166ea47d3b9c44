"""`rlft export`: what is exported computes what was trained, nothing is half written or overwritten, and it is pushed.

The hub is a small server that speaks its protocol.
"""

import base64
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import constants
from in_one_test import each
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from run_folders import contents
from safetensors.torch import load_file
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft import cli
from rlft.batch import score_sequences
from rlft.commands.export import command as export_command
from rlft.commands.export.command import Push, export, read_target
from rlft.commands.export.model_card import prepare
from rlft.commands.export.weights import MergeError, round_weights
from rlft.model.backbone import read_backbone
from rlft.model.kernels import elementwise
from rlft.model.reward_model import open_learned
from rlft.runs import checkpoint, run_folder
from rlft.runs.find import find
from rlft.runs.lines import silent
from rlft.system import interrupt
from rlft.system.hub import hub_answers
from rlft.types import Completion, FinishReason, Group, Rollout, UserError

CPU = torch.device("cpu")
TEXTS = ("What is 47 + 85?", "<think>47 + 85 = 132</think><answer>132</answer>", "x" * 60)


def exported(place, out, kind=None, dtype=None):
    return export(prepare(place, str(out), kind, dtype, silent), silent)


def score(model, sequences):
    with torch.no_grad():
        return [logprob for ids in sequences for logprob in score_sequences(model.eval(), [ids], CPU)[0]]


def largest_gap(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="session")
def sequences(backbone):
    return [backbone.tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture
def trainers(trained, make_roles, model_config, sequences):
    """The trainer's own log-probs with the policy of the last checkpoint, in float64; the base's are far from them."""
    backbone = read_backbone(model_config())
    backbone.model.double()
    roles = make_roles(backbone=backbone)
    base = [x for row in roles.score(sequences) for x in row]  # a fresh adapter changes nothing
    saved = checkpoint.load_newest(run_folder.checkpoints(trained), silent)
    roles.restore(saved.adapters)
    found = [x for row in roles.score(sequences) for x in row]
    assert largest_gap(found, base) > 0.3, "there is something to lose"
    return found


# -- as the trainer --------------------------------------------------------------------------------------------------
def test_the_merged_model_says_what_the_trained_policy_says(exports, trainers, sequences):
    model = AutoModelForCausalLM.from_pretrained(exports["model"])
    assert model.dtype == torch.float32
    # float32 adds up W + B A before or after the product with the input; seen: 3e-6.
    assert largest_gap(score(model, sequences), trainers) < 1e-4


@pytest.mark.slow
def test_vllm_says_of_the_merged_model_what_the_trained_policy_says(exports, trainers, sequences):
    from real_engines import open_vllm

    generator = open_vllm(exports["model"], lora_rank=1, max_sequence_tokens=128)
    try:
        found = [x for row in generator.score(sequences) for x in row]
    finally:
        generator.close()
    assert largest_gap(found, trainers) < 1e-4


def test_the_adapter_says_what_the_trained_policy_says_and_knows_where_its_base_is(
    exports, trainers, sequences, tiny_path
):
    out = exports["adapter"]
    on_base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_path), out)
    for model in (on_base, AutoPeftModelForCausalLM.from_pretrained(out)):
        elementwise.install(model.double())  # transformers' norms would go through float32 even so
        # The same tensors in the same modules: only the order of additions may differ.
        assert largest_gap(score(model, sequences), trainers) < 1e-6
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_path.resolve())
    assert {f.name for f in out.iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "chain.jsonl", "rlft.json",
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), slow(0o077, 0o600, 0o700)])
def test_exported_files_have_the_modes_of_any_file(umask, file, folder, policy_run, tmp_path):
    place, before = policy_run(), os.umask(umask)
    try:
        outs = [exported(place, tmp_path / "exports" / kind, kind) for kind in ("model", "adapter")]
    finally:
        os.umask(before)
    for out in outs:
        assert out.stat().st_mode & 0o777 == folder
        assert {oct(f.stat().st_mode & 0o777) for f in out.iterdir()} == {oct(file)}


def test_one_checkpoint_of_a_run_can_be_named_whose_card_tells_no_later_result(trained, exports, tmp_path):
    older, newer = checkpoint.finished(run_folder.checkpoints(trained))
    out, name = exported(find(older), tmp_path / "older", "adapter"), "adapter_model.safetensors"
    assert (out / name).read_bytes() == (older / "policy" / name).read_bytes()
    assert (exports["adapter"] / name).read_bytes() == (newer / "policy" / name).read_bytes()
    assert (older / "policy" / name).read_bytes() != (newer / "policy" / name).read_bytes()
    text = (out / "README.md").read_text()
    assert "for 2 steps" in text
    assert "|  | step 0 | step 2 |" in text


@each("kind", ["model", "adapter"])
def test_the_exported_tokenizer_is_the_bases(kind, exports, tiny_path):
    mine, its = AutoTokenizer.from_pretrained(exports[kind]), AutoTokenizer.from_pretrained(tiny_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1? é"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert mine.apply_chat_template(messages, **options) == its.apply_chat_template(messages, **options)
    assert mine.eos_token_id == its.eos_token_id


# -- dtypes ----------------------------------------------------------------------------------------------------------
def merged_by_hand(base, policy):
    """W + alpha / rank x B A in float32 by name, of the weights that have an adapter (here alpha / rank = 8 / 4)."""
    found = {}
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in policy:
            a, b = (policy[f"{module}.lora_{which}.weight"] for which in "AB")
            found[name] = weight.float() + 8 / 4 * (b @ a)
    return found


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(policy_run, tiny_path, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(base)
    before = contents(base)
    place = policy_run(f"model.path={base}", "model.dtype=float32")
    found = weights_of(exported(place, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    own, [saved] = weights_of(base), checkpoint.finished(run_folder.checkpoints(place.run))
    expected = merged_by_hand(own, load_file(saved / "policy" / "adapter_model.safetensors"))
    assert len(expected) == 4 * 7  # four layers, seven linear modules in each
    for name, weight in own.items():
        # One unit of float32 before rounding may fall on either side of the middle between two bfloat16 numbers.
        different = found[name] != expected.get(name, weight).bfloat16()
        assert different.float().mean() < (1e-3 if name in expected else 1e-9), name
    exact = weights_of(exported(place, tmp_path / "exact", dtype="float32"))
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    assert all(torch.equal(found[name], exact[name].bfloat16()) for name in exact)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert contents(base) == before, "the base is only read"


def test_a_dtype_too_small_for_a_weight_is_refused():
    layer = torch.nn.Linear(1, 1)
    layer.weight.data.fill_(1e5)  # float16 ends at 65504
    dtypes = dict.fromkeys(("weight", "bias"), torch.float32)
    with pytest.raises(UserError, match=r"^dtype: cannot hold the numbers of weight, got torch.float16; use dtype=bfl"):
        round_weights(layer, dtypes, "float16")


# -- the generation config -------------------------------------------------------------------------------------------
NEARLY_GREEDY = '{"do_sample": false, "temperature": 0.3, "top_k": 5, "eos_token_id": [2, 0]}'
"""transformers reads it, and would refuse to write it."""


@pytest.mark.parametrize("own", [NEARLY_GREEDY, None], ids=["a strange one", "none"])
def test_the_generation_config_is_the_bases_own(policy_run, tiny_path, tmp_path, own):
    base = tmp_path / "base"
    shutil.copytree(tiny_path, base)
    (base / "generation_config.json").unlink()
    if own is not None:
        (base / "generation_config.json").write_text(own)
    out = exported(policy_run(f"model.path={base}"), tmp_path / "out")
    found = out / "generation_config.json"
    assert (found.read_text() if found.exists() else None) == own


# -- what is refused -------------------------------------------------------------------------------------------------
def refusal(place, *words):
    with pytest.raises(UserError) as raised:
        export(prepare(place, *words, silent), silent)
    return str(raised.value)


REFUSED = [
    ((None, None, None), "out: is missing; write out=<new folder>"),
    (("", None, None), "out: is empty"),
    (("new", "modle", None), "as: is not a form that rlft writes, got modle; did you mean model? All: model, adapter"),
    (("new", "", None), "as: is not a form that rlft writes, got nothing"),
    (("new", "gguf", None), "as: is written by llama.cpp's converter, not by rlft, got gguf; use as=model, then "
     "`python llama.cpp/convert_hf_to_gguf.py new --outfile new.gguf --outtype auto`"),
    (("new", None, "float8"), "dtype: is not a known dtype, got float8; did you mean float32? All: auto, float32"),
    (("new", "adapter", "float32"), "dtype: applies to a model's weights only: an adapter keeps its own dtype, got "
     "float32"),
    (("a_file", None, None), "out: exists already, and nothing is ever overwritten"),
    (("a_folder", None, None), "out: exists already"),
    (("a_link", None, None), "out: exists already"),
    (("a_file/new", None, None), "out: cannot be written (Not a directory), got a_file/new"),
    (("run/checkpoints/new", None, None), "out: lies among the run's checkpoints, which would no longer be whole"),
]  # fmt: skip


def test_words_that_cannot_be_done_are_refused(policy_run, here):
    place = policy_run()
    (here / "a_file").touch()
    (here / "a_folder").mkdir()
    (here / "a_link").symlink_to("nowhere")
    before = sorted(here.rglob("*"))
    for words, message in REFUSED:
        assert refusal(place, *words).startswith(message), words
        assert sorted(here.rglob("*")) == before, words


def test_damaged_checkpoints_are_passed_over_or_refused(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    older, newer = checkpoint.finished(run_folder.checkpoints(run))
    (newer / "policy" / "adapter_model.safetensors").write_bytes(b"torn")
    said = []
    asked = prepare(find(run), str(tmp_path / "out"), None, None, said.append)
    assert asked.checkpoint == older
    problem = "policy/adapter_model.safetensors does not match its checksum"
    assert said == [f"checkpoint step_000003 is damaged ({problem}); going back to the one before"]
    message = refusal(find(newer), str(tmp_path / "out"), None, None)
    assert message.startswith(f"run: the checkpoint is damaged ({problem}), got ")
    (older / "MANIFEST").unlink()
    assert refusal(find(run), str(tmp_path / "out"), None, None).startswith("run: every checkpoint of this run is dam")


def test_a_base_whose_weights_are_quantised_is_not_merged_into(policy_run, tiny_path, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_path, base)
    plain = json.loads((base / "config.json").read_text())
    plain["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(plain))
    place = policy_run(f"model.path={base}")
    assert refusal(place, str(tmp_path / "out"), None, None).startswith("as: the base's own weights are quantised")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["base", "run"]
    exported(place, tmp_path / "out", "adapter")


def test_a_merge_that_would_change_what_the_policy_says_is_refused(save_run, tiny_path, tmp_path):
    # The embedding's matrix is the LM head's too: merged, the adapter of the one would also change the other.
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens"], task_type="CAUSAL_LM"))
    own = {"save_embedding_layers": False}
    weights = {name: torch.randn_like(t) * 0.3 for name, t in get_peft_model_state_dict(model, **own).items()}
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in model.peft_config["default"].to_dict().items()}
    place = save_run(adapters={"policy": weights}, config=config)
    asked = prepare(place, str(tmp_path / "out"), None, None, silent)
    with pytest.raises(MergeError, match=r"log-probs differ from the adapter's by .* use as=adapter$"):
        export(asked, silent)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run"]


# -- whole or not there ----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_kill_leaves_no_export_and_the_next_one_cleans_up(policy_run, forks, tmp_path):
    place, out = policy_run(), tmp_path / "exports" / "out"
    kill = {"at": "rlft.commands.export.weights:save", "call": 1, "do": "kill", "when": "after"}
    forks.run("export", f"run={place.run}", f"out={out}", cwd=tmp_path, events=[kill], ends=-9)
    [left] = out.parent.iterdir()
    assert left.name == ".out.writing"
    (left / "model.safetensors.index.json").touch()  # of a larger model that was exported to the same place
    exported(place, out)
    assert [f.name for f in out.parent.iterdir()] == ["out"]
    assert not (out / "model.safetensors.index.json").exists()


# -- runs of other kinds ---------------------------------------------------------------------------------------------
def test_a_run_of_all_weights_is_exported_as_its_model_and_has_no_adapter(policy_run, tiny_path, tmp_path):
    place = policy_run()
    [folder] = checkpoint.finished(run_folder.checkpoints(place.run))
    shutil.rmtree(folder / "policy")
    shutil.copytree(tiny_path, folder / "model")
    checkpoint._write_manifest(folder)
    whole = replace(place, config={**place.config, "lora": None})
    gone = replace(whole, config={**whole.config, "model": {**whole.config["model"], "path": "/gone"}})
    found, own = contents(exported(gone, tmp_path / "out")), contents(tiny_path)
    assert found.pop("README.md") != own.pop("README.md")
    assert found == own
    half = weights_of(exported(whole, tmp_path / "half", dtype="bfloat16"))
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in weights_of(tiny_path).items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    refused = "as: the run trained all weights and has no adapter, got adapter; use as=model"
    assert refusal(whole, str(tmp_path / "new"), "adapter", None) == refused


def test_a_reward_model_is_exported_as_what_a_learned_reward_takes_and_as_no_language_model(
    save_run, make_roles, make_prompt, tmp_path, ran
):
    roles, generator = make_roles(noise=0.05), torch.Generator().manual_seed(3)
    head = {"weight": torch.randn(1, 128, generator=generator), "bias": torch.randn(1, generator=generator)}
    adapters = {"reward": roles.weights("policy")}
    run = save_run(adapters=adapters, config=roles.adapter_config(), heads={"reward": head})
    out = tmp_path / "mine"
    message = refusal(run, str(out), None, None)
    assert message.startswith("as: a reward model is an adapter with a scalar head, which no causal language model hol")
    assert message.endswith(f"got model; use as=adapter; then reward.learned.path={out}")
    assert ran(["export", f"run={run.run}", f"out={out}", "as=adapter"]).out == f"exported to {out}\n"
    [folder] = checkpoint.finished(run_folder.checkpoints(run.run))
    prompt = make_prompt("What is 1 + 2?")
    said = Completion(text="", token_ids=(51, 52, 2), logprobs=(0.0,) * 3, finish_reason=FinishReason.stop)
    group = Group(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=said, policy_version=0),))
    scores = []
    for path in (out, folder / "reward"):
        learned = open_learned("x", str(path), make_roles(), token_budget=999, center=0.0, scale=1.0)
        scores.append(learned([group])[0][0])
    assert scores[0] == scores[1] != 0
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "peft"
    assert "pipeline_tag" not in front
    assert text.startswith("\n# run\n\nA reward model, trained with rlft for 7 steps.\n")
    assert "reward.learned.path=mine lora.rank=4 lora.alpha=8" in text
    assert "GGUF" not in text, "it is nothing for llama.cpp"


ID = "me/mine"


class Hub(ThreadingHTTPServer):
    """account: what whoami answers, None for a token that is refused. repositories: {id: whether it is private}.

    files: {id: {path: content}}, of what was committed. wrong: {path of a request: status to fail with}. asked: the
    requests so far. seconds: before each answer.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.account = {"name": "me", "auth": {"accessToken": {"role": "write"}}}
        self.repositories = {}
        self.files = {}
        self.wrong = {}
        self.asked = []
        self.seconds = 0.0

    def handle_error(self, request, client_address):
        """A client that left is no error."""

    def answer(self, method, path, body):
        """(status, fields)."""
        self.asked.append(f"{method} {path}")
        time.sleep(self.seconds)
        name = path.removeprefix("/api/models/").partition("/revision/")[0].partition("/commit/")[0]
        if path in self.wrong:
            return self.wrong[path], {"error": "it is broken"}
        if path == "/api/whoami-v2":
            return (200, self.account) if self.account else (401, {"error": "no"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            exists, private = name in self.repositories, asked.get("private") or asked.get("visibility") == "private"
            self.repositories.setdefault(name, bool(private))
            return 409 if exists else 200, {"url": f"{self.url}/{name}", "id": name}
        if "/preupload/" in path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return 200, {"files": [{**file, "shouldIgnore": False} for file in files]}
        if "/commit/" in path:
            lines = map(json.loads, body.decode().splitlines())
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.files.setdefault(name, {}).update({f["path"]: base64.b64decode(f["content"]) for f in files})
            return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/{name}/commit/{'1' * 40}"}
        if method == "GET" and name not in self.repositories:
            return 404, {"error": "Repository not found"}
        return 200, {"id": name, "private": self.repositories.get(name), "sha": "0" * 40, "siblings": [], "tags": []}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        assert isinstance(self.server, Hub)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        status, fields = self.server.answer(self.command, self.path.partition("?")[0], body)
        data = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_POST = do_HEAD = do_GET

    def log_message(self, format, *args):
        """Nothing."""


@pytest.fixture
def hub(monkeypatch):
    """A hub that takes everything, and a token for it."""
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hub_answers.cache_clear()
    huggingface_hub.close_session()
    yield server
    server.shutdown()
    server.server_close()
    hub_answers.cache_clear()
    huggingface_hub.close_session()


@pytest.fixture
def pushed(policy_run, tmp_path, capsys):
    """Exports a run's adapter to `out` and pushes it, with further words: (exit code, output, errors, the folder)."""
    run = policy_run().run

    def push(*words, out="out"):
        capsys.readouterr()
        code = cli.run(["export", f"run={run}", f"out={tmp_path / out}", "as=adapter", f"push={ID}", *words])
        return code, *capsys.readouterr(), tmp_path / out

    return push


# -- a hub that takes it -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["private", "public"])
def test_the_folder_is_pushed_as_it_is(kind, hub, pushed):
    code, out, err, folder = pushed(*(["private=false"] if kind == "public" else []))
    assert (code, hub.files, hub.repositories) == (0, {ID: contents(folder)}, {ID: kind == "private"})
    assert (out.splitlines()[0], out.splitlines()[-1]) == (f"exported to {folder}", f"pushed to {hub.url}/{ID}")
    size = sum(map(len, contents(folder).values()))
    assert f"pushing {len(contents(folder))} files ({size:,} bytes) to the {kind} repository {ID}" in err
    assert "on this machine, which others will not find" in err, "the embedded base is nowhere else"
    assert f'path = "{ID}"' in (folder / "README.md").read_text(), "the card is read on the hub"
    assert interrupt.line() == f"rlft: interrupted: {folder} is exported and pushed to {ID}"


def test_a_repository_that_exists_gets_the_files(hub, pushed):
    hub.repositories[ID] = True
    hub.files[ID] = {"mine.txt": b"stays", "README.md": b"is replaced"}
    code, *_, folder = pushed()
    assert (code, hub.files) == (0, {ID: {"mine.txt": b"stays", **contents(folder)}})


# -- one that does not -------------------------------------------------------------------------------------------------
@each(("account", "private", "wrong", "words", "message"), [
    (None, None, {}, (), f"push: the hub refuses the token (401), got {ID}; create one that may write at "),
    ({"auth": {"accessToken": {"role": "read"}}}, None, {}, (),
     f"push: the token may only read, got {ID}; create one"),
    ({}, None, {f"/api/models/{ID}": 403}, (), f"push: the hub refuses the token (403), got {ID}; "),
    ({}, False, {}, (), f"private: {ID} exists on the hub and is public; a push does not change that, got tr"),
    ({}, True, {}, ("private=false",), f"private: {ID} exists on the hub and is private; a push does not ch"),
])  # fmt: skip
def test_what_the_hub_would_refuse_is_refused_before_anything_is_written(
    account, private, wrong, words, message, hub, pushed, monkeypatch
):
    hub.account = None if account is None else {"name": "me", **account}
    hub.repositories, hub.wrong = {} if private is None else {ID: private}, wrong
    monkeypatch.setattr("rlft.commands.export.command.export", lambda *_: pytest.fail("something was computed"))
    code, _, err, _ = pushed(*words)
    assert (code, err.startswith(f"rlft: {message}")) == (2, True), err
    assert not any(line.startswith("POST") for line in hub.asked)


@pytest.mark.parametrize(
    ("broken", "status", "problem"),
    [("/api/repos/create", 403, "HfHubHTTPError: "), (f"/api/models/{ID}/commit/main", 400, "BadRequestError: ")],
)
def test_a_push_that_fails_keeps_the_folder_and_names_the_command(broken, status, problem, hub, pushed):
    hub.wrong = {broken: status}
    code, _, err, out = pushed()
    line = err.splitlines()[-1]
    assert code == 1
    assert line.startswith(f"rlft: stopped: not pushed to the private repository {ID}: {problem}")
    assert line.endswith(f"; {out} is kept; try `hf upload {ID} {out} --private`")
    assert (out / "adapter_model.safetensors").is_file()
    assert interrupt.line().endswith(f"`hf upload {ID} {out} --private` uploads the rest")


def test_a_hub_that_is_broken_or_silent_does_not_keep_the_export_from_being_written(hub, pushed, monkeypatch):
    monkeypatch.setattr(export_command, "QUESTION_SECONDS", 0.2)
    before = huggingface_hub.get_session().timeout
    for status, seconds, problem in ((500, 0.0, "HfHubHTTPError"), (None, 60.0, "ReadTimeout")):
        hub.wrong, hub.seconds = {} if status is None else {"/api/whoami-v2": status}, seconds
        code, _, err, out = pushed(out=problem)
        assert (code, f"not pushed: {problem}: " in err) == (1, True), err
        assert (out / "adapter_model.safetensors").is_file()
    assert huggingface_hub.get_session().timeout == before, "waits are limited for these questions alone"


# -- nowhere to push to ------------------------------------------------------------------------------------------------
PROBLEMS = {
    "offline": "HF_HUB_OFFLINE is set",
    "no token": "there is no token for the Hugging Face hub",
    "no answer": "http://127.0.0.1:9 cannot be reached",
}


@each("why", PROBLEMS)
def test_offline_it_says_what_it_would_do(why, pushed, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", why == "offline")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None if why == "no token" else "hf_of_the_test")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port of "discard", which nobody opens
    hub_answers.cache_clear()
    code, said, err, out = pushed(out=f"{why} folder")
    hub_answers.cache_clear()
    assert (code, said.startswith(f"exported to {out}\n"), "pushed" in said) == (1, True, False)
    files = contents(out)
    commands = ["`hf auth login`"] if why == "no token" else []
    commands.append(f"`hf upload {ID} '{out}' --private`")
    assert err.splitlines()[-1] == (
        f"rlft: stopped: not pushed: {PROBLEMS[why]}; {out} is kept; what would go to the private repository {ID}: "
        f"{len(files)} files ({sum(map(len, files.values())):,} bytes), by {' and then '.join(commands)}"
    )


# -- words -------------------------------------------------------------------------------------------------------------
def test_ids_of_repositories():
    assert read_target(None, None) is None
    assert read_target(ID, None) == Push(repo_id=ID, private=True) == read_target(ID, "true")
    assert read_target("an-org/Mine_0.5B", "false") == Push(repo_id="an-org/Mine_0.5B", private=False)


@each(("repo_id", "private", "message"), [
    *((word, None, f"push: is not a repository id .*, got {word or 'nothing'}; write push=<user>/<name>") for word
      in ("", "a/b/c", "/mine", "me/", "me/my model", "me/-x", "me/a--b", "me/a..b", "me/x.git", "me/" + "x" * 97,
          "https://huggingface.co/me/mine")),
    ("mine", None, "push: names no user or organisation, got mine; write push=<user>/<name>"),
    (ID, "yes", "private: must be true or false, got yes; write private=false if"),
    (ID, "", "private: must be true or false, got nothing"),
    (None, "true", "private: has no effect without push=, got true; add push="),
])  # fmt: skip
def test_words_that_name_no_repository_are_refused(repo_id, private, message):
    with pytest.raises(UserError, match=f"^{message}"):
        read_target(repo_id, private)
