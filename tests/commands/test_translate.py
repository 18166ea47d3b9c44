"""Runs of other libraries become words that rlft accepts, with their own meaning; what cannot be said is said."""

import json
import re
from pathlib import Path
from shutil import rmtree

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.init import EXAMPLE
from rlft.commands.translate import _peer, read, translated
from rlft.config.compose import compose
from rlft.config.overrides import parse
from rlft.config.resolved import resolve
from rlft.config.suggest import known_keys, translated_peers

GRPO = """
import os, torch
from trl import GRPOConfig, GRPOTrainer
sizes = 256, 1024
longest = 1024
prompt = 256
def close(completions, answer, **kwargs):
    return [0.0 for _ in completions]
raise SystemExit("a script is never run")
data = load_dataset("openai/gsm8k", "main", split="train")
config = GRPOConfig(
    output_dir="out", learning_rate=5e-6, per_device_train_batch_size=4, gradient_accumulation_steps=8,
    num_generations=8, max_prompt_length=prompt, max_completion_length=longest - prompt, beta=0.04,
    epsilon=0.2, epsilon_high=0.28, num_iterations=2, max_steps=250, save_steps=50, warmup_ratio=0.1,
    loss_type="dr_grpo",
    scale_rewards=False, lr_scheduler_type="cosine", optim="adamw_8bit", seed=int(os.environ["SEED"]), use_vllm=True,
    repetition_penalty=1.1, packing=False, report_to="wandb", unheard_of=3, **more,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=[close], args=config, train_dataset=data,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
"""
UNSLOTH = """
max_seq_length = 1024
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="meta-llama/Llama-3.1-8B-Instruct", max_seq_length=max_seq_length, load_in_4bit=True,
    fast_inference=True,
    max_lora_rank=32, gpu_memory_utilization=0.6, dtype=None)
model = FastLanguageModel.get_peft_model(model, r=32, target_modules=["q_proj", "v_proj"], lora_alpha=64,
    use_gradient_checkpointing="unsloth", random_state=3407)
args = GRPOConfig(learning_rate=5e-6, num_generations=6, per_device_train_batch_size=6, max_completion_length=768,
    max_steps=250, loss_type="grpo", importance_sampling_level="sequence", weight_decay=0.1, optim="adamw_8bit")
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[a, b], args=args, train_dataset=dataset)
"""
VERL = """
set -x
bsz=512   # prompts
low=0.2
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=rows.jsonl data.train_batch_size=${bsz} data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.lora_rank=64 \\
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.clip_ratio_low=$low actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-mean" actor_rollout_ref.rollout.n=$((8 * 2)) \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.top_k=-1 trainer.n_gpus_per_node=8 \\
    trainer.logger='["console","wandb"]' trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
OPENRLHF = """
ARGS=(
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture   # the actor
   --rollout_batch_size 128
   --n_samples_per_prompt 8
   --train_batch_size 256
)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray ${ARGS[@]} \\
   --advantage_estimator group_norm --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --eps_clip_low_high 0.2 0.28 \\
   --prompt_data zwhe99/DeepMath-103K --input_key question --label_key final_answer --apply_chat_template \\
   --max_len 4096 --max_new_tokens 3072 --lora_rank 32 --vllm_num_engines 1 --save_steps -1 --packing_samples
"""
AXOLOTL = """
base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
trl: {use_vllm: true, num_generations: 4, max_completion_length: 512, beta: 0.001, scale_rewards: false,
  reward_funcs: [rewards.right]}
