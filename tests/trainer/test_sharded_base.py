"""Layers divided among ranks: what is computed with them is what a whole base gives, and every wait has an end."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from in_one_test import each
from met_ranks import together
from slow_cases import slow
from transformers import AutoModelForCausalLM, Qwen3Config

import rlft
from rlft.config.model import KernelChoice
from rlft.loop import parts
from rlft.loop.workers import opened_trainer
from rlft.model.activations import set_checkpointing
from rlft.model.backbone import Backbone, decoder_layers
from rlft.model.kernels import selection
from rlft.system.process.running_time import in_background
from rlft.trainer.ranks import LaneShare, RanksError
from rlft.trainer.sharded_base import ShardedLayers

LANES, LAYERS = 4, 5
CPU = torch.device("cpu")
KEYS = (
    "model.device=cpu", "algorithm=ppo", "algorithm.kl_coef=0.1", "critic.kind=adapter", "snapshot.reference=copy",
    "snapshot.refresh_every=1", "prompts_per_step=4", "group_size=3", "minibatches=2", "generation.max_tokens=9",
    "trainer.lr=0.01", "lora.rank=2", "steps=3", "token_budget=20", f"cluster.lanes={LANES}",
)  # fmt: skip


def random_model(layers=LAYERS):
    """Random layers in float64, the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = Qwen3Config(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.3,
            tie_word_embeddings=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float64)
    return model.eval().requires_grad_(False)


# -- training ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def batches(batches):
    return [replace(batch, sampled_logprobs=batch.sampled_logprobs.double()) for batch in batches[:2]]


@pytest.fixture
def opened(run_config, backbone, monkeypatch):
    """Opens the trainer of a rank as its process does, on the random model with these kernels."""

    @contextmanager
    def open_one(rank, ranks, exchange, kernels, checkpointing, sharded=True):
        def load(*_, adopt, sharded):
            model = random_model()
            if sharded is not None:
                sharded.adopt(model, CPU)
            chosen = selection.install(model, KernelChoice(kernels), own_attention=True)
            set_checkpointing(model, checkpointing)
            return Backbone(model=model, tokenizer=backbone.tokenizer, device=CPU, path="none", kernels=chosen)

        monkeypatch.setattr(parts, "load_for_training", load)
        of_ranks = (f"cluster.ranks={ranks}", f"cluster.shard_base={sharded}", "cluster.engines=1")
        with opened_trainer(run_config(*KEYS, *of_ranks), needs_old=True, rank=rank) as trainer:
            trainer.share = LaneShare(lanes=LANES, rank=rank, ranks=ranks, exchange=exchange)
            yield trainer

    return open_one


def train(trainer, algorithm, batches):
    """Steps as a rank makes them: (the optimizers' numbers of each step, all that has moved)."""
    metrics = []
    for step, batch in enumerate(batches):
        zero_gradient_B = torch.zeros(12, dtype=torch.bool)
        zero_gradient_B[1:] = step == 1  # one lane has a row, the others and their ranks have none
        annotations = summed(trainer.annotations(batch, zero_gradient_B), trainer.share)
        credited = algorithm.credit(replace(batch, **annotations))
        records = trainer.update_lanes(algorithm, credited, zero_gradient_B, step)
        metrics += [dict(record.optimizers) for record in records]
        trainer.roles.refresh(step + 1)
    state = trainer.state()
    kinds = {"adapter": state.adapters, "head": state.heads, "optimizer": {"all": state.optimizer}}
    tensors = {f"{k}/{r}/{n}": t for k, roles in kinds.items() for r, named in roles.items() for n, t in named.items()}
    return metrics, tensors


def summed(values, share):
    """Annotations of all rows, of those that each rank has made of its own; they are 0 in the others."""
    if share.exchange is None:
        return values
    result = {name: torch.zeros_like(value) for name, value in values.items()}
    for rank in range(share.ranks):
        for name in sorted(values):
            sent = values[name].clone()
            share.exchange.broadcast(sent, rank)
            result[name] += sent
    return result


