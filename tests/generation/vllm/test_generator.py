"""The real vLLM engine in this process, beside a trainer's model with the same adapters.

One engine is started for the module.
"""

import math
import os
import random
import signal
import sys
import weakref
from contextlib import closing, nullcontext
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import model_folders
import numpy
import psutil
import pytest
import torch
from fused_engine import fused, logprobs_of
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from real_engines import open_vllm, vllm_engine
from slow_cases import slow
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import rlft
from rlft.environment.conversations import Conversations
from rlft.environment.game import Game
from rlft.generation.decoding import _keep_most_likely
from rlft.generation.shared_base import Rows, SharedBaseError, checksum, rows_of
from rlft.generation.stops import StopStrings, plain_decoder, shown_texts
from rlft.generation.vllm import generator as vllm_generator
from rlft.generation.vllm.generator import _start
from rlft.generation.vllm.guest import VLLMError
from rlft.tokens.text import RunTokenizer
from rlft.types import Adapter, FinishReason, Prompt, Sampling, UserError
from tests.environment.test_conversations import LIMITS

MODEL = Path(rlft.__file__).parent / "assets" / "tiny-arithmetic"
HOT = Sampling(max_tokens=24, temperature=1.0)
TOLERANCE = 1e-4
"""Natural log. Both sides compute in float32 with other kernels; seen: 1e-5."""


# -- without an engine -----------------------------------------------------------------------------------------------
def test_whatever_vllm_raises_when_it_starts_names_the_key_and_what_it_said(monkeypatch):
    for error, problem in (
        (ValueError("No available memory for the cache blocks."), "No available memory for the cache blocks, got vllm"),
        (KeyError("layers.0.qk_norm.weight"), "KeyError: 'layers.0.qk_norm.weight' in rlft"),
        (AssertionError(), "AssertionError in rlft"),
        (NotImplementedError(), "NotImplementedError in rlft"),
        (ImportError("Please install timm."), "Please install timm, got vllm"),
        (MemoryError("out of memory here"), "out of memory here, got vllm"),
    ):
        monkeypatch.setattr(vllm_generator, "start", Mock(side_effect=error))
        with pytest.raises(UserError) as refusal:
            _start({"max_model_len": 8}, {"max_num_batched_tokens": 4})
        assert str(refusal.value).startswith(f"generation.engine: vLLM could not start: {problem}"), problem
        assert "leave out generation.vllm.options (max_num_batched_tokens), or choose" in str(refusal.value)
    refused = UserError("generation.vllm.batch_invariant", "is off", remedy="leave it")
    monkeypatch.setattr(vllm_generator, "start", Mock(side_effect=refused))
    with pytest.raises(UserError, match="batch_invariant"):
        _start({"max_model_len": 8}, {})
    named = r"^generation\.vllm\.options\.block_size: is set to 32 on this machine, got 16; "
    with pytest.raises(UserError, match=named):
        _start({"block_size": 32}, {"block_size": 16})


class FakeLLM:
    """What vLLM's `LLM` is asked for, with weights that lie as vLLM's do on a GPU."""

    def __init__(self, model, moves=False):
        self.model, self.moves, self.calls = fused(model, wrapped=False), moves, []
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")),
            add_lora=lambda request: True,
            step=list,
            reset_prefix_cache=lambda: self.calls.append("reset"),
        )

    def get_tokenizer(self): ...

    def apply_model(self, work):
        return [work(self.model)]

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def release_kv_cache_memory(self):
        self.calls.append("release")
        if self.moves:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()

    def wake_up(self, tags=None):
        self.calls.append(f"wake {tags}")

    @property
    def weight(self):
        return dict(self.model.named_parameters())["model.layers.0.self_attn.qkv_proj.weight"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = Qwen2Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16).requires_grad_(False).eval()


