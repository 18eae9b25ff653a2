"""Builds the roles of a run from its config: policy, learner, reference, critic, process reward model and reward models (`engine_builder.py`: engines)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from burnish.algorithms.losses.distillation_spec import DivergenceLoss, GoldLoss
from burnish.algorithms.terms.spec import TeacherReference, TeachersReference
from burnish.config.data import Reward, Source, Template
from burnish.config.environment import AGENT, CREDIT, TRAIN_CALLS, Environment
from burnish.config.errors import UserError
from burnish.config.model import Lora, Model
from burnish.config.placement import RayPlacement
from burnish.config.records import slot_options
from burnish.config.schema import Layers, TrainConfig
from burnish.core.engine import Engine
from burnish.data.tasks.registry import alphabet_of
from burnish.distributed.engine_builder import find_paged_engine
from burnish.distributed.judge_process import EngineJudge
from burnish.distributed.server_teacher import ServerTeacher
from burnish.environments.registry import environment_of, environment_renderer, num_workers, worker_limits
from burnish.environments.tools.call_formats import call_format, detect_format
from burnish.environments.workers import ObjectWorkers
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import architecture_from_hf, read_config, why_not_native
from burnish.models.compiled_layers import compile_layers
from burnish.models.fp8_layers import set_fp8
from burnish.models.heads import ValueModel
from burnish.models.kernels.aligned_groups import GroupComparison
from burnish.models.kernels.logprob import Divergence
from burnish.models.lora.peft_files import is_adapter, read_lora_config
from burnish.models.policy import (
    AnyPolicy,
    PolicyModel,
    PolicyOutline,
    find_directory,
    load_policy,
    outline_policy,
)
from burnish.models.token_alignment import Spelling, shared_vocabulary
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.reward_parts import JUDGE, MODEL, RewardModelOptions
from burnish.rollout.runner import RolloutRunner
from burnish.training.aligned_teacher import AlignedTeacher
from burnish.training.architecture_checks import check_policy_layers
from burnish.training.auxiliary_models import Critic, ProcessRewardModel, trainable_copy
from burnish.training.learner import Learner
from burnish.training.parallel.ranks import SOLO, Ranks, check_model_divides, parallelize_model
from burnish.training.reference import Reference, make_reference
from burnish.training.reward_scorer import ModelScorer, delimiter_to_read

if TYPE_CHECKING:
    from burnish.gateway.endpoint import RecordingEndpoint


def build_scorers(
    reward: Reward, tokenizer: Tokenizer, base: Path | None, kinds: Collection[str] = (MODEL, JUDGE)
) -> dict[int, ModelScorer | EngineJudge]:
    """Reward models, and judges in their own processes, by the index of their reward part.

    `tokenizer` is the policy's. Parts of kinds that are not in `kinds` are checked and not loaded.
    """
    made: dict[int, ModelScorer | EngineJudge] = {}
    for index, part in enumerate(reward.parts):
        if part.name == MODEL:
            options = RewardModelOptions.of(part.options, f"reward.parts[{index}] (model)")
            directory = find_directory(options.path, base, with_weights=MODEL in kinds)
            delimiter_to_read(directory, options)
            if MODEL in kinds:
                made[index] = ModelScorer(directory, options, tokenizer)
        elif part.name == JUDGE:
            judge = JudgeOptions.of(part.options, f"reward.parts[{index}] (judge)")
            if judge.path is not None and JUDGE in kinds:
                made[index] = EngineJudge(find_directory(judge.path, base), judge)
    return made


def build_reward_models(reward: Reward, tokenizer: Tokenizer, base: Path | None) -> dict[int, ModelScorer]:
    """The reward models among the parts of a reward, without judges."""
    made = build_scorers(reward, tokenizer, base, (MODEL,))
    return {index: one for index, one in made.items() if isinstance(one, ModelScorer)}


def build_policy(
    config: Model, sources: list[Source], seed: int, base: Path | None, ranks: Ranks = SOLO, characters: str = ""
) -> PolicyModel:
    """The policy that a run starts from: a model directory, with an adapter if configured, or a new decoder.

    A new one's tokenizer has the characters of the sources and the given ones. With several ranks it is on the CPU or without values, and must be divided among them (`parallelize_model`): no device holds all of it.
    """
    path, adapter = _directories(config, base, with_weights=True)
    is_divided = ranks.mesh is not None
    where = config.model_copy(update={"device": "cpu"}) if is_divided else config
    return load_policy(where, path, alphabet_of(sources, seed, characters), seed, adapter, may_defer=is_divided)


def build_outline(config: Model, sources: list[Source], seed: int, base: Path | None) -> PolicyOutline:
    """The same policy without weights. It raises the errors of `build_policy` that can be found without them."""
    path, adapter = _directories(config, base, with_weights=False)
    return outline_policy(config, path, alphabet_of(sources, seed), adapter)


def _directories(config: Model, base: Path | None, with_weights: bool) -> tuple[Path | None, Path | None]:
    """The directories of the model and of its adapter."""
    path, adapter = (
        None if p is None else find_directory(p, base, with_weights) for p in (config.path, config.adapter)
    )
    if path is not None and is_adapter(path):
        raise UserError(
            f"model.path={config.path} is a PEFT adapter: set model.adapter={config.path} to train it further"
        )
    return path, adapter


def policy_updates(config: TrainConfig) -> int:
    """Updates of the policy in a whole run; none while only the critic is trained."""
    training, critic = config.training, config.algorithm.critic
    steps = training.steps - (critic.warmup_steps if critic is not None else 0)
    return steps * training.mini_batches * training.epochs


def learning_temperature(config: TrainConfig) -> float:
    """Temperature of the learner's log-probs: that of the samples, unless the loss sets its own (SSD)."""
    own = config.algorithm.own_temperature
    return config.rollout.temperature if own is None else own


