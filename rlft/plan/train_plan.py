"""The plan of `rlft train`, made before a weight is loaded; bad input is refused here.

Checks come in the order in which mistakes are cheapest to find: config, rules between its parts, model config and
tokenizer, data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from rlft.algorithm.objective import Objective
from rlft.config.instantiate import instantiate
from rlft.config.model import CriticKind, Old, Recompute, RoutingSource, SnapshotConfig, teacher_settings
from rlft.config.resolved import Resolved
from rlft.config.schema import AUTO, RunConfig
from rlft.data.curriculum import Curriculum, PassRates, read_pass_rates
from rlft.data.examples import PretrainText, load_texts, longest_with_hint, scan_texts
from rlft.data.prompts import PromptSet, untokenised
from rlft.environment.protocol import Environment, read_environment
from rlft.generation.memory import Decoding, ModelSizes
from rlft.model.adapter_folder import num_parameters
from rlft.model.backbone import decoder_layers, read_config
from rlft.model.experts import bytes_of_choice
from rlft.model.families import limit_of
from rlft.model.full_weights import copied_roles
from rlft.plan import model_rules, roles, rules, sizes
from rlft.plan.demand import Demand, Loss, Networks, Ranks, Rows, TeacherDemand, TowerDemand, tower_demand
from rlft.plan.rewards.references import check_scoring
from rlft.plan.roofline import StepWork
from rlft.plan.run_plan import Facts, Plan, TableRow
from rlft.reward.workers.reward_spec import specs
from rlft.runs.fork import MOVING_REFERENCES
from rlft.system.device import BUCKET, kind_name, resolve_device, resolve_dtype
from rlft.system.disk import size_text
from rlft.system.process.placement import Placement
from rlft.system.process.ray_actors import check_address, check_installed
from rlft.tokens.text import RunTokenizer
from rlft.trainer.optimizer import largest_share
from rlft.trainer.update import most_gradients
from rlft.types import Split, UserError, counted, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan(Plan):
    """The plan of `rlft train`; `held_out` is None without evaluations, `pretrain_text` without a pretraining loss."""

    config: RunConfig
    algorithm: Objective
    engine: str
    engine_reason: str
    train_prompts: PromptSet
    held_out: PromptSet | None
    pretrain_text: PretrainText | None
    environment: Environment | None = None
    pass_rates: PassRates | None = None  # of the train prompts, from curriculum.path
    teacher_row_tokens: int = 0  # number of tokens of the longest row that a teacher reads
    tower: TowerDemand | None = None  # of the images in prompts
    placement: Placement | None = None  # where engines and ranks are; None until their GPUs are known

    @property
    def images(self) -> int:
        sets = (self.train_prompts, self.held_out)
        return max(prompts.images for prompts in sets if prompts is not None)

    @property
    def decodings(self) -> list[Decoding]:
        return sizes.of_training(self.train_prompts, self.held_out, self.config)

    @property
    def num_steps(self) -> int:
        return self.config.steps

    @property
    def needs_old(self) -> bool:
        """Whether `snapshot.old: auto` recomputes: not if old is the current policy of a single update."""
        has_several_updates = self.config.updates_per_step > 1
        return self.config.snapshot.old is Old.auto and (has_several_updates or self.algorithm.needs_old_in_credit)

    @property
    def annotated(self) -> dict[str, Any]:
        """What a batch gets before the updates, as `Networks.annotations` takes it."""
        algorithm = self.algorithm
        return {
            "needs_old": self.needs_old,
            "teacher_top_k": algorithm.teacher_top_k,
            "reference_field": algorithm.reference_field,
        }

    @property
    def has_old_pass(self) -> bool:
        """Whether a pass before the updates computes the old policy's log-probs."""
        return self.needs_old or self.config.snapshot.old in (Old.recompute, Old.copy)

    @property
    def scored_prompts(self) -> PromptSet:
        return self.train_prompts

    def planned_rows(self) -> list[TableRow]:
        run = self.config
        held_out = 0 if self.held_out is None else min(run.eval.num_prompts, len(self.held_out.prompts))
        epochs = run.steps * run.prompts_per_step / len(self.train_prompts.prompts)
        evaluated = f"{held_out:,} held out for evaluation x {counted(run.eval.num_samples, 'sample')}"
        budget = "tokens in one forward-backward; changes memory, not the gradient"
        updates = f"{counted(run.steps, 'step')}, {counted(run.steps * run.updates_per_step, 'update')}"
        return [
            ("roles", ", ".join(role_names(self)), roles_text(self)),
            ("engine", self.engine, self.engine_reason),
            *self._mismatch_rows(),
            *self._cluster_rows(),
            ("prompts", f"{len(self.train_prompts.prompts):,}", f"train; {evaluated}"),
            *self._curriculum_rows(),
            *self.end_rows(),
            ("token budget", f"{run.token_budget:,}", budget),
            *self._ranks_rows(),
            (
                "total",
                counted(run.steps * run.completions_per_step, "completion", ","),
                f"{updates}, {epochs:.1f} epochs of the data",
            ),
        ]

    def sampled_by(self, engine: str, itemsize: int) -> Self:
        algorithm = instantiate(self.config.algorithm, "algorithm")
        return replace(self, algorithm=model_rules.resolve_mismatch(self.config, algorithm, engine, itemsize=itemsize))

    def _mismatch_rows(self) -> list[TableRow]:
        """The row about the correction of the mismatch between engine and trainer; none where there is none."""
        if not self.algorithm.corrects_mismatch:
            return []
        keys = self.config.algorithm
        reason = "as configured"
        if keys.get("mismatch") == AUTO:
            reason = "engine and trainer compute log-probs in 16 bits or fewer, each with its own roundings"
            if getattr(self.config.generation.named(self.engine), "weights", None) == "copy":
                reason += ", vLLM also of the policy's weights"
        return [("mismatch", str(getattr(self.algorithm, "mismatch", "corrected")), reason)]

    def _curriculum_rows(self) -> list[TableRow]:
        """The row about how prompts are chosen; none where each is chosen once an epoch."""
        settings, num_prompts = self.config.curriculum, len(self.train_prompts.prompts)
        curriculum = Curriculum.of(settings, self.pass_rates, num_prompts, self.config.seed)
        if settings is None or curriculum is None:
            return []
        known, out = (round(share * num_prompts) for share in curriculum.metrics().values())
        words = [f"{counted(known, 'prompt', ',')} with a pass rate, {out:,} of them left out"]
        words += ["the run's own groups count as well"] if settings.running else []
        return [("curriculum", settings.weight, "; ".join(words))]

    def _ranks_rows(self) -> list[TableRow]:
        """The row about ranks; none where the run's own process trains alone, in one lane."""
        cluster = self.config.cluster
        if cluster.num_parts == 1:
            return []
        words = [f"share {counted(cluster.num_lanes, 'lane')}"]
        lanes, sharing = cluster.num_lanes, cluster.sequence_ranks
        of_ranks = "any number of ranks that divides them"
        if sharing > 1:
            of_ranks = f"one of these numbers of ranks: {rules.divisors_of(lanes, sharing)}"
        words += [f"a resume may have {of_ranks}"] * (lanes > 1)
        words += [f"{sharing} share the tokens of each pass"] * (sharing > 1)
        words += ["each holds a part of the base's layers"] * cluster.shard_base
        words += ["each holds all weights, and a part of the optimizer's averages"] * (self.config.lora is None)
        return [("ranks", str(cluster.ranks), "; ".join(words))]

    def _cluster_rows(self) -> list[TableRow]:
        """A row about engines and ranks, and one about reward workers; none where the run has a single process."""
        cluster, placement = self.config.cluster, self.placement
        kind = "ray" if cluster.is_joined else "local"
        rows: list[TableRow] = []
        if cluster.scoring:
            workers = counted(self.config.scoring.workers, "worker")
            rows.append(("rewards", workers, f"{kind}: on the cluster"))
        if placement is None:
            return rows
        engines = [f"{cluster.engines} engine{'s' * (cluster.engines > 1)}"] if cluster.engines else []
        value = ", ".join([*engines, f"{cluster.ranks} rank{'s' * (cluster.ranks > 1)}"])
        gpus = counted(placement.gpus, "GPU")
        location = "processes" if placement.kind == "processes" else f"{gpus}, {placement.kind}:"
        return [("cluster", value, f"{kind}: {location} {placement.reason}"), *rows]

    def loaded_rows(self, facts: Facts) -> list[TableRow]:
        """As `Plan.loaded_rows`, with what engines in other processes are sent where that is no adapter."""
        run = self.config
        if not run.cluster.engines or run.lora is not None:
            return facts.rows()
        size = facts.base * resolve_dtype(run.model.dtype, resolve_device(run.model.device)).itemsize
        words = f"all weights to each engine after each step, in buckets of at most {BUCKET // 2**20} MiB"
        return [*facts.rows(), ("publish", size_text(size), words)]

    def _sampling_demand(self) -> dict[str, Any]:
        """The fields of a Demand about engines on the trainer's device; none where they have GPUs of their own."""
        run, placement, apart = self.config, self.placement, self.config.cluster.engines
        if apart and placement is not None and placement.kind == "divided":
            return {}
        if placement is None or placement.kind == "pairs":
            apart = min(apart, 1)
        return sizes.sampling_of(run, self.engine, self.decodings, apart)

    def demand(self, model: ModelSizes, recompute: Recompute) -> Demand:
        """The demand of the policy, and of old, reference, teacher, critic and rewards next to it."""
        run, cluster = self.config, self.config.cluster
        return Demand(
            networks=self._networks(model),
            rows=Rows(
                prompt_tokens=max(self.train_prompts.num_tokens),
                completion_tokens=run.generation.max_tokens,
                group=run.group_size,
                number=run.completions_per_step,
                in_update=run.completions_per_step // run.minibatches,
            ),
            optimizer=run.trainer.optimizer,
            loss=Loss(
                entropy=self.algorithm.needs_entropy,
                top_k=self.algorithm.teacher_top_k,
                exact_kl=self.algorithm.exact_kl_to is not None,
                expert_bytes=self._expert_bytes(),
            ),
            token_budget=run.token_budget,
            recompute=recompute,
            teacher=self._teacher_demand(),
            device=kind_name(resolve_device(run.model.device)),
            ranks=Ranks(
                number=cluster.ranks,
                gradients=most_gradients(cluster.num_parts, cluster.ranks),
                held=largest_share(model.trained, cluster.ranks) if run.lora is None else 1.0,
                sharing=cluster.sequence_ranks,
                sharded=cluster.shard_base if model.layers and rules.why_whole(run) is None else None,
            ),
            tower=self.tower,
            **self._sampling_demand(),
        )

    def _networks(self, model: ModelSizes) -> Networks:
        run, snapshot, critic = self.config, self.config.snapshot, self.config.critic.kind
        heads, own_critic = (critic is not CriticKind.none) * model.hidden, critic is CriticKind.adapter
        on_the_base, rewards = sizes.learned_rewards(run)
        moving = (snapshot.reference in MOVING_REFERENCES) + (snapshot.old is Old.copy)
        whole, learning = run.lora is None, 1 + own_critic + (run.reward_model.refresh_every > 0)
        return Networks(
            adapters=0 if whole else 1 + own_critic + moving + on_the_base,
            trainable=(model.parameters if whole else learning * model.lora) + heads,
            matrices=model.matrices if whole else learning * model.matrices,
            frozen=sum(frozen_parameters(snapshot).values()),
            whole_model=whole,
            copies=len(copied_roles(snapshot)) if whole else 0,
            own_critic=own_critic,
            rewards=rewards,
        )

    def _expert_bytes(self) -> int:
        """Bytes of a token's experts that a step holds: of batches, and of completions where the engine notes them."""
        source = self.config.snapshot.routing
        if source is RoutingSource.free and not self.has_old_pass:
            return 0  # with such a pass, what it chose is what `router/replaced` compares with
        of_a_token = bytes_of_choice(model_rules.empty_model(self.config.model, read_config(self.config.model)))
        return of_a_token * (2 if source is RoutingSource.engine else 1)

    def _teacher_demand(self) -> TeacherDemand | None:
        """The demand of a teacher that is a separate model."""
        snapshot = self.config.snapshot
        if snapshot.teacher_model is None:
            return None
        unhinted = max(self.train_prompts.num_tokens)
        hinted = self.teacher_row_tokens - self.config.generation.max_tokens
        return TeacherDemand(
            model=teacher_sizes(self.config),
            engine=self.config.generation.named(snapshot.teacher_engine),
            section=snapshot.teacher_engine,
            row_tokens=self.teacher_row_tokens,
            prompt_tokens=unhinted if snapshot.teacher_hint is None else hinted,
            share=snapshot.teacher_gpu_memory_utilization,
        )

    def step_work(self) -> StepWork:
        run, snapshot, held_out = self.config, self.config.snapshot, self.held_out
        evaluated = [] if held_out is None else held_out.num_tokens[: run.eval.num_prompts]
        own_critic = run.critic.kind is CriticKind.adapter
        passes = [
            self.has_old_pass,
            snapshot.reference != "none" and self.algorithm.reference_field is not None,
            snapshot.teacher != "none",
            own_critic,
        ]
        return StepWork(
            trained=sizes.rows_of(self.train_prompts.num_tokens, run.group_size, run, number=run.prompts_per_step),
            epochs=run.epochs,
            critics=int(own_critic),
            forwards=sum(passes),
            anchors=int(self.algorithm.exact_kl_to is not None),
            scorers=sum(spec.runs_in_trainer for spec in specs(run.reward).values()),
            is_sampled=True,
            sampled=sizes.rows_of(evaluated, run.eval.num_samples, run) if evaluated else None,
        )

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        run, snapshot, whole, head = self.config, self.config.snapshot, self.config.lora is None, model.hidden + 1
        of_a_role, of_the_base = (model.parameters, model.parameters) if whole else (model.lora, 0)
        numbers = {
            "policy": of_a_role,
            "old": of_a_role,
            "reference": of_the_base if snapshot.reference == "base" else of_a_role,
            "teacher": of_the_base if snapshot.teacher == "base" else of_a_role,
            "critic": head + (0 if run.critic.kind is CriticKind.shared else of_a_role),
            "reward": head + of_a_role,
        } | frozen_parameters(snapshot)
        if snapshot.teacher_model is not None:
            numbers["teacher"] = teacher_sizes(run).parameters
        learning = ("policy", "critic", *(["reward"] if run.reward_model.refresh_every else []))
        result = {"base (learns)" if whole else "base (frozen)": model.parameters}
        for role in (role for role in role_names(self) if not (whole and role == "policy")):  # which is the base itself
            result[f"{role} ({'learns' if role in learning else 'does not learn'})"] = numbers[role]
        return result

    def lengths(self) -> dict[str, Sequence[int]]:
        named = {"train prompts": self.train_prompts, "held out prompts": self.held_out}
        return {name: prompts.num_tokens for name, prompts in named.items() if prompts is not None}

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        config, snapshot = self.config, self.config.snapshot
        model = model or sizes.sizes_of(config.model, config.lora)
        beside = (snapshot.reference in MOVING_REFERENCES) * (model.parameters if config.lora is None else model.lora)
        beside += (snapshot.old is Old.copy) * model.lora  # all weights are the policy's after a step
        demand = self.demand(model, False)  # of policy, critic and a reward model that learns
        saved = sizes.checkpoint_bytes(config.checkpoint, self.num_steps, demand, beside)
        result = {"checkpoints": saved}
        line_bytes = sizes.completion_bytes(config)
        rollout_bytes = line_bytes + (sizes.TOKEN_ID + sizes.LOGPROB) * config.generation.max_tokens
        result["rollouts"] = config.rollouts.most_files(config.steps) * config.completions_per_step * rollout_bytes
        return result | self.metrics_bytes(config.eval.num_examples * line_bytes)