@pytest.fixture
def started(model, monkeypatch):
    for name in ("guest_while_starting", "guest"):
        monkeypatch.setattr(vllm_generator, name, lambda *_: nullcontext())
    monkeypatch.setattr(vllm_generator, "runs_on_cpu", lambda: False)
    generators = []

    def start(moves=False, **changes):
        fake, given = FakeLLM(model, moves), {}
        monkeypatch.setattr(vllm_generator, "_start", lambda options, *_: given.update(options) or fake)
        keys = vllm_engine(gpu_memory_utilization=0.5, enforce_eager=False, max_num_seqs=4, sleep=True, **changes)
        generators.append(open_vllm("x", keys, dtype="bfloat16", lora_rank=6, max_sequence_tokens=64))
        return generators[-1], fake, given

    yield start
    for generator in generators:
        generator.close()


def published():
    dice, stem = torch.Generator().manual_seed(0), "base_model.model.model.layers.0.self_attn.k_proj"
    sizes = {"lora_A": (4, 32), "lora_B": (16, 4)}
    weights = {f"{stem}.{name}.weight": torch.randn(size, generator=dice) for name, size in sizes.items()}
    return Adapter(version=3, weights=weights, config={"r": 4, "lora_alpha": 8})


def test_with_a_shared_base_sleep_frees_the_cache_alone_and_weights_stay(started, model):
    generator, fake, options = started()
    assert options["max_lora_rank"] == 8
    generator.sleep()
    generator.wake()
    assert fake.calls == ["sleep 1", "wake None"], "a base of its own"
    generator.adopt(model, torch.device("cpu"))
    assert generator.shared_base.apart == {}
    fake.calls.clear()
    generator.sleep()
    generator.sleep()
    generator.wake()
    assert fake.calls == ["sleep 0", "release", "wake ['kv_cache']"]
    generator.close()
    assert sum(parameter.numel() for parameter in model.parameters()) == 0, "nothing of the engine's is held"


def test_weights_that_move_in_sleep_are_noticed(started, model):
    generator, _, _ = started(moves=True)
    generator.adopt(model, torch.device("cpu"))
    with pytest.raises(SharedBaseError, match="has moved"):
        generator.sleep()


def test_a_copy_needs_no_slot_for_adapters_and_keeps_nothing_of_a_job_that_is_over(started, model):
    generator, fake, options = started(weights="copy")
    assert not {"enable_lora", "max_loras", "max_lora_rank"} & options.keys()
    before, base = checksum(fake.weight), [checksum(p.data) for p in model.parameters()]
    generator.serve(SimpleNamespace(backbone=SimpleNamespace(model=model)))
    generator.load(published())
    assert (generator.version, fake.calls) == (3, ["reset"]), "keys of an older version are dropped"
    written = checksum(fake.weight)
    assert written != before
    assert [checksum(p.data) for p in model.parameters()] == base
    generator.sleep()
    generator._old_blocks = 0  # this stand-in has none
    assert generator.loaded_adapter().faults == ()
    assert fake.calls == ["reset", "sleep 1", "wake None"], "weights are read where they are awake"
    there = weakref.ref(model)
    generator.serve(None)
    del model
    other = AutoModelForCausalLM.from_config(there().config, dtype=torch.bfloat16)
    other.load_state_dict(there().state_dict())
    generator.serve(SimpleNamespace(backbone=SimpleNamespace(model=other)))
    generator.load(replace(published(), weights={}))
    assert checksum(fake.weight) == before, "what no adapter of the next job is on is the base's again"
    assert generator.metrics == {"sampler/rounding": 0}


# -- with the engine -------------------------------------------------------------------------------------------------
def process_state():
    """What the trainer relies on in its process."""
    numbers = numpy.random.get_state()
    return {
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "affinity": os.sched_getaffinity(0),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": (numbers[1].tolist(), numbers[2]),
        "python random": random.getstate(),
        "excepthook": sys.excepthook,
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "children": psutil.Process().children(recursive=True),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "FLASHINFER_", "PYTEST"))},
    }


def new_generator(path=MODEL, **changes):
    keys = vllm_engine(max_num_seqs=64, sleep=True, options={"disable_cascade_attn": True})
    return open_vllm(path, keys, lora_rank=6, **changes)  # the rank is rounded up to 8