@pytest.mark.parametrize(
    ("ranks", "kernels", "checkpointing"),
    [(1, "auto", True), slow(2, "auto", True), slow(2, "plain", False), slow(4, "plain", True)],
)
def test_a_divided_base_trains_as_a_whole_one(ranks, kernels, checkpointing, opened, met, batches):
    """The same products of the same numbers: float64, so 1e-12 is a few thousand roundings of the largest, about 1."""
    algorithm = rlft.load_algorithm("ppo")
    with opened(0, 1, None, kernels, checkpointing, sharded=False) as whole:
        begun = whole.state().adapters["policy"]
        expected, tensors = train(whole, algorithm, batches)
    assert not all(torch.equal(t, tensors[f"adapter/policy/{n}"]) for n, t in begun.items()), "it has learned"
    exchanges = met(ranks) if ranks > 1 else [None]
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(opened(rank, ranks, exchange, kernels, checkpointing))
            for rank, exchange in enumerate(exchanges)
        ]
        found = together([lambda t=t: train(t, algorithm, batches) for t in trainers])
    for metrics, trained in found:
        assert metrics == [pytest.approx(numbers, rel=0, abs=1e-12) for numbers in expected]
        gaps = {name: float((trained[name] - t).abs().max()) for name, t in tensors.items()}
        assert max(gaps.values()) <= 1e-12, max(gaps, key=lambda name: gaps[name])


# -- where weights are -------------------------------------------------------------------------------------------------
def adopted(rank, ranks):
    model, sharded = random_model(), ShardedLayers(rank, ranks)
    sharded.adopt(model, CPU)
    return sharded, model


def layer_bytes(model):
    """Of all memory that the matrices of the layers lie in."""
    weights = [p for layer in decoder_layers(model) for p in layer.parameters() if p.dim() > 1]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in weights}
    return sum(storages.values())


def test_a_rank_has_its_own_layers_and_two_buffers():
    """Of five layers two ranks hold three and two; float64. A layer has 2 * 16 * 16 weights in queries and outputs,
    2 * 16 * 8 in keys and values and 3 * 16 * 24 in its MLP, each a multiple of 256 bytes."""
    layer = 8 * (2 * 256 + 2 * 128 + 3 * 384)
    assert layer_bytes(random_model()) == 5 * layer
    assert [layer_bytes(adopted(rank, 2)[1]) for rank in range(2)] == [(3 + 2) * layer, (2 + 2) * layer]
    assert layer_bytes(adopted(0, 1)[1]) == 2 * layer


def test_a_single_layer_of_another_rank_has_the_only_buffer():
    """Another tensor of a pass may get the address of a second one, which no layer would keep alive."""
    base = ShardedLayers(0, 2)
    base.adopt(random_model(layers=2), torch.device("cpu"))
    assert len(base._buffer_at) == len(base._layer_at) == 1


def test_what_is_not_a_layers_matrix_is_whole_on_every_rank():
    whole = dict(random_model().named_parameters())
    for name, parameter in adopted(1, 2)[1].named_parameters():
        assert parameter.shape == whole[name].shape
        if parameter.dim() == 1 or ".layers." not in name:
            assert torch.equal(parameter, whole[name]), name


def test_ranks_may_need_layers_in_any_order_and_number(met):
    """Three ranks: all layers, some of them twice, and none. In the first round rank 0 gets layers 1 and 4, which have
    one buffer there, and needs the former."""
    expected = [[p.clone() for p in layer.parameters()] for layer in decoder_layers(random_model())]
    orders = [[1, 2, 3, 0, 4], [4, 1, 0, 1], []]
    bases = [adopted(rank, 3) for rank in range(3)]
    for sharded, _ in bases:
        sharded.drop_copies()

    def walk(sharded, model, exchange, order):
        with sharded.passes(exchange), torch.no_grad():
            for index in order:
                layer = decoder_layers(model)[index]
                layer.mlp(torch.ones(1, 16, dtype=torch.float64))
                assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), expected[index], strict=True))
        return len(order)

    walks = [
        lambda base=base, exchange=exchange, order=order: walk(*base, exchange, order)
        for base, exchange, order in zip(bases, met(3), orders, strict=True)
    ]
    assert together(walks) == [5, 4, 0]