def make_plan(resolved: Resolved, *, runs_here: bool = True, trains: bool = True) -> TrainPlan:
    """Reads the model's config.json and tokenizer, and scans the data: `rlft.config.command.Command.make_plan`.

    trains: False if the config is only evaluated.
    """
    config: RunConfig = resolved.config
    algorithm, loggers = resolved.parts
    rewards = specs(config.reward)
    used = roles.uses(config, rewards)

    teacher_note = _check_devices(config, runs_here=runs_here, trains=trains)
    engine, reason = _choose_engine(config, runs_here=runs_here, trains=trains)
    dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
    algorithm = model_rules.resolve_mismatch(config, algorithm, engine, itemsize=dtype.itemsize)

    model, base = sizes.read_base(config.model)
    _check_model(config, model, engine, trains=trains)
    roles.check_learner_on(config, config.generation.named(engine), used, base, model)
    classifiers = rules.check_classifiers(rewards)

    tokenizer, ends = sizes.read_tokenizer(config, model)
    environment, train_prompts, held_out = _read_prompts(config, tokenizer)
    rules.check_images(config, model.model_type, config.generation.named(engine), train_prompts, held_out)
    data_notes = check_scoring(config, rewards, train_prompts, tokenizer, ends, held_out)
    rules.check_fresh_prompts(config, len(train_prompts.prompts))

    pass_rates = known_pass_rates(config, train_prompts) if trains else None
    pretrain_text = scan_pretrain_text(config, tokenizer)
    teacher, teacher_row_tokens = dict[str, str](), 0
    if trains and config.snapshot.teacher != "none":
        teacher, teacher_row_tokens = _read_teacher(config, algorithm.teacher_top_k, train_prompts, tokenizer, model)

    optional: dict[str, Any] = {"held_out": held_out, "curriculum": pass_rates, "pretrain": pretrain_text}
    num_train, num_held_out = len(train_prompts.prompts), None if held_out is None else len(held_out.prompts)
    num_read = min(num_train, config.steps * config.prompts_per_step) + min(num_held_out or 0, config.eval.num_prompts)
    notes: list[str | None] = []
    if trains:
        notes += rules.warnings_of_config(config, algorithm)
        notes += model_rules.notes_of_tiles(config.model, config.lora, model)
        notes += roles.notes_of_adapters(used, config.model, base)
    notes += rules.warnings_of_sizes(config, num_train if trains else None, num_held_out)
    if trains:
        notes += [rules.idle_engines(config, engine), teacher_note, *train_prompts.notes]
    notes += [] if held_out is None else held_out.notes
    notes += [pretrain_text.note] if trains and pretrain_text is not None else []
    return TrainPlan(
        config=config,
        plain=resolved.plain,
        algorithm=algorithm,
        engine=engine,
        engine_reason=reason,
        train_prompts=train_prompts,
        held_out=held_out,
        loggers=loggers,
        fingerprints={
            "data_fingerprint": train_prompts.fingerprint,
            **{f"{section}_fingerprint": read.fingerprint for section, read in optional.items() if read is not None},
            **base,
            **teacher,
            **classifiers,
            **roles.fingerprints_of(used),
        },
        pretrain_text=pretrain_text,
        environment=environment,
        ends=ends,
        pass_rates=pass_rates,
        teacher_row_tokens=teacher_row_tokens,
        tower=tower_demand(model, dtype, (train_prompts, held_out), num_read, tokenizer) if trains else None,
        notes=tuple(filter(None, (*notes, *data_notes, *ends.notes))),
    )