def set_layers(model: nn.Module, layers: Layers, ranks: Ranks = SOLO) -> None:
    """Set how the decoder layers of a model that is trained compute. Call it before the model is divided."""
    set_fp8(model, layers == "fp8", ranks.device)
    if layers == "compiled":
        compile_layers(model)


def build_learner(config: TrainConfig, policy: PolicyModel, ranks: Ranks = SOLO) -> Learner:
    """The learner of the actor; its schedule ends with the last step. With several ranks the policy is divided among them."""
    training, total = config.training, policy_updates(config)
    set_activations(policy.module, training.activations)
    set_layers(policy.module, training.layers, ranks)
    parallelize_model(policy.module, ranks, config.parallel.offload)
    return Learner(
        policy.module,
        training.optimizer,
        total,
        training.token_budget,
        learning_temperature(config),
        training.share_prefixes,
        training.grad_norms,
        ranks,
        config.algorithm.router,
    )


def check_architecture(config: TrainConfig, policy: AnyPolicy, base: Path | None) -> None:
    """Refuse what the layers of the policy, or of the models beside it, cannot do."""
    check_policy_layers(config, policy.arch, _lora_of(config, policy))
    if isinstance(config.placement, RayPlacement):
        _check_others_divide(config, base)


def _check_others_divide(config: TrainConfig, base: Path | None) -> None:
    """Refuse a teacher or a process reward model that the learner's processes cannot divide."""
    process, reference = config.algorithm.process, config.algorithm.kl.reference
    others = {"algorithm.kl.reference.path": getattr(reference, "path", None)}
    others["algorithm.process.path"] = None if process is None else process.path
    for key, path in others.items():
        directory = None if path is None else find_directory(path, base, with_weights=False)
        if directory is None or is_adapter(directory) or why_not_native(read_config(directory)) is not None:
            continue
        try:
            check_model_divides(architecture_from_hf(read_config(directory), str(directory)), config.parallel)
        except UserError as error:
            raise UserError(f"{key}={path}: {error}") from error


def _lora_of(config: TrainConfig, policy: AnyPolicy) -> Lora | None:
    """The adapters of the policy; those of an outline are read from the adapter's directory."""
    if isinstance(policy, PolicyModel):
        return policy.lora
    return config.model.lora if policy.adapter is None else read_lora_config(policy.adapter)


def check_teacher(config: TrainConfig, policy: AnyPolicy, base: Path | None) -> None:
    """Refuse a teacher that cannot read the policy's tokens, or that gives no probability for some of them."""
    slot = config.algorithm.kl.reference
    if isinstance(slot, TeacherReference) and slot.path is not None:
        _check_one_teacher(
            config, policy, f"algorithm.kl.reference.path={slot.path}", find_directory(slot.path, base, False)
        )
    if isinstance(slot, TeachersReference):
        for name, path in slot.directories.items():
            what = f"algorithm.kl.reference.paths.{name}={path}"
            _check_one_teacher(config, policy, what, find_directory(path, base, False))