vllm: {gpu_memory_utilization: 0.85}
datasets:
  - {path: openai/gsm8k, name: main, type: rewards.transform}
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 100
learning_rate: 5e-5
optimizer: adamw_torch_fused
special_tokens: {pad_token: "<pad>"}
val_set_size: 0.05
"""

RUNS = [  # (library, file's name, its text, command, words among the translation's, names that are said to have none)
    ("trl", "train.py", GRPO, "train",
     # 4 completions x 8 micro-steps / 8 of each prompt; 250 updates are 125 steps of 1 minibatch x 2 epochs.
     "prompts_per_step=4 group_size=8 minibatches=1 epochs=2 steps=125 checkpoint.every=25 trainer.warmup=25 "
     "algorithm=grpo algorithm.aggregate=constant algorithm.std=none algorithm.clip_low=0.2 "
     "algorithm.clip_high=0.28 algorithm.kl_coef=0.04 algorithm.kl_estimator=k3_unbiased snapshot.reference=base "
     "trainer.lr=5e-06 prompts.max_tokens=256 generation.max_tokens=768 trainer.schedule=cosine "
     "trainer.optimizer=adamw8bit data=hub data.path=openai/gsm8k data.subset=main data.train_split=train "
     "model.path=Qwen/Qwen2-0.5B-Instruct lora.rank=16 lora.alpha=32 lora.target_modules=[q_proj,v_proj] "
     "generation=vllm algorithm.mismatch=sequence_product_mask",
     "reward_funcs packing repetition_penalty unheard_of task_type"),
    ("unsloth", "grpo.py", UNSLOTH, "train",
     "prompts_per_step=1 group_size=6 algorithm=gspo algorithm.aggregate=sequence_mean_token_mean lora.rank=32 "
     "lora.alpha=64 algorithm.clip_low=0.2 algorithm.clip_high=0.2 prompts.max_tokens=256 "
     "generation.max_tokens=768 generation=vllm model.quantization=4bit model.gradient_checkpointing=true "
     "seed=3407 trainer.weight_decay=0.1 trainer.schedule=linear model.path=meta-llama/Llama-3.1-8B-Instruct",
     "max_lora_rank"),
    ("verl", "run.sh", VERL, "train",
     "prompts_per_step=512 minibatches=4 algorithm=grpo algorithm.aggregate=sequence_mean_token_mean "
     "trainer.lr=3e-06 algorithm.kl_coef=0.001 algorithm.kl_in=loss algorithm.kl_estimator=k3 "
     "snapshot.reference=base generation=vllm algorithm.clip_low=0.2 algorithm.clip_high=0.28 "
     "algorithm.dual_clip=3.0 lora.rank=64 generation.top_k=0 checkpoint.every=0 eval.every=5 data=jsonl "
     "data.path=rows.jsonl data.answer_field=reward_model.ground_truth",
     "trainer.total_epochs trainer.n_gpus_per_node"),
    ("openrlhf", "run.sh", OPENRLHF, "train",
     # 128 prompts x 8 completions / 256 completions of an update
     "prompts_per_step=128 group_size=8 minibatches=4 algorithm=grpo algorithm.aggregate=token_mean "
     "algorithm.clip_low=0.2 algorithm.clip_high=0.28 algorithm.kl_coef=0.001 algorithm.kl_in=loss "
     "algorithm.kl_estimator=k3 lora.rank=32 prompts.max_tokens=1024 generation.max_tokens=3072 data=hub "
     "data.path=zwhe99/DeepMath-103K trainer.beta2=0.95 data.prompt_field=question data.answer_field=final_answer "
     "trainer.lr=1e-06 trainer.schedule=cosine generation=vllm", "apply_chat_template packing_samples address"),
    ("axolotl", "config.yaml", AXOLOTL, "train",
     "prompts_per_step=2 group_size=4 minibatches=1 steps=100 algorithm=grpo algorithm.std=none "
     "algorithm.kl_coef=0.001 lora.target_modules=all-linear lora.rank=32 generation=vllm trainer.lr=5e-05 "
     "generation.vllm.gpu_memory_utilization=0.85 data=hub data.path=openai/gsm8k data.held_out_fraction=0.05 "
     "model.path=Qwen/Qwen2.5-1.5B-Instruct", "reward_funcs special_tokens.pad_token"),
    ("trl", "sft.py", 'SFTTrainer(model="m", args=SFTConfig(max_length=512, num_train_epochs=2, packing=1))', "sft",
     "examples_per_step=8 epochs=2 max_completion_tokens=512 trainer.lr=2e-05 lora=null model.path=m", "packing"),
    ("trl", "dpo --config dpo.yaml", "{beta: 0.2, loss_type: ipo, learning_rate: 5.0e-7, use_peft: true}", "dpo",
     "loss=ipo loss.beta=0.2 rankings_per_step=8 trainer.lr=5e-07 lora.rank=16 epochs=3", ""),
    ("trl", "rloo.py", "RLOOConfig(per_device_train_batch_size=8, beta=0.05)", "train",
     "algorithm=rloo group_size=2 prompts_per_step=4 algorithm.kl_coef=0.05 algorithm.kl_in=reward "
     "algorithm.kl_estimator=k1", ""),
    ("axolotl", "dpo.yml",
     "{base_model: m, rl: simpo, micro_batch_size: 2, sequence_len: 1024, load_in_8bit: true}", "dpo",
     "loss=simpo rankings_per_step=2 max_completion_tokens=1024", "load_in_8bit"),
    ("openrlhf", "dpo.sh",
     "python -m openrlhf.cli.train_dpo --ipo --beta 0.3 --max_len 1024 --train_batch_size 64 --lora_rank 8", "dpo",
     "loss=ipo loss.per_token=false loss.beta=0.3 rankings_per_step=64 max_completion_tokens=1024 lora.rank=8", ""),
    ("openrlhf", "rm.sh",
     "deepspeed --module openrlhf.cli.train_rm --pretrain m --learning_rate 9e-6 --dataset a/b", "rm",
     "rankings_per_step=128 preferences=hub preferences.path=a/b trainer.lr=9e-06 model.path=m", ""),
    ("verl", "sft.sh",
     "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=rows.jsonl data.train_batch_size=64 optim.lr=1e-4",
     "sft", "examples_per_step=64 trainer.lr=0.0001 demonstrations=jsonl demonstrations.path=rows.jsonl", ""),
]  # fmt: skip


@pytest.fixture(autouse=True)
def rows(here):
    row = {"prompt": "1 + 1", "completion": "2", "chosen": "2", "rejected": "3", "reward_model": {"ground_truth": "2"}}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")


@each(("peer", "name", "text", "command", "words", "without"), RUNS, ids=[f"{peer} {name}" for peer, name, *_ in RUNS])
def test_a_run_of_another_library_is_one_that_rlft_accepts_with_the_same_numbers(
    peer, name, text, command, words, without
):
    Path(name.split()[-1]).write_text(text)
    translation, _ = translated(peer, name.split())
    assert translation.command == command
    assert set(words.split()) - set(translation.words.values()) == set()
    without_words = {name for row in translation.rows if not row.words and row.note for name in row.theirs}
    assert without_words >= set(without.split())
    data = {"sft": "demonstrations", "train": "data"}.get(command, "preferences")
    sources = {data: f"{data}=jsonl", f"{data}.path": f"{data}.path=rows.jsonl"}
    on_hub = ("train_split", "subset")  # the set itself is not looked up here
    ours = {key: word for key, word in translation.words.items() if not key.endswith(on_hub)} | sources
    if peer != "verl":
        ours = {key: word for key, word in ours.items() if not key.endswith("_field")}
        ours |= {"data.answer_field": "data.answer_field=completion"} if command == "train" else {}
    compose(list((sources | translation.words).values()), command=command)
    resolve(compose(list(ours.values()), command=command))


@each(("peer", "name", "text", "command"), [run[:4] for run in RUNS], ids=[f"{peer} {name}" for peer, name, *_ in RUNS])
def test_init_like_it_writes_the_same_run_into_a_yaml(peer, name, text, command):
    rmtree("own", ignore_errors=True)
    Path(name.split()[-1]).write_text(text)
    assert cli.run(["init", "own", "--like", peer, *name.split()]) == 0
    translation = translated(peer, name.split())[0]
    words = {key: word for key, word in translation.words.items() if not key.startswith("hydra.")}
    rewards = "reward=[own/reward.py:close,own/reward.py:tagged]"
    example = {"model.path": "model.path=embedded:tiny-arithmetic"} | {
        key: rewards if key == "reward" else f"{key}={'' if ':' in value else 'own/'}{value}"
        for key, value in EXAMPLE[command].items()
    }
    expected = parse(["name=own", *(example | words).values()], command).overrides
    written = Path("own/run.yaml").read_text()
    assert compose(parse(["own/run.yaml"], command).overrides, command=command) == compose(expected, command=command)
    told = re.sub(r"\n# +", " ", written)
    assert all(word in told for key, word in translation.words.items() if key not in words), "what is left out is said"
    given = {f"own/{file}": (Path("own") / file).is_file() for file in ("data.jsonl", "reward.py")}
    assert given == {file: Path(file).name in re.sub("#.*", "", written) for file in given}
    assert max(len(line) for line in written.splitlines()) <= 100


def test_init_like_a_run_whose_data_could_not_be_read_has_no_fields_of_them():
    words = "data.train_files=$FILES data.prompt_key=question data.max_response_length=64"
    Path("run.sh").write_text(f"python3 -m verl.trainer.main_ppo {words}")
    assert cli.run(["init", "own", "--like", "verl", "run.sh"]) == 0
    written = Path("own/run.yaml").read_text()
    assert "\ndata.path: data.jsonl\n" in written
    assert "_field:" not in written
    assert "#   data.train_files: $FILES\n" in written
    assert "#   data.prompt_key=question: data.prompt_field=question\n" in written, "what is left out is said"
    assert cli.run(["plan", "own/run.yaml", "prompts_per_step=8", "prompts.max_tokens=64"]) == 0


@each("path", ["it's (a) b#: c", "{a: 1}", "plain", "ü"])
def test_init_like_a_run_with_an_odd_path_names_the_same_folder(path):
    rmtree("own", ignore_errors=True)
    Path(path).mkdir()
    assert cli.run(["init", "own", "--like", "trl", f"model={path}", "r=4", f"run_name={path}"]) == 0
    plain = compose(parse(["own/run.yaml"]).overrides)
    assert (plain["model"]["path"], plain["name"]) == (path, path)


WORDS = [  # (what is typed, the words)
    ("trl num_generations=8 --learning_rate 1e-6", "group_size=8 trainer.lr=1e-06"),
    # 8 x 2 x 4 completions of 4 each; 4 micro-steps, 2 an update
    ("trl per_device_train_batch_size=8 num_generations=4 num_processes=2 steps_per_generation=4 "
     "gradient_accumulation_steps=2",
     "prompts_per_step=16 minibatches=2 group_size=4"),
    ("trl generation_batch_size=64 per_device_train_batch_size=8 num_generations=8",
     "prompts_per_step=8 minibatches=8 group_size=8"),
    ("trl loss_type=cispo epsilon_high=5.0",
     "algorithm=cispo algorithm.aggregate=token_mean algorithm.clip_low=1.0 algorithm.clip_high=4.0"),
    ("trl loss_type=bnpo", "algorithm=grpo algorithm.aggregate=token_mean"),
    ("trl beta=0.04 use_bias_correction_kl=false",
     "algorithm.kl_coef=0.04 algorithm.kl_in=loss algorithm.kl_estimator=k3 snapshot.reference=base"),
    ("trl epsilon=0.1", "algorithm.clip_low=0.1 algorithm.clip_high=0.1"),
    ("trl dpo --beta 0.2 --learning_rate=1e-6", "trainer.lr=1e-06 loss.beta=0.2"),
    ("trl reward --learning_rate 1e-4", "trainer.lr=0.0001"),
    ("trl reward_funcs=[accuracy_reward]", "reward=[math]"),
    ("verl algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01",
     "algorithm.kl_coef=0.01 algorithm.kl_in=reward algorithm.kl_estimator=k1 snapshot.reference=base"),
    ("verl algorithm.adv_estimator=gae actor_rollout_ref.model.lora_rank=8 critic.optim.lr=1e-5",
     "algorithm=ppo critic.kind=adapter algorithm.lam=1.0 lora.rank=8 critic.lr=1e-05"),
    ("verl algorithm.adv_estimator=rloo", "algorithm=rloo algorithm.surrogate=clipped"),
    ("verl algorithm.adv_estimator=reinforce_plus_plus_baseline", "algorithm=reinforce_pp algorithm.baseline=group"),
    ("verl algorithm.adv_estimator=remax", ""),
    ("openrlhf --lambd 0.95 --gamma 1.0 --advantage_estimator gae",
     "algorithm=ppo critic.kind=shared algorithm.lam=0.95 algorithm.gamma=1.0"),
    ("openrlhf --init_kl_coef 0.01",
     "algorithm.kl_coef=0.01 algorithm.kl_in=reward algorithm.kl_estimator=k1 snapshot.reference=base"),
    ("openrlhf --policy_loss_type gspo --eps_clip 3e-4",
     "algorithm.ratio=sequence algorithm.aggregate=sequence_mean_token_mean algorithm.clip_low=0.0003 "
     "algorithm.clip_high=0.0003"),
]  # fmt: skip


@each(("typed", "words"), WORDS, ids=[typed for typed, _ in WORDS])
def test_arguments_on_the_line_are_translated_alone_without_the_librarys_other_defaults(typed, words):
    peer, *arguments = typed.split()
    translation, _ = translated(peer, arguments)
    assert sorted(translation.words.values()) == sorted(words.split())


def test_what_is_printed_is_a_command_a_table_and_all_that_is_not_the_same(ran):
    Path("train.py").write_text(GRPO)
    printed = ran(["translate", "trl", "train.py", "learning_rate=2e-6"]).out
    first, *_ = printed.splitlines()
    assert first.startswith("rlft train ")
    assert "'lora.target_modules=[q_proj,v_proj]'" in first  # as a shell leaves it alone
    assert "trainer.lr=2e-06" in first  # a word after a file replaces its argument
    for part in ("\nDiffers in meaning\n", "\nNo counterpart here\n", "\nCould not be read", "  seed: "
    "int(os.environ['SEED'])", "  **: more",
                 "epsilon_high=0.28", "is not in the table", "4 a micro-step x\n"):  # fmt: skip
        assert part in printed or part.strip() in " ".join(printed.split())


@each("peer", translated_peers())
def test_whatever_the_table_names_leads_somewhere(peer):
    table, keys = _peer(peer), {key for command in ("train", "sft", "rm", "dpo") for key in known_keys(command)}
    known = {
        *table["names"],
        *keys,
        *(name for row in (*table["rules"], *table["without"]) for name in row.get("of", row.get("names"))),
    }
    assert {name for name in table["aliases"].values() if name not in known} == set()
    assert {name for values in table["defaults"].values() for name in values if name not in known} == set()
    assert {key for rule in table["rules"] for key in rule.get("words", {}) if key not in keys} == set()


REFUSED = [
    ("", "needs the library's name first, got nothing; choose one of trl, unsloth, verl, openrlhf, axolotl"),
    ("tlr x=1", "got tlr; did you mean trl?"),
    ("trl", "there is nothing to translate; write rlft translate trl <file or arguments>"),
    ("trl gone.py", "the file cannot be read: [Errno 2] No such file or directory: 'gone.py', got gone.py"),
    ("trl wrong.py", "the file cannot be read: '(' was never closed"),
    ("axolotl wrong.yaml", "the file cannot be read: "),
    ("axolotl list.yaml", "the file cannot be read: it has no keys with values"),
    ("trl empty.py", "there are no arguments in it, got empty.py"),
    ("trl hello", "there are no arguments in it, got hello"),
]


@each(("typed", "fragment"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_what_cannot_be_translated_is_refused(typed, fragment, ran):
    for name, text in {"wrong.py": "f(", "wrong.yaml": "a: [", "list.yaml": "[1]", "empty.py": "print(1)"}.items():
        Path(name).write_text(text)
    told = ran(["translate", *typed.split()], ends=2).err
    assert told.startswith("rlft: translate: ")
    assert fragment in told


READ = [  # (a script, what is read of it, what is not)
    ("n = 4\nm = n\nm = f(n)\nGRPOConfig(num_generations=n * 2, beta=m, dtype=torch.bfloat16, x=[n, -1])",
     {"num_generations": 8, "dtype": "bfloat16", "x": [4, -1]}, {"beta": "m"}),
    ("data = load_dataset('json', data_files='a.jsonl', split='train')",
     {"dataset_name": "a.jsonl", "dataset_train_split": "train"}, {}),
    ("file = 'b.csv'\ndata = load_dataset(path='csv', data_files=file)", {"dataset_name": "b.csv"}, {}),
    ("data = load_dataset('openai/gsm8k', data_files='x.json')",
     {"dataset_name": "openai/gsm8k", "data_files": "x.json"}, {}),
]  # fmt: skip


@each(("script", "read_of_it", "unread"), READ)
def test_a_script_reads_constants_arithmetic_and_files_of_sets_and_no_more(script, read_of_it, unread):
    Path("a.py").write_text(script)
    given = read(["a.py"])
    assert (given.arguments, given.unread) == (read_of_it, unread)