class Trainer:
    """The base with one LoRA adapter on all linear layers, or another one, as transformers and PEFT compute it."""

    def __init__(self, path=MODEL, dtype=torch.float32, **changes):
        base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).requires_grad_(False)
        keys = {"r": 6, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
        self.model = get_peft_model(base, LoraConfig(**keys)).eval()

    def adapter(self, version, size=0.1):
        """Sets random weights, different for each version, and publishes them."""
        dice = torch.Generator().manual_seed(version)
        for name, parameter in self.model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=dice) * size
            elif "magnitude" in name:
                parameter.data *= 1 + 0.2 * torch.rand(parameter.shape, generator=dice).to(parameter.dtype)
        return Adapter(version=version, weights=self.weights(), config=self.model.peft_config["default"].to_dict())

    def weights(self):
        return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(self.model).items()}

    def score(self, sequences, *, rounded=False):
        return logprobs_of(self.model, sequences)

    @torch.no_grad()
    def logprobs(self, rows, temperature=1.0):
        """Of every token but the first `[rows, T - 1]`; what is behind a row's end changes nothing in it."""
        tokens = pad_sequence([torch.tensor(list(row)) for row in rows], batch_first=True)
        logprobs = (self.model(tokens).logits[:, :-1] / temperature).log_softmax(-1)
        return logprobs.gather(-1, tokens[:, 1:, None])[..., 0]

    def gap(self, groups, temperature):
        """The largest difference of a sampled token's log-prob between engine and trainer."""
        worst = 0.0
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rows = [[*rollout.prompt.token_ids, *rollout.completion.token_ids] for rollout in rollouts]
        for rollout, row, logprobs in zip(rollouts, rows, self.logprobs(rows, temperature).tolist(), strict=True):
            completion = rollout.completion
            assert len(completion.logprobs) == len(completion.token_ids) > 0
            expected = logprobs[len(rollout.prompt.token_ids) - 1 : len(row) - 1]
            worst = max(worst, *(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)))
        return worst


class Bench:
    """An engine next to a trainer, and the process before its start, after it, and after it has sampled by the base."""

    def __init__(self):
        self.trainer = Trainer()
        # 40 and more tokens: at least one full block of 32 for the prefix cache.
        rows = [tuple(10 + (7 * i + j) % 200 for j in range(40 + i)) for i in range(6)]
        self.prompts = [Prompt(id=f"p{i}", messages=(), answer="", token_ids=row) for i, row in enumerate(rows)]
        resource_tracker.ensure_running()  # which workers of an environment would leave behind
        self.children = set(psutil.Process().children(recursive=True))  # of other tests
        self.states = [process_state()]
        self.generator = new_generator()
        self.states.append(process_state())
        self.base_groups, self.base_scores = self.sample(2), self.generator.score(rows)
        self.states.append(process_state())

    def sample(self, n, sampling=HOT):
        """n completions of each prompt, with the seeds that are the prompt's own."""
        return self.generator.sample(self.prompts, n, seeds(self.prompts, n), sampling)


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    with closing(made.generator):
        yield made


def seeds(prompts, n):
    return [1000 + n * i for i in range(len(prompts))]


def ids(groups):
    return [[rollout.completion.token_ids for rollout in group.rollouts] for group in groups]


def completions(groups):
    return [rollout.completion for group in groups for rollout in group.rollouts]


def check_scores(found, bench):
    for scores, expected in zip(found, bench.trainer.score([p.token_ids for p in bench.prompts]), strict=True):
        assert scores == pytest.approx(expected, abs=TOLERANCE)


def load(bench, version):
    bench.generator.load(bench.trainer.adapter(version))