def _check_one_teacher(config: TrainConfig, policy: AnyPolicy, what: str, directory: Path) -> None:
    if is_adapter(directory):
        raise UserError(f"{what} is a PEFT adapter: merge it into its base first (burnish export)")
    arch = read_config(directory)
    if isinstance(config.algorithm.loss, GoldLoss):
        Spelling(Tokenizer.load(directory), what)
        Spelling(policy.tokenizer, "the policy's tokenizer")
        if reason := why_not_native(arch):
            raise UserError(f"{what}: loss gold needs the native decoder ({reason}): use another teacher")
        return
    if difference := Tokenizer.load(directory).difference_to(policy.tokenizer):
        raise UserError(
            f"{what} has another tokenizer than the policy, whose tokens it is to judge one by one: {difference}; use a teacher of "
            "the same family, algorithm=gold, or its answers as data.demonstrations"
        )
    if not config.algorithm.compares_vocabulary:
        return
    if reason := why_not_native(arch):
        raise UserError(
            f"{what}: algorithm.kl.loss.estimator=full needs the native decoder ({reason}): use k2 or k3+, or loss.support=sampled"
        )
    rows, own = int(arch["vocab_size"]), 0 if policy.arch is None else policy.arch.vocab_size
    if rows < own:
        raise UserError(
            f"{what} has {rows} rows for tokens and the policy {own}, so it says nothing of some that the policy may sample: "
            "use algorithm.kl.loss.estimator=k2, which asks for sampled tokens alone"
        )


def build_reference(
    config: TrainConfig, policy: PolicyModel, base: Path | None, ranks: Ranks = SOLO
) -> Reference | None:
    """The reference, or None if nothing uses one. Call it before the policy's weights change or are divided."""
    slot = config.algorithm.kl.reference
    if not slot.has_weights:
        return None
    # A copy rounds as the policy does, and starts with a KL of 0. On Ray it is in a process without a learner.
    set_fp8(policy.module, config.training.layers == "fp8", ranks.device)
    if isinstance(slot, TeacherReference) and slot.url is not None:
        return ServerTeacher(slot.url, slot.served_model)
    options = slot.model_dump(exclude={"name", "url", "served_model"})
    if options.get("path") is not None:
        options["path"] = str(find_directory(options["path"], base))
    if "paths" in options:
        assert isinstance(slot, TeachersReference)
        found = {name: str(find_directory(path, base)) for name, path in slot.directories.items()}
        options["paths"] = {
            name: ServerTeacher(path, key=f"algorithm.kl.reference.paths.{name}")
            if path in slot.servers
            else found.get(name)
            for name, path in slot.paths.items()
        }
    budget, temperature = config.training.token_budget, learning_temperature(config)
    if isinstance(config.algorithm.loss, GoldLoss):
        comparison = _group_comparison(config.algorithm.loss, policy, options["path"])
        return AlignedTeacher(policy.module, budget, temperature, comparison, ranks, options["path"])
    reference = make_reference(slot.name, policy.module, budget, temperature, ranks, **options)
    reference.top = config.algorithm.kl.loss.top
    loss = config.algorithm.loss
    if isinstance(loss, DivergenceLoss) and loss.support != "sampled":
        reference.divergence = Divergence(loss.alpha, loss.support, loss.top, loss.rest)
    return reference


def _group_comparison(loss: GoldLoss, policy: PolicyModel, path: str | None) -> GroupComparison:
    """How groups are compared with a teacher, and the tokens that both vocabularies have."""
    assert policy.arch is not None, "the config refuses any other model"
    rows = policy.arch.vocab_size if path is None else int(read_config(Path(path))["vocab_size"])
    student = Spelling(policy.tokenizer, "the policy's tokenizer")
    teacher = student if path is None else Spelling(Tokenizer.load(path), f"algorithm.kl.reference.path={path}")
    vocabulary = shared_vocabulary(student, teacher, policy.arch.vocab_size, rows)
    return GroupComparison(vocabulary, **slot_options(loss))


def build_critic(config: TrainConfig, policy: PolicyModel, ranks: Ranks = SOLO) -> Critic | None:
    """The critic, or None if no advantage uses values. Its backbone copies the policy as it is now; with LoRA, only the adapters."""
    critic, training = config.algorithm.critic, config.training
    if critic is None:
        return None
    total = training.steps * training.mini_batches * training.epochs * critic.updates
    model = ValueModel(policy.module)
    set_activations(model, training.activations)
    set_layers(model, training.layers, ranks)
    parallelize_model(model, ranks, config.parallel.offload)
    return Critic(model, critic.optimizer, total, training.token_budget, critic.clip, training.share_prefixes, ranks)


def build_runner(config: TrainConfig, policy: PolicyModel, engine: Engine, base: Path | None) -> RolloutRunner:
    """The driver of the configured environment."""
    if config.environment.max_turns > 1 and (paged := find_paged_engine(engine)) is not None:
        paged.num_contexts = max(stage.n * stage.prompts for stage in config.rollout.all_stages())
    make_workers = ray_environment_workers(config.environment) if isinstance(config.placement, RayPlacement) else None
    environment, template = config.environment, config.data.template
    marks = config.algorithm.auxiliary.observations is not None
    return build_environment_driver(environment, policy, engine, config.seed, base, template, make_workers, marks)


