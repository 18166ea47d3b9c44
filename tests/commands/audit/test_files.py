"""What is changed in the files of a run is found by its chain, and named by file and step."""

import random

from audited_runs import (
    STEPS,
    arranged,
    audited,
    copied,
    edited,
    exchanged_files,
    json_edited,
    key_set,
    lines_of,
    nested,
    noisy,
    other_step,
    removed,
    replaced,
    resealed,
    write,
    wrong,
)
from in_one_test import each

from rlft.runs import checkpoint
from rlft.system.terminal import Status

R2, C3 = "rollouts/step_000002.jsonl", "checkpoints/step_000003"
M, E, C, A = "metrics.jsonl", "eval.jsonl", "chain.jsonl", "alarms.jsonl"
NOBODYS = "0" * 64

PLAIN = {
    "a reward edited": (edited(R2, 1, nested("rewards", "exact_match", 0.5)), f"{R2}: step 2"),
    "a total reward edited": (edited(R2, 1, key_set(reward=0.5)), f"{R2}: step 2"),
    "an advantage edited": (edited(R2, 1, key_set(advantage=0.5)), f"{R2}: step 2"),
    "a text edited": (edited(R2, 1, key_set(completion="43")), f"{R2}: step 2"),
    "a token edited": (edited(R2, 1, lambda line: line["token_ids"].__setitem__(0, 7)), f"{R2}: step 2"),
    "a log-prob edited": (edited(R2, 1, lambda line: line["logprobs"].__setitem__(0, -0.25)), f"{R2}: step 2"),
    "a policy version edited": (edited(R2, 1, key_set(policy_version=0)), f"{R2}: step 2"),
    "an answer edited": (edited(R2, 1, key_set(answer="0")), f"{R2}: step 2"),
    "two completions exchanged": (arranged(R2, 1, 0, *range(2, 12)), f"{R2}: step 2"),
    "a completion removed": (arranged(R2, *range(11)), f"{R2}: step 2"),
    "a completion twice": (arranged(R2, *range(12), 11), f"{R2}: step 2"),
    "the completions of two steps exchanged": (exchanged_files, f"{R2}: step 2"),
    "completions removed": (removed(R2), f"{R2}: step 2 is missing"),
    "completions added": (copied(R2, "rollouts/step_000009.jsonl"), "rollouts/step_000009.jsonl: step 9"),
    "a metric edited": (edited(M, 2, key_set(**{"reward/mean": 0.9})), f"{M}: step 3: its numbers"),
    "a metric added": (edited(M, 2, key_set(**{"reward/median": 0.9})), f"{M}: step 3: its numbers"),
    "a time edited": (edited(M, 2, key_set(**{"time/sample": 1.0})), f"{M}: step 3: its times"),
    "a step left out of the metrics": (arranged(M, 0, 1, 3), f"{M}: step 3 is missing"),
    "two steps exchanged": (arranged(M, 0, 2, 1, 3), f"{M}: step 2 comes after step 3"),
    "a step twice": (arranged(M, 0, 1, 2, 2, 3), f"{M}: step 3 comes after step 3"),
    "the metrics removed": (removed(M), f"{M}: step 1 is missing"),
    "a step added": (edited(M, 3, key_set(step=7)), f"{M}: step 7 is not in the chain"),
    "an accuracy edited": (edited(E, 1, key_set(accuracy=1.0)), f"{E}: step 2"),
    "an example edited": (edited(E, 2, lambda line: line["examples"][0].update(score=1.5)), f"{E}: step 4"),
    "an evaluation removed": (arranged(E, 0, 2), f"{E}: step 2 is missing"),
    "the evaluations exchanged": (arranged(E, 0, 2, 1), f"{E}: step 2 comes after step 4"),
    "an alarm edited": (edited(A, 0, key_set(text="all is well")), f"{A}: step "),
    "the alarms removed": (removed(A), f"{A}: step "),
    "an alarm added": (lambda folder: write(folder / A, [*lines_of(folder / A), {"step": 4, "name": "x", "text": "y"}]),
                       f"{A}: step 4"),
    "a step left out of the chain": (arranged(C, 0, 1, 3, 4), f"{C}: step 2 is left out: step 3 follows"),
    "the chain's beginning removed": (arranged(C, 1, 2, 3, 4), f"{C}: step 0 is left out"),
    "the chain's end removed": (arranged(C, 0, 1, 2, 3), "status.json: says 4 steps, and the chain has 3"),
    "two lines of the chain exchanged": (arranged(C, 0, 1, 3, 2, 4), f"{C}: step 2 is left out"),
    "a digest in the chain edited": (edited(C, 3, nested("sha256", "scores", NOBODYS)), f"{C}: step 3"),
    "a machine in the chain edited": (edited(C, 3, nested("machine", "threads", "99")), f"{C}: step 3"),
    "the last digest edited": (edited(C, 4, key_set(digest=NOBODYS)), f"{C}: step 4"),
    "a link edited": (edited(C, 2, key_set(previous=NOBODYS)), f"{C}: step 2"),
    "the digest with times edited": (edited(C, 2, key_set(metrics_line=NOBODYS)), f"{M}: step 2: its times"),
    "the chain cut short": (lambda folder: (folder / C).write_bytes((folder / C).read_bytes()[:-9]), f"{C}: its last"),
    "the chain removed": (removed(C), "has no chain.jsonl"),
    "a key of the config edited": (replaced("config.yaml", "lr: 0.02", "lr: 0.01"), "config.yaml: step 4"),
    "a fingerprint edited": (replaced("config.yaml", "data_fingerprint: ", "data_fingerprint: 0"), "config.yaml: step"),
    "the number of steps edited": (json_edited("status.json", steps=3), "status.json: "),
    "the status removed": (removed("status.json"), "status.json: is missing"),
    "a checkpoint's adapter exchanged": (copied("checkpoints/step_000002/policy/adapter_model.safetensors",
                                                f"{C3}/policy/adapter_model.safetensors"), f"{C3}: step 3: policy/"),
    "an adapter from another run": (resealed(lambda folder: noisy(folder / "policy" / "adapter_model.safetensors")),
                                    f"{C3}: step 3: adapters/policy differs"),
    "an optimizer from another run": (resealed(lambda folder: noisy(folder / "optimizer.safetensors")),
                                      f"{C3}: step 3: optimizer differs"),
    "a seed in a state edited": (resealed(lambda folder: checkpoint.change_state(folder, {"seed": 9})),
                                 f"{C3}: step 3: state differs"),
    "an adapter's scale edited": (resealed(json_edited("policy/adapter_config.json", lora_alpha=99)),
                                  f"{C3}: step 3: state differs"),
    "an adapter's record edited": (resealed(json_edited("policy/rlft.json", base_fingerprint="0")),
                                   f"{C3}: step 3: records differs"),
    "a checkpoint of another step": (other_step, f"{C3}: step 3: adapters/policy differs"),
    "the last checkpoint removed": (removed("checkpoints/step_000004"), "checkpoints: step 4 is missing"),
    "a manifest cut short": (replaced(f"{C3}/MANIFEST", "  optimizer", "  optimiser"), f"{C3}: step 3: MANIFEST"),
    "a file of a checkpoint removed": (removed(f"{C3}/optimizer.safetensors"), f"{C3}: step 3: optimizer.safetensors"),
    "a file in a checkpoint added": (copied(R2, f"{C3}/more.json"), f"{C3}: step 3: MANIFEST does not list more.json"),
}  # fmt: skip
"""{what was done: (how, how the finding begins or what it holds)}: nobody has changed the chain to fit."""