def _check_devices(config: RunConfig, *, runs_here: bool, trains: bool) -> str | None:
    """Checks what the run needs of this machine; returns a note if its teacher's engine is missing."""
    model_rules.check_machine(config.model, runs_here=runs_here)
    model_rules.check_optimizer(config.trainer.optimizer, config.model, runs_here=runs_here)
    if not trains:
        return None
    if (teacher := teacher_settings(config.snapshot, config.model)) is not None:
        with roles.teacher_is_meant():
            model_rules.check_machine(teacher, runs_here=runs_here)
    device = resolve_device(config.model.device)
    rules.check_cluster_has_devices(config.cluster, device)
    rules.check_lag_has_devices(config, device.type)
    return roles.missing_engine(config, runs_here=runs_here)


def _choose_engine(config: RunConfig, *, runs_here: bool, trains: bool) -> tuple[str, str]:
    """(engine, reason), once it can run where the config says; a Ray cluster is asked for."""
    whole = config.lora is None
    engine, reason = model_rules.choose_engine(
        config.generation, config.model, config.lora, runs_here=runs_here, whole=whole, apart=config.cluster.engines > 0
    )
    if trains:
        roles.check_teacher_engine(config, engine, str(resolve_device(config.model.device)), runs_here=runs_here)
    if config.cluster.engines:
        model_rules.check_apart(config, engine)
    if runs_here and (address := config.cluster.joined_address) is not None:
        check_installed()
        check_address(address)
    return engine, reason