def test_the_trainers_process_is_as_it_was_before_the_engine(bench):
    assert bench.states == [bench.states[0]] * 3
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1, "it can still be told how many to use"
    torch.set_num_threads(num_threads)
    assert torch.get_num_threads() == num_threads
    # All of its threads, the workers of the pool too, may run on every core.
    of_threads = {frozenset(os.sched_getaffinity(t.id)) for t in psutil.Process().threads()}
    assert of_threads == {frozenset(os.sched_getaffinity(0))}


def test_the_engines_layers_are_those_that_a_shared_base_is_laid_on(bench):
    """By name, and by shape where a CPU has not packed them; no value is compared."""
    assert bench.generator._llm.llm_engine.vllm_config.model_config.disable_cascade_attn, "an option reaches it"
    [engine] = bench.generator._llm.apply_model(lambda model: model)
    base = bench.trainer.model.get_base_model()
    own = {n.replace(".base_layer.", "."): tuple(p.shape) for n, p in base.named_parameters() if "lora_" not in n}
    theirs = {name: tuple(p.shape) for name, p in engine.named_parameters(remove_duplicate=False)}
    assert any(".qkv_proj.base_layer." in name for name in theirs)
    assert not any(p.is_inference() for p in engine.parameters())
    found = rows_of(own, theirs, engine.packed_modules_mapping)
    repacked = {name for name, rows in found.items() if rows == "repacked by the engine"}
    assert all(name.endswith("_proj.weight") for name in repacked)
    assert all(isinstance(found[name], Rows) for name in own.keys() - repacked), found
    # A GPU keeps what a CPU packs: the same names, with the rows that the layers say they hold.
    plain = dict(theirs)
    for name in (name for name, shape in theirs.items() if 0 in shape):
        layer = engine.get_submodule(name.removesuffix(".weight"))
        plain[name] = layer.output_size, layer.input_size
    assert all(isinstance(rows, Rows) for rows in rows_of(own, plain, engine.packed_modules_mapping).values())
    sizes = own["model.layers.0.self_attn.q_proj.weight"][0], own["model.layers.0.self_attn.k_proj.weight"][0]
    v = rows_of(own, plain)["model.layers.3.self_attn.v_proj.bias"]
    assert v == Rows("model.layers.3.self_attn.qkv_proj.base_layer.bias", sum(sizes), sizes[1])


def test_without_an_adapter_it_samples_and_scores_the_base(bench):
    assert {rollout.policy_version for group in bench.base_groups for rollout in group.rollouts} == {None}
    with bench.trainer.model.disable_adapter():
        assert bench.trainer.gap(bench.base_groups, 1.0) < TOLERANCE
        check_scores(bench.base_scores, bench)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_those_of_the_trainer_with_the_same_adapter(bench, temperature):
    load(bench, 1)
    sampling = Sampling(max_tokens=24, temperature=temperature)
    groups = bench.sample(4, sampling)
    assert [group.prompt for group in groups] == bench.prompts
    assert {len(group.rollouts) for group in groups} == {4}
    assert {rollout.policy_version for group in groups for rollout in group.rollouts} == {1}
    assert bench.trainer.gap(groups, temperature) < TOLERANCE


def test_a_new_version_is_in_use_at_once_for_prompts_the_engine_has_seen(bench):
    for version in (1, 2, 1):  # a version number that comes again, with its own weights
        load(bench, version)
        groups = bench.sample(2)
        groups += bench.sample(2)  # from the prefix cache
        check_scores(bench.generator.score([prompt.token_ids for prompt in bench.prompts]), bench)
        assert bench.trainer.gap(groups, 1.0) < TOLERANCE
        bench.trainer.adapter(3 - version)  # the other version would have been noticed
        assert bench.trainer.gap(groups, 1.0) > 0.1