@each(("ranks", "checkpointing"), [(1, False), (1, True), (2, False), (2, True), (3, True), (4, True)])
def test_the_next_layer_begins_to_arrive_before_this_one_is_computed_and_is_awaited_after_it(ranks, checkpointing, met):
    """Two forwards with their backwards and two without, in the order of events on each rank; the numbers are those of
    a whole base bit for bit. Only the first layer is waited for at once, and again where a forward follows a
    forward."""
    x = torch.ones(1, 3, 16, dtype=torch.float64)

    def work(model):
        found = []
        for scale in (1.0, 2.0):
            inputs = (scale * x).requires_grad_()
            out = model(inputs_embeds=inputs, use_cache=False).logits
            out.sum().backward()
            found += [out.detach(), inputs.grad]
        with torch.no_grad():
            found += [model(inputs_embeds=scale * x).logits for scale in (3.0, 4.0)]
        return found

    expected = work(random_model())
    exchanges, bases = met(ranks) if ranks > 1 else [None], [adopted(rank, ranks) for rank in range(ranks)]

    def of_rank(rank):
        sharded, model = bases[rank]
        events = recorded(sharded, model)
        if checkpointing:
            model.train()
            set_checkpointing(model, True)
        with sharded.passes(exchanges[rank]):
            return events, work(model)

    results = together([lambda rank=rank: of_rank(rank) for rank in range(ranks)])
    for rank, (events, found) in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), rank
        ends = [at for at, (kind, _) in enumerate(events) if kind == "end"]
        late = [events[at] for at in ends if not is_ahead(events, at)]
        assert len(ends) > 2 * LAYERS, "two passes up and down, and two up"
        assert late == [("end", 0)] * 2, (rank, events)


def recorded(sharded, model):
    """What happens from now on: a layer begins to arrive, is awaited ("end"), is computed forward or backward."""
    events = []
    send, copy, finish = sharded._send, sharded._copy, sharded._finish

    def sent(exchange, index, **settings):
        events.append(("begin", index))
        send(exchange, index, **settings)

    def copied(index):
        events.append(("begin", index))
        copy(index)

    def finished():
        if sharded._arriving is not None:
            events.append(("end", last_begun(events)))
        finish()

    for name, recorder in (("_send", sent), ("_copy", copied), ("_finish", finished)):
        setattr(sharded, name, recorder)
    for index, layer in enumerate(decoder_layers(model)):
        layer.register_forward_hook(lambda *_, index=index: events.append(("computed", index)))
        layer.input_layernorm.register_full_backward_hook(lambda *_, index=index: events.append(("computed", index)))
    return events


def last_begun(events):
    return next(layer for kind, layer in reversed(events) if kind == "begin")


def is_ahead(events, end):
    """Whether something was computed between the beginning and this end of a layer's arrival."""
    begin = max(at for at in range(end) if events[at] == ("begin", events[end][1]))
    return any(kind == "computed" for kind, _ in events[begin:end])


def test_alone_a_rank_has_the_layers_of_others_from_main_memory():
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = random_model()(ids).logits
        for _, model in (adopted(0, 2), adopted(0, 1)):
            assert torch.equal(model(ids).logits, expected)
        sharded, model = adopted(1, 2)
        assert torch.equal(model(ids).logits, expected)
        sharded.drop_copies()
        with pytest.raises(AssertionError, match="without the layers in main memory makes no passes alone"):
            model(ids)


@pytest.mark.usefixtures("soon_closed")
def test_a_rank_that_stays_away_is_waited_for_until_the_limit(met):
    """In a forward, in a backward, and at the end of a rank's own passes; and then passes can be made anew."""
    sharded, model = adopted(0, 2)
    exchange = met(2, timeout=0.5)[0]
    late = r"^rank 0 waited 0\.5 s \(cluster\.timeout\) to hear from all other ranks$"
    with pytest.raises(RanksError, match=late), sharded.passes(exchange):
        model(torch.arange(1, 9)[None])
    with pytest.raises(RanksError, match=late), sharded.passes(exchange):
        pass
    assert model(torch.arange(1, 9)[None]).logits.isfinite().all()


@pytest.mark.usefixtures("soon_closed")
def test_a_rank_that_leaves_in_a_backward_is_missed_there(met):
    (sharded, model), (other, other_model) = (adopted(rank, 2) for rank in range(2))
    first, second = met(2, timeout=0.5)
    x = torch.ones(1, 3, 16, dtype=torch.float64, requires_grad=True)

    def forward(model):
        return model(inputs_embeds=x).logits.sum()

    def leaves():
        with other.passes(second):
            forward(other_model)
            raise ZeroDivisionError

    gone = in_background(leaves)

    def goes_on():
        with sharded.passes(first):
            loss = forward(model)
            with pytest.raises(ZeroDivisionError):
                gone.result(120)
            loss.backward()

    with pytest.raises(RanksError, match=r"^rank 0 waited 0\.5 s \(cluster\.timeout\) to hear from all"):
        goes_on()
    assert x.grad is None