def _check_model(config: RunConfig, model: PreTrainedConfig, engine: str, *, trains: bool) -> None:
    """Checks what the config asks of this model: its context, its experts, and layers that ranks can divide."""
    model_rules.check_context(config, model)
    if not trains:
        return
    model_rules.check_routing(config.snapshot, config.generation.named(engine), config.model, model)
    if config.cluster.shard_base:
        problem = f"the layers of a {model.model_type} are not one list, or have weights in common"
        layers = decoder_layers(model_rules.empty_model(config.model, model))
        require(layers, "cluster.shard_base", problem, got="true", remedy="leave it out, or use another model")


def _read_prompts(config: RunConfig, tokenizer: RunTokenizer) -> tuple[Environment | None, PromptSet, PromptSet | None]:
    """(the environment, the train prompts, those held out if there are evaluations)."""
    data, environment = instantiate(config.data, "data"), read_environment(config.environment)
    texts = data.load(Split.train)
    shown = rules.prompt_additions(environment, tokenizer, texts)
    train = sizes.scan_prompts(config, texts, tokenizer, Split.train, shown)
    if not config.eval.every:
        return environment, train, None
    held_out = sizes.scan_prompts(config, data.load(Split.held_out), tokenizer, Split.held_out, shown)
    return environment, train, held_out


