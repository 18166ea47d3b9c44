"""Mixtures of experts: what is adapted in each family, the arithmetic of adapters, and which experts tokens go to."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from given_drafts import GivenDrafts, anything
from in_one_test import each
from mixtures import FAMILIES, LATENT, ROUTED
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from slow_cases import slow, slow_but

from rlft.batch import collate, score_sequences, unknown_expert
from rlft.config.model import KernelChoice, LoraSettings, RoutingSource
from rlft.generation.transformers import TransformersGenerator, Weights
from rlft.model.activations import set_checkpointing
from rlft.model.adapter_folder import adapted_modules, layers_of, switches_of
from rlft.model.experts import LoraExperts, Routing, grouped, has_grouped_mm, install_adapters, mixture_of
from rlft.model.lora_config import as_configured, lora_config
from rlft.model.roles import POLICY, REFERENCE, SAMPLER
from rlft.plan.model_rules import fresh_shapes
from rlft.types import Prompt, Sampling, Scores

LORA = LoraSettings(rank=4, alpha=4.0, dropout=0.0, target_modules="all-linear", path=None)
ONCE = {"mixtral": True, "deepseek_v3": False, "gpt_oss": True, "jamba": True}
"""{type: whether its routers are adapted, too} of those that are tried in full: others differ in nothing but names."""
SEQUENCES = [[5, 9, 11, 30, 7, 8, 20, 21], [7, 8, 9, 12, 40, 41, 13, 50]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", [ONCE, slow(FAMILIES.keys() - ONCE)], ids=["four", "all others"])
def test_experts_and_routers_are_adapted_if_asked_for_and_other_layers_always(kinds, random_moe):
    for kind in kinds:
        keys, others, routers = FAMILIES[kind]
        for experts, router in product((False, True), repeat=2):
            if experts != router and kind not in ONCE:
                continue
            model = random_moe(kind, keys, "meta")
            config = lora_config(replace(LORA, experts=experts, router=router), model)
            modules = adapted_modules(fresh_shapes(model, config))
            kinds = {name.rpartition(".")[2] for name in modules if ".self_attn." not in name}
            assert any(".self_attn." in name for name in modules), kind
            assert kinds == others | ({"experts"} if experts else set()) | (routers if router else set()), kind


@pytest.fixture
def roles_on(make_roles, on_base, random_moe):
    """Builds roles on a random model of a type in FAMILIES."""
    return lambda kind, **keys: make_roles(backbone=on_base(random_moe(kind, FAMILIES[kind][0])), **keys)


def scores(model):
    with torch.no_grad():
        return torch.tensor(score_sequences(model, SEQUENCES, torch.device("cpu")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but("gpt_oss", ONCE))
def test_an_adapter_is_the_same_function_as_the_policy_the_reference_the_sampler_and_in_peft(
    kind, roles_on, random_moe, written
):
    router = ONCE[kind]
    switches = {"experts": True, "router": router}
    roles = roles_on(kind, noise=0.1, **switches)
    expected, published = scores(roles.model), roles.publish(1)
    assert {name: switches_of(published.config)[name] for name in switches} == switches
    roles.load_sampler(published, weights="merged")
    with torch.no_grad(), roles.using(SAMPLER):
        torch.testing.assert_close(scores(roles.model), expected, rtol=0, atol=1e-5)
    with torch.no_grad(), roles.using(None):
        assert (scores(roles.model) - expected).abs().max() > 0.05, kind
    folder = str(written(published))
    again = roles_on(kind, path=folder, reference="copy", **switches)
    torch.testing.assert_close(scores(again.model), expected, rtol=0, atol=1e-5)
    assert again.publish(1).config == published.config
    # as `rlft sample adapter=` reads it, from its adapter_config.json alone
    alone = replace(LORA, target_modules=layers_of(published.config), **switches_of(published.config))
    empty = random_moe(kind, FAMILIES[kind][0], "meta")
    assert fresh_shapes(empty, lora_config(alone, empty)).keys() == published.weights.keys(), kind
    weights = again.weights(REFERENCE)
    assert all(torch.equal(tensor, published.weights[name]) for name, tensor in weights.items())
    for plain in (False, True):  # a policy without experts, or with the same
        frozen = roles_on(kind, reference=folder, **({} if plain else switches))
        with torch.no_grad(), frozen.using(REFERENCE):
            torch.testing.assert_close(scores(frozen.model), expected, rtol=0, atol=1e-5)
        assert any(isinstance(module, LoraExperts) for module in frozen.model.modules())
    theirs = PeftModel.from_pretrained(random_moe(kind, FAMILIES[kind][0]), folder).eval()
    torch.testing.assert_close(scores(theirs), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores(theirs.merge_and_unload()), expected, rtol=0, atol=1e-4)


def chosen_in(roles, layer):
    """The experts `[N, 2]` that each later pass chooses for its tokens in this layer."""
    chosen = []
    module = roles.model.get_base_model().get_submodule(f"model.layers.{layer}.mlp.experts")
    module.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1].clone()))
    return chosen


def test_every_parameter_of_experts_gets_a_gradient_though_some_get_no_token(roles_on, make_batch):
    batch = make_batch([(0, [5], [12])])  # the second token predicts nothing
    for kind in ("mixtral", "gpt_oss"):
        roles = roles_on(kind, noise=0.1, experts=True, router=True)
        chosen = chosen_in(roles, 0)
        with roles.training():
            roles.outputs(batch, False).logprobs.sum().backward()
        roles.check_gradients()
        gradient = dict(roles.named_parameters())[
            f"base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.{POLICY}.weight"
        ].grad
        per_expert = gradient.view(4, -1).abs().sum(1)
        assert (per_expert > 0).tolist() == [expert in chosen[0][0] for expert in range(4)], kind


def test_the_load_of_the_busiest_expert_is_that_of_passes_with_gradient(roles_on, make_batch):
    batch = make_batch([(0, [5, 9], [12, 13, 14])])
    for kind, experts in (("mixtral", True), ("gpt_oss", False)):
        roles = roles_on(kind, experts=experts)
        with torch.no_grad():
            roles.outputs(batch, False)
        assert roles.routing.metrics() == {}
        layers = [chosen_in(roles, layer) for layer in range(2)]
        roles.outputs(batch, False)
        loads = [4 * int(torch.bincount(chosen.flatten()).max()) / chosen.numel() for [chosen] in layers]
        assert roles.routing.metrics() == {"router/load_max": pytest.approx(max(loads))}
        assert roles.routing.metrics() == {}


@pytest.mark.filterwarnings("ignore")
def test_peft_reads_dense_layers_that_it_takes_for_those_of_experts_elsewhere(roles_on, random_moe, written):
    for kind, by_weight in (("qwen3_moe", True), ("deepseek_v3", True), ("qwen2_moe", False)):
        roles = roles_on(kind, noise=0.1, dropout=0.1)
        expected, published = scores(roles.model), roles.publish(1)
        assert bool(published.config["target_parameters"]) == by_weight, kind
        folder = str(written(published))
        theirs = PeftModel.from_pretrained(random_moe(kind, FAMILIES[kind][0]), folder).eval()
        torch.testing.assert_close(scores(theirs), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(scores(roles_on(kind, path=folder).model), expected, rtol=0, atol=1e-5)


# -- adapters on stacked experts ---------------------------------------------------------------------------------------
KINDS = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # transposed, with biases, gate and up interleaved
    "nemotron_h": {  # without gates
        "layers_block_type": ["attention", "moe"], "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


def loop_over_experts(experts, x, chosen, weights, matrices):
    """Token by token, expert by expert: the definition."""

    def linear(row, name, expert):
        matrix = matrices[name][expert]
        y = row @ matrix if experts.is_transposed else matrix @ row
        return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y

    rows = []
    for token, row in enumerate(x):
        total = torch.zeros_like(row)
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            inner = linear(row, "gate_up_proj" if experts.has_gate else "up_proj", expert)
            inner = experts._apply_gate(inner[None])[0] if experts.has_gate else experts.act_fn(inner)
            total = total + weight * linear(inner, "down_proj", expert)
        rows.append(total)
    return torch.stack(rows)


def adapted(model, rank):
    mixture = mixture_of(model)
    config = LoraConfig(
        r=rank, lora_alpha=3, target_parameters=mixture.parameters(experts=True, router=False), target_modules=[],
        init_lora_weights=False,
    )  # fmt: skip
    install_adapters(config, model)
    with torch.random.fork_rng(devices=[]), as_configured():
        torch.manual_seed(2)
        return get_peft_model(model, config)


@each(
    "kind, rank, dtype, tolerance",
    [(k, r, torch.float64, 1e-10) for k in KINDS for r in (1, 4)]
    + [(k, r, torch.float32, 1e-5) for k in KINDS for r in (3, 4)],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(kind, rank, dtype, tolerance, random_moe):
    model = random_moe(kind, KINDS[kind]).to(dtype)
    wrapped = adapted(model, rank).to(dtype)
    layer = next(m for m in wrapped.modules() if isinstance(m, LoraExperts))
    experts = layer.get_base_layer()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, 32, generator=generator, dtype=dtype, requires_grad=True)
    chosen = torch.stack([torch.randperm(experts.num_experts - 1, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator, dtype=dtype, requires_grad=True)  # the last expert gets no token
    inputs = [x, weights, *(p for p in layer.parameters() if p.requires_grad)]
    assert len(inputs) == 6

    found = layer(x, chosen, weights)
    base, matrices, wrapper = {}, {}, layer
    while isinstance(wrapper, ParamWrapper):
        base[wrapper.parameter_name] = wrapper.get_param()
        matrices[wrapper.parameter_name] = wrapper.get_param() + wrapper.get_delta_weight("default")
        wrapper = wrapper.base_layer
    with torch.no_grad(), wrapped.disable_adapter():
        off, alone = layer(x, chosen, weights), loop_over_experts(experts, x, chosen, weights, base)
    torch.testing.assert_close(off, alone, rtol=0, atol=tolerance * max(1, float(alone.abs().max())))
    expected = loop_over_experts(experts, x, chosen, weights, matrices)
    out_grad = torch.randn(found.shape, generator=generator, dtype=dtype)
    pairs = zip(
        (found, *torch.autograd.grad(found, inputs, out_grad)),
        (expected, *torch.autograd.grad(expected, inputs, out_grad)),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1, float(theirs.detach().abs().max())))


def test_grouped_products_are_those_of_a_loop_whatever_torch_takes(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows, ends = torch.randn(9, 8, generator=generator), torch.tensor([2, 2, 9], dtype=torch.int32)
    matrices = torch.randn(3, 8, 12, generator=generator)
    assert has_grouped_mm(rows, matrices)
    expected = torch.cat([rows[:2] @ matrices[0], rows[2:] @ matrices[2]])
    torch.testing.assert_close(grouped(rows, matrices, ends), expected)
    monkeypatch.setattr("rlft.model.experts.GROUPED", ())
    torch.testing.assert_close(grouped(rows, matrices, ends), expected)


# -- which experts tokens go to ----------------------------------------------------------------------------------------
ROWS = [(0, [5, 9, 11], [12, 13, 14, 30]), (0, [5, 9, 11], [7, 8]), (1, [20, 21], [40, 41, 42])]
"""Two groups, whose first prompt has two completions."""


def softmax_first(logits, chosen, block):
    weights = softmax_alone(logits, chosen, block)
    return weights / weights.sum(-1, keepdim=True) if getattr(block.gate, "norm_topk_prob", True) else weights


def softmax_last(logits, chosen, block):
    return logits.gather(-1, chosen).softmax(-1)


def softmax_alone(logits, chosen, block):
    return logits.softmax(-1).gather(-1, chosen)


def sigmoid(logits, chosen, block):
    weights = logits.sigmoid().gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) * getattr(block.gate, "routed_scaling_factor", 1.0)


WEIGHTS = {
    "mixtral": softmax_first, "qwen2_moe": softmax_first, "qwen3_moe": softmax_first, "olmoe": softmax_first,
    "hunyuan_v1_moe": softmax_first, "gpt_oss": softmax_last, "granitemoe": softmax_last, "jamba": softmax_alone,
    "deepseek_v3": sigmoid, "glm4_moe": sigmoid, "minimax_m2": sigmoid,
}  # fmt: skip
"""{type: the weights `[N, k]` of chosen experts by its router's logits `[N, experts]`, written once more}."""


BOUND = 2e-6
"""Nats, between models in float64, whose norms and routers transformers computes in float32 (largest seen: 8e-7)."""


@pytest.fixture
def mixture(make_roles, on_base, random_moe):
    """Builds roles that replay, on a random model of a type in FAMILIES; and the keys with which it was made."""

    def build(kind, dtype=torch.float64, plain=False, **keys):
        model = random_moe(kind, FAMILIES[kind][0]).to(dtype)
        model.set_experts_implementation("eager" if dtype is torch.float64 else "grouped_mm")
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        own = on_base(model, KernelChoice.plain if plain else KernelChoice.auto)
        return make_roles(backbone=own, **{"routing": RoutingSource.engine, **keys})

    return build


def imposed(roles, batch):
    """The batch with experts drawn at random: two different ones in each layer; unknown at each row's last token."""
    shape = (*batch.token_ids.shape, len(roles.routing.layers))
    generator = torch.Generator().manual_seed(3)
    experts = torch.rand((*shape, 4), generator=generator).argsort(-1)[..., :2].to(torch.uint8)
    experts[1, :3] = experts[0, :3]  # siblings read the same prompt
    for b, length in enumerate(batch.attention_mask.sum(1).tolist()):
        experts[b, length - 1 :] = unknown_expert(experts.dtype)
    return replace(batch, experts=experts)


def forced_logprobs(kind, model, ids, experts_TLK):
    """Log-probs of all tokens but the first by transformers' own modules, one row alone: before each module of experts
    its choice and weights are replaced by the imposed ones."""
    blocks = [model.get_submodule(n.rpartition(".")[0]) for n, m in model.named_modules() if n.endswith(".experts")]
    logits, hooks = {}, []

    def scored(layer, router, inputs):
        weight = router.weight if hasattr(router, "weight") else router.wg.weight
        logits[layer] = F.linear(inputs[0].reshape(-1, weight.shape[1]).to(weight.dtype), weight)
        logits[layer] = logits[layer] + (0 if getattr(router, "bias", None) is None else router.bias)

    def chosen(layer, block, inputs):
        known = experts_TLK[:-1, layer].long()
        given = torch.cat([known, inputs[1][-1:]])
        return inputs[0], given, WEIGHTS[kind](logits[layer], given, block).to(inputs[2].dtype)

    for layer, block in enumerate(blocks):
        router = block.gate if hasattr(block, "gate") else block.router
        hooks.append(router.register_forward_pre_hook(lambda r, i, layer=layer: scored(layer, r, i)))
        hooks.append(
            block.experts.register_forward_pre_hook(lambda _, i, layer=layer, block=block: chosen(layer, block, i))
        )
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return found[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", [ONCE, slow(WEIGHTS.keys() - ONCE)], ids=["four", "all others"])
def test_a_replay_gives_the_log_probs_of_transformers_with_forced_experts_in_every_form_of_router(
    kinds, mixture, random_moe, make_batch
):
    batch = make_batch(ROWS)
    for kind in kinds:
        roles = mixture(kind)
        rows = imposed(roles, batch)
        with torch.no_grad(), roles.using(None):
            [micro] = roles.forward.placed([rows])
            with roles.replaying(micro.batch, micro.layout):
                found = roles.forward(micro.batch, 1.0, layout=micro.layout).logprobs
            free = roles.forward(micro.batch, 1.0, layout=micro.layout).logprobs
        own = {name.replace(".base_layer", ""): p for name, p in roles.backbone.model.named_parameters()}
        plain = random_moe(kind, FAMILIES[kind][0]).double()
        plain.set_experts_implementation("eager")
        plain.load_state_dict({name: own[name] for name in plain.state_dict() if name in own}, strict=False)
        for b, (_, prompt, completion) in enumerate(ROWS):
            ids = [*prompt, *completion]
            expected = forced_logprobs(kind, plain, ids, rows.experts[b, : len(ids)])[len(prompt) - 1 :]
            there = found[b, len(prompt) : len(ids)]
            gap = float((there - expected).abs().max())
            assert gap < BOUND, (kind, b, gap)
        assert (found - free).abs().max() > 1e-3, kind


def test_experts_outside_the_best_groups_keep_their_own_weights(random_moe):
    """A router that takes the best of two groups and sets the scores of the other to 0 (DeepSeek-V2)."""
    groups = {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
    model = random_moe("deepseek_v2", ROUTED | LATENT | groups)
    routing = Routing(model, mixture_of(model))
    router, ids = model.model.layers[1].mlp.gate, torch.tensor([[5, 9, 11, 12]])
    seen = []
    router.register_forward_hook(lambda _, inputs, outputs: seen.append((inputs[0].view(4, -1), outputs[1:])))
    given = torch.tensor([[0, 1], [2, 3], [3, 2], [1, 0]])
    with torch.no_grad(), routing.imposing(given[:, None].to(torch.uint8), torch.ones(4, dtype=torch.bool)):
        model(input_ids=ids)
    [(x, (weights, experts))] = seen
    scores = (x @ router.weight.T).softmax(-1) * router.routed_scaling_factor
    assert torch.equal(experts, given)
    torch.testing.assert_close(weights, scores.gather(-1, given), rtol=0, atol=1e-6)
    routing.close()


@pytest.mark.filterwarnings("ignore")
def test_what_the_engine_notes_is_what_the_trainer_chooses_for_the_same_tokens(mixture, backbone):
    rows = (5, 9, 11, 12), (7, 8)
    prompts = [Prompt(id=str(i), messages=(), answer="", token_ids=ids) for i, ids in enumerate(rows)]
    for plain in (False, True):
        roles = mixture("mixtral", torch.float32, plain=plain, noise=0.1)
        assert roles.forward.packed != plain
        how = {"weights": Weights.apart, "ends": range(0, 60, 3)}
        engine = TransformersGenerator(roles, backbone.tokenizer, torch.device("cpu"), 8, **how)
        engine.load(roles.publish(1))
        sampling = Sampling(max_tokens=6, temperature=1.0, notes_experts=True)
        groups = engine.sample(prompts, 3, [1, 4], sampling)
        drafts = GivenDrafts(anything(60))
        batch, drafted = (
            collate(each, Scores(total=torch.zeros(2, 3), by_reward={}), backbone.decode)
            for each in (groups, engine.sample(prompts, 3, [1, 4], replace(sampling, drafts=drafts)))
        )
        assert torch.equal(batch.experts, drafted.experts)
        assert bool(drafts.counts["offered"]) != plain, "transformers' own cache takes no tokens back"
        assert len({len(r.completion.token_ids) for group in groups for r in group.rollouts}) > 1
        own = experts_noted(roles, batch)
        last_B = batch.attention_mask.sum(1) - 1
        own[torch.arange(len(own)), last_B] = unknown_expert(own.dtype)
        assert torch.equal(batch.experts, own), plain
        [group, _] = engine.sample(prompts, 1, [1, 4], replace(sampling, notes_experts=False))
        assert group.rollouts[0].completion.experts is None


def experts_noted(roles, batch):
    """The experts that the trainer chooses for the tokens of each row."""
    [micro] = roles.forward.placed([batch])
    with torch.no_grad(), roles.routing.noting() as noted:
        roles.forward(micro.batch, 1.0, layout=micro.layout)
        return roles.forward.experts_by_row(noted(), micro.batch, micro.layout)


def gradients(roles, micro):
    for _, parameter in roles.named_parameters():
        parameter.grad = None
    with roles.training(dropout=False), roles.replaying(micro.batch, micro.layout):
        roles.outputs(micro.batch, False, micro.layout).logprobs.sum().backward()
    return [parameter.grad.clone() for _, parameter in roles.named_parameters()]


def test_layers_that_are_recomputed_replay_the_same_experts(mixture, make_batch):
    for plain in (False, True):  # packed and padded rows
        roles = mixture("qwen3_moe", torch.float32, plain=plain, noise=0.1, experts=True, router=True)
        [micro] = roles.forward.placed([imposed(roles, make_batch(ROWS))])
        expected = gradients(roles, micro)
        set_checkpointing(roles.backbone.model, True)
        assert all(map(torch.equal, gradients(roles, micro), expected))
        [free] = roles.forward.placed([make_batch(ROWS)])
        assert not all(map(torch.allclose, gradients(roles, free), expected))
        set_checkpointing(roles.backbone.model, False)


def test_choices_that_a_replay_replaces_are_counted(mixture, make_batch):
    batch = make_batch(ROWS)
    roles = mixture("mixtral", torch.float32, noise=0.1)
    experts = experts_noted(roles, batch)
    # Layer 1 is the last, so that nothing else changes: one of 2 x 2 experts of one of 9 sampled tokens.
    for token, counted in ((4, 1), (1, 0)):  # one of a completion, and one of its prompt
        others, present = experts.clone(), experts[0, token, 1].tolist()
        others[0, token, 1, 0] = next(expert for expert in range(4) if expert not in present)
        [micro] = roles.forward.placed([replace(batch, experts=others)])
        with roles.replaying(micro.batch, micro.layout):
            roles.outputs(micro.batch, False, micro.layout)
            metrics = roles.routing.metrics(9)
        assert float(metrics["router/replaced"]) == pytest.approx(counted / (2 * 2 * 9))
        assert float(metrics["router/replaced_tokens"]) == pytest.approx(counted / 9)
    assert "router/replaced" not in roles.routing.metrics(9)


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "padded"])
def test_without_a_replay_what_updates_change_is_counted_against_the_pass_for_old_log_probs(mixture, make_batch, plain):
    roles, batch, nobody = mixture("mixtral", torch.float32, plain=plain, noise=0.1), make_batch(ROWS), torch.zeros(3)
    roles.snapshot = replace(roles.snapshot, routing=RoutingSource.free)
    passes = []
    roles.backbone.model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    old = roles.annotate(batch, nobody.bool(), needs_old=True)
    assert len(passes) <= 1, "the choices are those of the pass for the log-probs"
    assert roles.annotate(batch, nobody.bool(), needs_old=False).experts is None
    for noise in (0.0, 0.5):
        for _, parameter in roles.named_parameters():
            parameter.data += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        [micro] = roles.forward.placed([old])
        with roles.routing.noting() as noted, roles.replaying(micro.batch, micro.layout):
            free = roles.outputs(micro.batch, False, micro.layout).logprobs
            metrics = roles.routing.metrics(9)
            present = roles.forward.experts_by_row(noted(), micro.batch, micro.layout)
        assert torch.equal(free.detach(), roles.logprobs(batch, POLICY)), "nothing is imposed"
        pairs = zip(old.experts[batch.loss_mask].tolist(), present[batch.loss_mask].tolist(), strict=True)
        lost = [sum(len({*before} - {*now}) for before, now in zip(*layers, strict=True)) for layers in pairs]
        assert any(lost) == (noise > 0)
        assert float(metrics["router/replaced"]) == pytest.approx(sum(lost) / (9 * 2 * 2))
        assert float(metrics["router/replaced_tokens"]) == pytest.approx(sum(map(bool, lost)) / 9)
    assert "router/replaced" not in roles.routing.metrics(9)


def test_the_old_policys_choice_is_replayed_after_the_policy_has_moved(mixture, make_batch):
    for plain in (False, True):
        roles = mixture("mixtral", torch.float32, plain=plain, routing=RoutingSource.old, noise=0.1)
        batch, first = make_batch(ROWS), torch.tensor([False, False, True])
        old = roles.annotate(batch, first, needs_old=True)
        assert (old.experts[2] == unknown_expert(old.experts.dtype)).all()  # a row that is never forwarded
        assert torch.equal(old.experts[0, :3], old.experts[1, :3])
        for _, parameter in roles.named_parameters():
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            [micro] = roles.forward.placed([old.select(torch.tensor([0, 1]))])
            with roles.routing.noting() as noted, roles.replaying(micro.batch, micro.layout):
                roles.forward(micro.batch, 1.0, layout=micro.layout)
                replayed = roles.forward.experts_by_row(noted(), micro.batch, micro.layout)
                assert float(roles.routing.metrics(1)["router/replaced"]) > 0
        assert torch.equal(replayed, micro.batch.experts), plain
        again = replace(old, old_logprobs=None)
        free = roles.annotate(again, first, needs_old=True).old_logprobs
        assert not torch.allclose(roles.logprobs(old, POLICY)[:2], free[:2], atol=1e-3)
