"""Plans of runs that learn from files: rows of known lengths, and what a whole model takes."""

from in_one_test import each
from plans import bytes_by_part, bytes_of, counted, planned

from rlft.model.backbone import load_backbone
from rlft.plan.duration import SHORT, duration_of

WHOLE = ("+recipe=sft_arithmetic", "lora=null", "eval.every=0")


@each(("command", "rows", "samples"), [("sft", 1, True), ("dpo", 2, False), ("rm", 2, False)])
def test_supervised_runs_learn_rows_of_known_lengths(command, rows, samples):
    plan = planned(f"+recipe={command}_arithmetic", "model.device=cpu", command=command)
    work = plan.step_work()
    assert (work.trained.prompts, work.trained.group) == (32, rows)
    assert (work.read is not None, work.sampled is not None, work.is_sampled) == (True, samples, False)
    assert work.shorter(SHORT).trained == work.trained
    assert 10 < work.trained.prompt + work.trained.completion < 100
    estimated = duration_of(plan, *counted(plan), plan.schedule, absent=False)
    assert set(estimated.stages) == {"update", "evaluate", "checkpoint"}
    assert (estimated.completion_tokens is not None) == samples


def test_of_a_whole_model_muon_keeps_one_average_of_matrices_and_adamw_two_of_embeddings_and_norms():
    plans = [planned(*WHOLE, *more, command="sft") for more in ([], ["trainer.optimizer=muon"])]
    (model, adamw), (_, muon) = map(counted, plans)
    weights = dict(load_backbone(plans[0].config.model).model.named_parameters())
    embeddings = weights["model.embed_tokens.weight"].numel()
    others = embeddings + sum(p.numel() for name, p in weights.items() if "norm" in name or name.endswith("bias"))
    assert model.matrices == model.parameters - others > 0
    learned = [bytes_by_part(model, demand)["optimizer and gradients"] for demand in (adamw, muon)]
    assert learned == [12 * model.parameters, 8 * model.matrices + 12 * others]
    saved = [plan.disk_bytes(model)["checkpoints"] for plan in plans]
    assert saved[0] - saved[1] == 4 * model.matrices * (plans[0].config.checkpoint.keep + 1)


def test_checkpointing_keeps_less_and_whole_models_learn_all_of_it():
    plain, recomputed = (bytes_of(*WHOLE, command="sft", recompute=on) for on in (False, True))
    assert recomputed["activations"] < 0.5 * plain["activations"]
    assert plain["optimizer and gradients"] == 12 * counted(planned(*WHOLE, command="sft"))[0].parameters
    assert plain["adapters"] == 0