def _read_teacher(
    config: RunConfig, top_k: int, prompts: PromptSet, tokenizer: RunTokenizer, model: PreTrainedConfig
) -> tuple[dict[str, str], int]:
    """(fingerprints of a teacher that is a separate model, number of tokens of the longest row that a teacher reads)"""
    vocabulary = model.get_text_config().vocab_size
    problem = f"is more than the model's vocabulary of {vocabulary} tokens"
    require(top_k <= vocabulary, "algorithm.top_k", problem, got=top_k, remedy="use for instance 16")
    longest = longest_read_by_the_teacher(config, prompts, tokenizer, model)
    return roles.check_teacher(config, tokenizer, longest, vocabulary), longest + config.generation.max_tokens


def known_pass_rates(config: RunConfig, train_prompts: PromptSet) -> PassRates | None:
    """What the curriculum's file says of the train prompts; None if it names none.

    Refuses a file that is not of these prompts, and a curriculum that leaves fewer of them than a step takes.
    """
    settings, prompts = config.curriculum, untokenised(train_prompts)
    if settings is None or not settings.is_on:
        return None
    known = None
    if settings.path is not None:
        known = read_pass_rates(settings.path, next(iter(config.reward)), config.eval.correct_at, prompts)
    curriculum = Curriculum.of(settings, known, len(prompts), config.seed)
    assert curriculum is not None, "it is on"
    left = len(prompts) - int(curriculum.left_out().sum())
    problem = f"the curriculum leaves {left} of {len(prompts)} train prompts, of which a step takes different ones"
    remedy = f"use at most {left}, more data, or other curriculum.above and curriculum.below"
    require(left >= config.prompts_per_step, "prompts_per_step", problem, got=config.prompts_per_step, remedy=remedy)
    return known