def test_a_completion_depends_on_its_own_seed_and_not_on_the_batch(bench):
    load(bench, 1)
    first, own = bench.sample(4), seeds(bench.prompts, 4)
    assert ids(bench.sample(4)) == ids(first)
    others = bench.generator.sample(bench.prompts, 4, [seed + 10**6 for seed in own], HOT)
    assert all(a != b for a, b in zip(ids(first), ids(others), strict=True))
    # Siblings differ too: four copies of one completion would teach nothing.
    assert all(len(set(map(tuple, group))) > 1 for group in ids(first))
    for p, i in ((0, 0), (0, 3), (5, 0), (5, 3)):  # child i of prompt p has seed seeds[p] + i
        alone = bench.generator.sample([bench.prompts[p]], 1, [own[p] + i], HOT)
        assert ids(alone)[0][0] == ids(first)[p][i]


def test_tokens_are_said_when_they_are_sampled(bench, monkeypatch):
    load(bench, 1)
    silent = bench.sample(2)
    said = []
    with monkeypatch.context() as patch:
        patch.setattr(bench.generator, "token_callback", lambda row, token: said.append((row, token)))
        groups = bench.sample(2)
    assert ids(groups) == ids(silent)
    by_row = [[token for row, token in said if row == own] for own in range(2 * len(groups))]
    assert by_row == [list(own) for group in ids(groups) for own in group]
    assert {row for row, _ in said[:4]} == {0, 1, 2, 3}, "the first tokens of all come before the second of any"


def test_stopped_completions_end_with_the_end_token_and_truncated_ones_do_not(bench):
    load(bench, 9)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    end = tokenizer.eos_token_id
    groups = bench.sample(8, Sampling(max_tokens=40, temperature=1.5))
    assert {c.finish_reason for c in completions(groups)} == {FinishReason.stop, FinishReason.length}
    for completion in completions(groups):
        stopped = completion.finish_reason == FinishReason.stop
        assert (completion.token_ids[-1] == end) == stopped
        assert end not in completion.token_ids[:-1]
        assert stopped or len(completion.token_ids) == 40
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert tokenizer.eos_token not in completion.text


def test_more_prompt_tokens_than_one_forward_takes_are_sampled_with_their_seeds(bench):
    # 42 x 200 = 8,400 prompt tokens against 8,192 a forward: a prompt cut in two makes vLLM fail on CPU generators.
    rows = [tuple(10 + (i * 31 + j * (i + 1)) % 200 for j in range(200)) for i in range(42)]
    prompts = [Prompt(id=f"long{i}", messages=(), answer="", token_ids=row) for i, row in enumerate(rows)]
    groups = bench.generator.sample(prompts, 1, seeds(prompts, 1), Sampling(max_tokens=2, temperature=1.0))
    assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts]


def test_later_turns_of_conversations_are_sampled_behind_what_was_said(bench):
    """Their log-probs are the trainer's over the whole row, and they replay."""
    load(bench, 3)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = ({"role": "user", "content": "2 + 3?"},)
    read = tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, return_dict=False)
    prompts = [Prompt(id=str(i), messages=messages, answer="5", token_ids=tuple(read)) for i in range(2)]
    game = Game(**LIMITS | {"turn_tokens": 6, "max_turns": 2}, factory="conversation_tools.Murmur", arguments={})
    talk = Conversations(bench.generator, game, RunTokenizer(tokenizer), at_once=None, longest_row=200)
    with closing(talk) as conversations:
        first, again = (conversations.sample(prompts, 3, seeds(prompts, 3), HOT) for _ in range(2))
    assert first == again
    spoken = [c for c in completions(first) if len(c.turns) == 2]
    assert spoken, "some ended their first turn within six tokens"
    for completion in spoken:
        [expected] = bench.trainer.logprobs([[*prompts[0].token_ids, *completion.token_ids]])
        rows = zip(completion.logprobs, expected[len(read) - 1 :].tolist(), completion.mask, strict=True)
        assert max(abs(found - wanted) for found, wanted, own in rows if own) < TOLERANCE