def ray_environment_workers(environment: Environment) -> Callable[[], ObjectWorkers]:
    """Return a function that starts worker processes for environments on all machines of the cluster."""

    def start() -> ObjectWorkers:
        import ray

        from burnish.distributed.environment_actors import RayObjectWorkers, actor_starter  # needs the extra [ray]

        num_machines = sum(node["Alive"] for node in ray.nodes())
        starter = actor_starter(num_cpus=0, scheduling_strategy="SPREAD")
        limits, deadline_s = worker_limits(environment), environment.deadline_s
        return RayObjectWorkers(starter, num_machines, num_workers(environment), limits, deadline_s=deadline_s)

    return start


def build_environment_driver(
    environment: Environment,
    policy: PolicyModel,
    engine: Engine,
    seed: int,
    base: Path | None = None,
    template: Template | None = None,
    make_workers: Callable[[], ObjectWorkers] | None = None,
    marks_bodies: bool = False,
) -> RolloutRunner:
    """The driver of an environment; a trajectory is limited by the model's positions and by `environment.max_tokens`.

    With `marks_bodies` trajectories say which tokens are the bodies of messages of the environment.
    """
    factory, host = environment_of(environment, policy.tokenizer, base, make_workers)
    return RolloutRunner(
        engine,
        factory,
        policy.tokenizer,
        seed,
        environment.max_turns,
        policy.max_positions,
        environment.max_tokens,
        host=host,
        renderer=environment_renderer(environment, policy.tokenizer, template or Template(), marks_bodies)
        if host is not None
        else None,
        retries=environment.retries,
        endpoint=recording_endpoint(environment, policy.tokenizer, template or Template(), marks_bodies),
        trained_calls=environment.agent_option(TRAIN_CALLS),
        credit=environment.agent_option(CREDIT),
    )


def recording_endpoint(
    environment: Environment, tokenizer: Tokenizer, template: Template, marks_bodies: bool = False
) -> RecordingEndpoint | None:
    """The endpoint that agents call; None for environments that do not call the model themselves."""
    if environment.name != AGENT:
        return None
    from burnish.gateway.endpoint import RecordingEndpoint  # needs the extra [agents]
    from burnish.gateway.session_renderer import SessionRenderer

    name = environment.call_format
    try:
        written = call_format(name if name != "auto" else detect_format(tokenizer))
    except UserError:
        if name != "auto":
            raise
        written = None  # the chat template names no format: calls with tools are refused with the reason
    return RecordingEndpoint(SessionRenderer(tokenizer, template, environment.history, written, marks_bodies))


def check_process_reward_model(config: TrainConfig, policy: AnyPolicy, base: Path | None) -> None:
    """Refuse a process reward model that cannot read the policy's tokens."""
    process = config.algorithm.process
    if process is None or process.path is None:
        return
    directory = find_directory(process.path, base, with_weights=False)
    if not Tokenizer.load(directory).has_same_vocabulary(policy.tokenizer):
        raise UserError(
            f"algorithm.process.path={process.path} has another tokenizer than the policy, whose tokens it is to reward one by one"
        )


def build_process_reward_model(
    config: TrainConfig, policy: PolicyModel, base: Path | None, ranks: Ranks = SOLO
) -> ProcessRewardModel | None:
    """The process reward model, or None if no advantage uses one: a copy of the policy as it is now, or a model of its own.

    Call it before the policy's weights change or are divided. If the policy has adapters, the model has its own.
    """
    process, training = config.algorithm.process, config.training
    if process is None:
        return None
    model = _process_reward_module(config, process.path, policy, base)
    # Before the reference copies the model: both must round alike.
    set_fp8(model, training.layers == "fp8", ranks.device)
    start = Reference(model, training.token_budget, 1.0, ranks)
    set_activations(model, training.activations)
    set_layers(model, training.layers, ranks)
    parallelize_model(model, ranks, config.parallel.offload)
    total, budget = training.steps * process.mini_batches, training.token_budget
    return ProcessRewardModel(model, start, process.optimizer, total, budget, training.share_prefixes, ranks)


def _process_reward_module(config: TrainConfig, path: str | None, policy: PolicyModel, base: Path | None) -> nn.Module:
    if path is None:
        return trainable_copy(policy.module)
    device = next(policy.module.parameters()).device
    own = config.model.model_copy(
        update={"adapter": None, "lora": policy.lora, "device": "cpu" if device.type == "meta" else str(device)}
    )
    return load_policy(own, find_directory(path, base), None, config.seed, may_defer=device.type == "meta").module