def longest_read_by_the_teacher(
    config: RunConfig, prompts: PromptSet, tokenizer: RunTokenizer, model_config: PreTrainedConfig
) -> int:
    """Number of tokens of the longest prompt that the teacher may read; refuses a hint for which it has no context."""
    hint = config.snapshot.teacher_hint
    if hint is None:
        return config.prompts.max_tokens
    longest = longest_with_hint(prompts.prompts, hint, tokenizer, config.prompts.style)
    limit, row_tokens = limit_of(model_config), longest + config.generation.max_tokens
    if config.snapshot.teacher_model is None and limit is not None and row_tokens > limit.tokens:
        problem = f"with it the longest row has {counted(row_tokens, 'token')}, more than the model's {limit.words}"
        remedy = "shorten it, or lower prompts.max_tokens or generation.max_tokens"
        raise UserError("snapshot.teacher_hint", problem, got=repr(hint), remedy=remedy)
    return longest


def scan_pretrain_text(config: RunConfig, tokenizer: RunTokenizer) -> PretrainText | None:
    """The pretraining text, tokenised; None if the config names none."""
    settings = config.pretrain
    if settings.path is None:
        return None
    return scan_texts(
        load_texts(settings.path, settings.field, settings.given_field, settings.rows),
        tokenizer,
        max_tokens=settings.max_tokens,
        sequences_per_update=settings.sequences_per_update,
        held_out=settings.held_out,
        updates_per_step=config.updates_per_step,
    )