def test_at_temperature_0_all_siblings_are_the_most_likely_completion(bench):
    load(bench, 1)
    greedy = Sampling(max_tokens=8, temperature=0.0)
    groups = bench.generator.sample(bench.prompts[:2], 3, [0, 3], greedy)
    for group in groups:
        row = list(group.prompt.token_ids)
        for _ in group.rollouts[0].completion.token_ids:
            with torch.no_grad():
                row.append(int(bench.trainer.model(torch.tensor([row])).logits[0, -1].argmax()))
        assert [rollout.completion for rollout in group.rollouts] == [group.rollouts[0].completion] * 3
        assert list(group.rollouts[0].completion.token_ids) == row[len(group.prompt.token_ids) :]
    assert bench.trainer.gap(groups, 1.0) < TOLERANCE


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperature": 0.005, "max_tokens": 8}, "not at 0.005"),
    ({"temperature": 1.0, "max_tokens": 217}, r"p0: 40 tokens and 217 to come; .* 256 together"),
])  # fmt: skip
def test_requests_the_engine_would_quietly_change_are_refused(bench, changes, message):
    with pytest.raises(ValueError, match=message):
        bench.sample(1, Sampling(**changes))


@pytest.mark.parametrize(
    ("include", "by_token"), [slow(False, False), slow(True, False), slow(False, True), (True, True)]
)
def test_it_stops_at_the_token_and_in_the_text_at_which_the_transformers_engine_stops(bench, include, by_token):
    """Strings or a token out of what was sampled freely; the transformers engine's own watch says where to stop."""
    load(bench, 1)
    free = bench.sample(4)
    said = [c.text for c in completions(free) if "\ufffd" not in c.text[:9]]
    strings = {"stop": (said[0][4:6], said[1][3:8], said[2][6:7])}
    ends = {"stop_token_ids": (completions(free)[-1].token_ids[7],)} if by_token else strings
    sampling = replace(HOT, include_stop_str_in_output=include, **ends)
    assert all(sampling.stop)
    groups = bench.sample(4, sampling)
    tokenizer = bench.generator._tokenizer
    decode, by_string, num_ended = plain_decoder(tokenizer), 0, 0
    for number, (ours, whole) in enumerate(zip(completions(groups), completions(free), strict=True)):
        prompt = bench.prompts[number // 4].token_ids
        watch = StopStrings(sampling.stop or ["never said"], decode, [prompt])
        tokens = enumerate(whole.token_ids, 1)
        end = next((n for n, t in tokens if t in sampling.stop_token_ids or watch.completes(0, t)), None)
        by_string += bool(watch.stopped)
        num_ended += end is not None
        assert ours.token_ids == tuple(whole.token_ids[:end])
        assert ours.logprobs == whole.logprobs[:end]
        assert ours.finish_reason == (whole.finish_reason if end is None else FinishReason.stop)
        assert [ours.text] == shown_texts(tokenizer, [whole.token_ids[:end]], [end is not None], sampling)
    assert by_string >= 3 or by_token
    assert num_ended >= 3
    assert bench.trainer.gap(groups, 1.0) < TOLERANCE


def test_min_p_leaves_out_what_the_transformers_engine_leaves_out(bench):
    load(bench, 1)
    sampling = replace(HOT, min_p=0.3, top_p=0.8, temperature=0.7, max_tokens=8)
    for rollout in (r for g in bench.sample(2, sampling) for r in g.rollouts):
        ids = [*rollout.prompt.token_ids, *rollout.completion.token_ids]
        with torch.no_grad():
            logits = bench.trainer.model(torch.tensor([ids])).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        kept = _keep_most_likely(logits, sampling).log_softmax(-1)
        expected = kept.gather(-1, torch.tensor(rollout.completion.token_ids)[:, None])[:, 0]
        assert list(rollout.completion.logprobs) == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_an_rslora_adapter_is_scaled_as_the_trainer_scales_it(bench):
    adapter = bench.trainer.adapter(3)
    bench.generator.load(replace(adapter, config={**adapter.config, "use_rslora": True}))
    layers = [module for module in bench.trainer.model.modules() if isinstance(module, LoraLayer)]
    groups = bench.sample(2)
    assert bench.trainer.gap(groups, 1.0) > 100 * TOLERANCE
    with pytest.MonkeyPatch.context() as patch:
        for layer in layers:
            patch.setitem(layer.scaling, "default", 12 / math.sqrt(6))  # alpha / sqrt(rank), not 12 / 6
        assert bench.trainer.gap(groups, 1.0) < TOLERANCE


def test_an_adapter_the_engine_cannot_hold_is_refused_and_the_old_one_stays(bench, monkeypatch):
    load(bench, 1)
    adapter = bench.trainer.adapter(1)
    unfit = replace(adapter, version=2, config={**adapter.config, "use_dora": True})
    with pytest.raises(VLLMError, match=r"^vLLM refuses the adapter: .*DoRA"):
        bench.generator.load(unfit)
    with monkeypatch.context() as first:
        first.setattr(bench.generator, "_num_loads", 0)  # then the config is to blame
        with pytest.raises(UserError, match=r"^generation\.engine: vLLM refuses the adapter: .*DoRA"):
            bench.generator.load(unfit)
    groups = bench.sample(1)
    assert groups[0].rollouts[0].policy_version == 1
    assert bench.trainer.gap(groups, 1.0) < TOLERANCE


def test_an_interrupted_call_leaves_nothing_for_the_next_one(bench, monkeypatch):
    load(bench, 1)
    expected = bench.sample(2)
    engine = bench.generator._llm.llm_engine
    steps, step = iter(range(3)), engine.step

    def interrupted():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.generator.sample(bench.prompts[3:], 8, [1, 9, 17], HOT)
    monkeypatch.undo()
    assert ids(bench.sample(2)) == ids(expected)


def test_ctrl_c_waits_for_the_end_of_the_engines_step(bench, monkeypatch):
    load(bench, 1)
    undisturbed = bench.sample(4)
    core = bench.generator._llm.llm_engine.engine_core.engine_core
    update, finished_steps = core.scheduler._update_after_schedule, []

    def press_ctrl_c(*args):
        os.kill(os.getpid(), signal.SIGINT)
        update(*args)
        finished_steps.append(True)

    with monkeypatch.context() as patched:
        patched.setattr(core.scheduler, "_update_after_schedule", press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            bench.sample(4)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "conftest.py's"
    assert finished_steps == [True], "one step, which was not cut in the middle"
    assert bench.sample(4) == undisturbed


def test_closing_ends_the_engine_and_leaves_no_process_and_no_folder(bench):
    load(bench, 1)
    root = bench.generator._files.root
    assert root.exists()
    bench.generator.close()
    bench.generator.close()
    assert [child for child in psutil.Process().children(recursive=True) if child not in bench.children] == []
    assert not root.exists()
    with pytest.raises(ValueError, match="closed"):
        bench.generator.score([[5, 6, 7]])


# -- with another engine -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_base_whose_head_vllm_would_wrap_is_scored_and_sampled_as_by_the_trainer(tmp_path):
    """vLLM wraps the head of a Llama for LoRA unless it is given modules, and the wrapper computes no prompts."""
    folder = model_folders.llama(tmp_path / "llama")
    trainer = Trainer(folder)
    modules = {name.rpartition(".")[2] for name, m in trainer.model.named_modules() if isinstance(m, LoraLayer)}
    prompts = [Prompt(id=str(i), messages=(), answer="", token_ids=tuple(range(10 + i, 50 + 2 * i))) for i in range(3)]
    with closing(new_generator(folder, lora_modules=modules)) as generator:
        for version in (1, 2):
            generator.load(trainer.adapter(version))
            rows = [p.token_ids for p in prompts]
            for scores, expected in zip(generator.score(rows), trainer.score(rows), strict=True):
                assert scores == pytest.approx(expected, abs=TOLERANCE)
            groups = generator.sample(prompts, 2, seeds(prompts, 2), HOT)
            assert trainer.gap(groups, 1.0) < TOLERANCE
            trainer.adapter(3 - version)  # the other version would have been noticed
            assert trainer.gap(groups, 1.0) > 0.1