def test_an_honest_run_is_confirmed_and_a_moved_one(honest, copies):
    rows = audited(honest, recompute=9, replay=9)
    assert {row.status for row in rows} == {Status.ok}, rows
    replayed = [row.value for row in rows if row.name == "replay"]
    assert [value.partition(",")[0] for value in replayed] == [f"step {step}" for step in range(1, STEPS + 1)]
    assert all("bit for bit" in value and "adapters/policy" in value for value in replayed)
    assert wrong(audited(copies(), replay=1)) == []


@each("what", PLAIN)
def test_whatever_is_changed_is_found_and_named(what, copies):
    tamper, expected = PLAIN[what]
    folder = copies()
    tamper(folder)
    found = wrong(audited(folder))
    assert any(expected in row for row in found), (what, found)


def test_a_killed_run_has_two_steps_at_most_that_the_chain_does_not_prove(copies):
    """The line of a step is written a step later."""
    for left, is_confirmed in ((4, True), (3, True), (2, False)):
        folder = copies()
        json_edited("status.json", status="running")(folder)
        arranged(C, *range(left))(folder)
        for step in range(left, STEPS + 1):
            removed(f"checkpoints/step_00000{step}")(folder)
        rows = audited(folder)
        unproven = [row for row in rows if "was not sealed" in row.value]
        assert (wrong(rows) == [], len(unproven)) == (is_confirmed, min(2, STEPS + 1 - left)), rows


def test_one_flipped_bit_in_any_file_is_found(copies):
    folder = copies()
    draw = random.Random(3)
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
        content = file.read_bytes()
        for _ in range(2):
            place, bit = draw.randrange(len(content)), draw.randrange(8)
            file.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            found, where = wrong(audited(folder)), (file.relative_to(folder), place, bit)
            step = file.relative_to(folder).parts[1] if file.parent.name.startswith("step_") else file.name
            assert any(step in row for row in found), (where, found)
        file.write_bytes(content)
    assert wrong(audited(folder)) == []