def frozen_parameters(snapshot: SnapshotConfig) -> dict[str, int]:
    """{role: number of its parameters} of the roles whose adapters never move, which are as their folders have them."""
    folders = {"teacher": snapshot.teacher_adapter}
    if snapshot.reference not in ("none", "base", *MOVING_REFERENCES):
        folders["reference"] = snapshot.reference
    return {role: num_parameters(path, f"snapshot.{role}") for role, path in folders.items() if path is not None}


def teacher_sizes(config: RunConfig) -> ModelSizes:
    """The sizes of a teacher that is a separate model."""
    settings = teacher_settings(config.snapshot, config.model)
    assert settings is not None, "the teacher is a separate model"
    return sizes.sizes_of(settings, None)


def role_names(plan: TrainPlan) -> list[str]:
    """The roles of this run: the networks on the base or next to it."""
    snapshot, critic = plan.config.snapshot, plan.config.critic
    has_role = {
        "policy": True,
        "old": snapshot.old == "copy",
        "reference": snapshot.reference != "none",
        "teacher": snapshot.teacher != "none",
        "critic": critic.kind != "none",
        "reward": any(s.runs_in_trainer for s in specs(plan.config.reward).values()),
    }
    return [role for role, has in has_role.items() if has]


def roles_text(plan: TrainPlan) -> str:
    """Says which policy is old, what the reference is, and what gives values."""
    snapshot, critic = plan.config.snapshot, plan.config.critic
    kind = "weights" if plan.config.lora is None else "an adapter"
    old = "old = current (one update a step, no extra pass)"
    if snapshot.old == "sampled":
        old = "old = the engine's log-probs"
    elif snapshot.old == "copy":
        old = f"old = {kind} of its own, copied at each publish"
    elif snapshot.old == "recompute" or plan.needs_old:
        old = "old = recomputed before the updates"
    text = old
    if snapshot.reference != "none":
        text += f"; reference = {snapshot.reference}"
        text += f", refreshed every {counted(snapshot.refresh_every, 'step')}" if snapshot.refresh_every else ""
        text += f", decay {snapshot.ema_decay:g} a step" if snapshot.ema_decay is not None else ""
    if snapshot.teacher != "none":
        text += f"; teacher = {snapshot.teacher}" + " with a hint" * (snapshot.teacher_hint is not None)
        engine = plan.config.generation.named(snapshot.teacher_engine)
        text += f" in {engine.title}" * engine.teaches
    if critic.kind != "none":
        text += f"; critic = {'adapter' if critic.kind == 'adapter' else 'head on the policy'} from {critic.init}"
    return text
