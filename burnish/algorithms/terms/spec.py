"""Records of aggregation, KL, reference, entropy and auxiliary terms."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from burnish.config.errors import is_server_url
from burnish.config.records import Record, Slot, choice


class Aggregation(Slot):
    """How per-token losses become one number; counts are those of the whole mini-batch."""

    formula: ClassVar[str] = (
        "L = sum_t weight_t L_t, the weights fixed before the mini-batch is split; all sequences of a trajectory are one seq"
    )
    name: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
    ]
    """What is averaged and what is summed. prompt-mean: over the tokens of each prompt's answers, then over prompts (SkyRL)."""
    horizon: int | None = Field(None, ge=1)
    """The constant divisor of `seq-mean-token-sum-norm`; null means the most tokens the model can write in an episode: rollout.max_tokens,
    times environment.max_turns, at most environment.max_tokens."""


# --- The reference


HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")


def check_server_url(key: str, url: str) -> None:
    """Refuse what is no address of a server; errors name `key`."""
    if not is_server_url(url):
        raise ValueError(f"{key}={url} is no address of a server; write it as http://host:8000")


class ReferenceRecord(Slot):
    """A choice for `kl.reference`."""

    has_weights: ClassVar[bool] = True
    """Whether a model with its own weights computes the reference's log-probs."""

    @property
    def servers(self) -> list[str]:
        """Addresses of the servers that compute log-probs, instead of models in the learner's process."""
        return []

    @property
    def is_served(self) -> bool:
        """Whether servers compute all log-probs, so that no model is loaded."""
        return bool(self.servers)


class NoReference(ReferenceRecord):
    """No reference: nothing is loaded."""

    has_weights: ClassVar[bool] = False
    name: Literal["none"] = "none"


class FrozenReference(ReferenceRecord):
    """The weights the run started from."""

    formula: ClassVar[str] = "ref = the policy before the first step"
    name: Literal["frozen"] = "frozen"


class EmaReference(ReferenceRecord):
    """An exponential moving average of the policy, in float32."""

    formula: ClassVar[str] = "ref <- (1 - eta) ref + eta policy, after every optimizer step"
    paper: ClassVar[str] = "T1 (2501.11651)"
    name: Literal["ema"] = "ema"
    eta: float = Field(0.01, gt=0, le=1)
    """Weight of the policy at each update; 1 makes the reference a copy."""


class HardSyncReference(ReferenceRecord):
    """A copy of the policy, renewed every `every` steps."""

    formula: ClassVar[str] = "ref <- policy, once every `every` steps"
    paper: ClassVar[str] = "DeepSeek-R1 (2501.12948)"
    name: Literal["hard_sync"] = "hard_sync"
    every: int = Field(400, ge=1)
    """Steps between two copies."""


class IterateReference(ReferenceRecord):
    """The policy at the start of the current iteration; each iteration also resets the optimizer state."""

    formula: ClassVar[str] = "ref <- policy and a new optimizer state, every `every` steps"
    paper: ClassVar[str] = "Kimi k1.5 (2501.12599)"
    name: Literal["iterate"] = "iterate"
    every: int = Field(1, ge=1)
    """Steps per iteration."""


class TeacherReference(ReferenceRecord):
    """Another model, usually a larger one; KL to it is distillation."""

    formula: ClassVar[str] = "ref = the model of a directory, or behind a server, with the policy's tokenizer"
    paper: ClassVar[str] = "GKD (2306.13649), MiniLLM (2306.08543)"
    rollout_options: ClassVar[tuple[str, ...]] = ("url", "served_model")
    name: Literal["teacher"] = "teacher"
    path: str | None = None
    """A Hugging Face directory with exactly the policy's tokenizer; null is the model the run starts from."""
    url: str | None = None
    """A server with OpenAI's API that echoes the log-probs of token ids (`burnish serve`, vLLM), instead of a path."""
    served_model: str | None = None
    """With url: the name of the model there; null is the only one."""

    @model_validator(mode="after")
    def _check_one_place(self) -> TeacherReference:
        if self.url is not None:
            check_server_url("url", self.url)
        if self.path is not None and self.url is not None:
            raise ValueError("a teacher has a path or a url: remove one of them")
        if self.served_model is not None and self.url is None:
            raise ValueError("served_model names a model of the server at url: set url, or path instead")
        return self

    @property
    def servers(self) -> list[str]:
        return [] if self.url is None else [self.url]


class TeachersReference(ReferenceRecord):
    """Several teachers: each row names its own, and one mean is taken over all rows."""

    formula: ClassVar[str] = "ref of row i = the model that paths names for the row's value of `column`"
    paper: ClassVar[str] = "multi-teacher on-policy distillation (verl)"
    name: Literal["teachers"] = "teachers"
    paths: dict[str, str | None] = Field(default_factory=dict)
    """For each value of the column a Hugging Face directory with exactly the policy's tokenizer, or the address (http://...) of a server as
    kl.reference.url of one teacher; null is the model the run starts from."""
    column: str = "data_source"
    """The column of the training rows that names the teacher; data_source is the name of a row's source."""

    @model_validator(mode="after")
    def _check_servers(self) -> TeachersReference:
        for name, path in self.paths.items():
            if path is not None and ("://" in path or HOST_AND_PORT.fullmatch(path)):
                check_server_url(f"paths.{name}", path)
        return self

    @property
    def servers(self) -> list[str]:
        return [path for path in self.paths.values() if path is not None and is_server_url(path)]

    @property
    def is_served(self) -> bool:
        return 0 < len(self.servers) == len(self.paths)

    @property
    def directories(self) -> dict[str, str]:
        """The teachers that are loaded from a directory."""
        return {name: path for name, path in self.paths.items() if path is not None and path not in self.servers}


class PolicyReference(ReferenceRecord):
    """The policy itself at the start of each step, which reads another context (kl.context). The optimizer state goes on."""

    formula: ClassVar[str] = "ref = the policy before the first update of a step"
    paper: ClassVar[str] = "OPSD (prime-rl), SDFT (2601.19897)"
    name: Literal["policy"] = "policy"


class RolloutReference(ReferenceRecord):
    """The policy that sampled, by the engine's log-probs: a leash that loads no model. Estimator k2 is the squared anchor."""

    formula: ClassVar[str] = (
        "ref_t = behaviour_t; kl.loss {estimator: k2, coef: 2 kappa} adds kappa (logp_t - behaviour_t)^2"
    )
    paper: ClassVar[str] = "Kimi K2.5, prime-rl (kappa 0.001)"
    has_weights: ClassVar[bool] = False
    name: Literal["rollout"] = "rollout"


REFERENCE_RECORDS: tuple[type[ReferenceRecord], ...] = (
    NoReference,
    FrozenReference,
    EmaReference,
    HardSyncReference,
    IterateReference,
    TeacherReference,
    TeachersReference,
    PolicyReference,
    RolloutReference,
)
ReferenceSlot: Any = choice(*REFERENCE_RECORDS, plugin=False)


# --- What a teacher reads


class ContextRecord(Slot):
    """A choice for `kl.context`: what the reference reads in place of the prompt. The answer's tokens do not change."""

    place: Literal["system", "user"] = "user"
    """Where the text is added: a system message before all others, or the end of the last user message. A prompt without a chat template
    gets it in front or behind."""
    text: str = "{context}"
    """The added text; `{context}` is replaced by the demonstration, the success or the feedback."""

    @model_validator(mode="after")
    def _check_placeholder(self) -> ContextRecord:
        if "{context}" not in self.text:
            raise ValueError(f"text {self.text!r} has no {{context}}, so the teacher would read nothing new")
        return self


class PromptContext(Slot):
    """The reference reads the same prompt as the policy."""

    formula: ClassVar[str] = "ref_t = log q(y_t | x, y_<t)"
    name: Literal["prompt"] = "prompt"


class DemonstrationContext(ContextRecord):
    """The reference also reads a demonstration from a column of the row."""

    formula: ClassVar[str] = "ref_t = log q(y_t | x + the demonstration, y_<t)"
    paper: ClassVar[str] = "SDFT (2601.19897), OPSD (prime-rl)"
    name: Literal["demonstration"] = "demonstration"
    text: str = "\n\nHere is a demonstration of a good answer:\n\n{context}\n\nNow answer with a response of your own."
    """The added text; `{context}` is replaced by the demonstration."""
    column: str | None = None
    """The column of the training rows with the demonstration: a text, or messages whose last one is it. `answer` is the expected answer."""
    skip: int = Field(0, ge=0)
    """This many first tokens of an answer leave the loss: the teacher may only repeat there how a demonstration begins."""


class SuccessContext(ContextRecord):
    """The reference also reads the first other sample of the group that succeeded, or what the environment said at the end."""

    formula: ClassVar[str] = (
        "context_i = the first j != i of the group with r_j >= threshold; a row without one is not taught"
    )
    paper: ClassVar[str] = "SDPO (2601.20802)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["success"] = "success"
    text: str = "\n\nThis is what is known of earlier attempts:\n\n{context}\n\nNow solve the problem."
    """The added text; `{context}` is replaced by the success, the feedback or both."""
    threshold: float = 1.0
    """A sample succeeded if its reward is at least this."""
    feedback: bool = False
    """Add what the environment said at the end of the sample's own episode; such a row is taught without a success too."""


CONTEXT_RECORDS: tuple[type[Slot], ...] = (PromptContext, DemonstrationContext, SuccessContext)
ContextSlot: Any = choice(*CONTEXT_RECORDS, plugin=False)


# --- KL

Estimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


class KlTerm(Record):
    """A KL estimate with a coefficient."""

    coef: float = Field(0.0, ge=0)
    """Weight of the term; 0 turns it off."""
    clamp: float | None = Field(None, gt=0)
    """Clamp the KL of each token to -clamp .. clamp before anything is averaged; null does not clamp."""


class KlLoss(KlTerm):
    """A KL estimate in the loss, with gradient."""

    estimator: Estimator | Literal["full"] = "k3"
    """With d = logp - ref: k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d)+d-1. With a plus (`k3+`) the value is
    that of the estimator and the gradient that of k2. `full` is the exact KL over the whole vocabulary at every token.
    """
    top: int | None = Field(None, ge=1)
    """With estimator full: sum over the policy's k likeliest tokens and treat all others as one token; null sums over the vocabulary."""
    is_corrected: bool = False
    """Multiply the KL by the ratio to the policy that sampled: unbiased after several updates on a batch (DeepSeek-V3.2)."""

    @model_validator(mode="after")
    def _check_options_fit_estimator(self) -> KlLoss:
        if self.top is not None and self.estimator != "full":
            raise ValueError(f"top belongs to estimator full; {self.estimator} uses the sampled token alone")
        if self.is_corrected and self.estimator == "full":
            raise ValueError("is_corrected weights the sampled token, and estimator=full sums over all tokens")
        if self.is_corrected and self.estimator.endswith("+"):
            raise ValueError(
                f"is_corrected makes the gradient of {self.estimator[:-1]} unbiased by itself; with {self.estimator}, which "
                f"borrows that of k2, it would count twice: set estimator={self.estimator[:-1]} or is_corrected=false"
            )
        return self


class KlReward(KlTerm):
    """A KL estimate in the reward, without gradient."""

    estimator: Estimator = "k1"
    """As in kl.loss. Estimators with a plus are refused: they change only the gradient, and there is none here."""
    policy: Literal["old", "rollout"] = "old"
    """Whose log-probs are compared with the reference's: the trainer's before the first update, or those that the engine sampled with."""
    center: Literal["none", "token", "sequence"] = "none"
    """Centre the KL first. token: subtract the mean over all tokens (T1). sequence: subtract the mean of the sequences' summed KL."""


class KlAdvantage(KlTerm):
    """The k1 estimate of the KL, subtracted from each token's advantage after its normalisation (slime), without gradient."""


class KlTarget(Record):
    """Ziegler's controller (1909.08593): the coefficient in the reward rises while the KL is above a target and falls below it."""

    target: float = Field(0.1, gt=0)
    """The target mean KL per token."""
    horizon: int = Field(10000, ge=1)
    """Sequences after which a KL that is 20% or more off the target has changed the coefficient by 20%."""


class Kl(Record):
    """KL to a reference, in the loss or in the reward (Schulman's estimators)."""

    loss: KlLoss = KlLoss()
    """Added to the loss, with gradient."""
    reward: KlReward = KlReward()
    """Subtracted from each token's reward, without gradient."""
    advantage: KlAdvantage = KlAdvantage()
    """Subtracted from each token's advantage: A_it - coef (old_it - ref_it)."""
    adaptive: KlTarget | None = None
    """Adapt reward.coef to the KL, starting from its value here; null keeps it fixed."""
    reference: ReferenceSlot = NoReference()
    """The reference: none, the weights the run started from, one that follows the policy, or teachers."""
    context: ContextSlot = PromptContext()
    """What the reference reads before the answer: the policy's own prompt, or a prompt with more in it (self-distillation)."""

    @model_validator(mode="after")
    def _check_adaptive_coef(self) -> Kl:
        if self.adaptive is not None and self.reward.coef == 0:
            raise ValueError("kl.adaptive multiplies kl.reward.coef, which is 0 and would stay 0: set kl.reward.coef")
        return self


# --- Entropy and supervised terms


class EntropyTarget(Record):
    """Skywork-OR1's controller (2505.22312): the coefficient rises while entropy is at or below the target and falls above it."""

    target: float = Field(0.2, gt=0)
    """The target mean entropy per token; the bonus applies only at or below it."""
    delta: float = Field(0.005, gt=0)
    """How much one step changes the coefficient."""


class Entropy(Record):
    """Entropy bonus, and training on high-entropy tokens only."""

    coef: float = Field(0.0, ge=0)
    """Weight of the mean entropy subtracted from the loss; the start value if adaptive."""
    adaptive: EntropyTarget | None = None
    """Adapt the coefficient to the entropy; null keeps it fixed."""
    top_share: float | None = Field(None, gt=0, lt=1)
    """Train only on this share of tokens, those of highest entropy (2506.01939); denominators still count all."""


class Router(Record):
    """The routers of a model with experts. A model without experts refuses this section."""

    balance: float = Field(0.0, ge=0)
    """Weight of the load-balance loss, computed for each sequence by itself (DeepSeek-V3, 2412.19437): the mean over sequences and layers of
    sum_e f_e P_e, where f_e is the share of tokens that chose expert e by its even share, and P_e the mean score of e."""
    engine_experts: Literal["ignore", "compare", "replay"] = "ignore"
    """The experts that the engine chose for each token. compare: they are recorded, and the metric router/agreement says which share of them the
    learner's routers choose too. replay: the learner computes with the engine's experts and its own scores of them (R3, 2510.11370), which
    keeps ratios meaningful if the weights or the rounding have changed the choice. Needs the native engine."""
    learner_experts: Literal["ignore", "replay"] = "ignore"
    """The experts that the learner chose for each token in its pass of old log-probs. replay: all updates of the batch compute with them and with
    the current scores of them (R2 of verl), so that an update moves no token of a later mini-batch to other experts. Any engine will do. Needs
    training.mini_batches or training.epochs above 1."""

    @model_validator(mode="after")
    def _check_one_replay(self) -> Router:
        if self.engine_experts == self.learner_experts == "replay":
            raise ValueError(
                "engine_experts=replay (R3) and learner_experts=replay (R2) give the same updates different experts: set one of them to "
                "ignore, or engine_experts to compare"
            )
        return self


class Chord(Record):
    """Demonstrations with a schedule and a gate: L = (1 - mu) L_rl + mu L_sft, with mu from a schedule of steps (CHORD, Trinity-RFT)."""

    gate: Literal["phi", "importance", "none"] = "phi"
    """Weight of a demonstrated token, without gradient: p (1 - p), which spares what the policy is sure of and what it has no idea of; p; or 1."""
    peak: float = Field(0.1, ge=0, le=1)
    """mu after the warm-up."""
    valley: float = Field(0.1, ge=0, le=1)
    """mu after the decay."""
    warmup: int = Field(0, ge=0)
    """Steps over which mu rises from 0 to peak."""
    decay: int = Field(0, ge=0)
    """Steps after the warm-up over which mu goes from peak to valley, along a cosine."""

    @model_validator(mode="after")
    def _check_mu_is_used(self) -> Chord:
        if max(self.peak, self.valley) == 0:
            raise ValueError("chord with peak 0 and valley 0 never imitates: set one of them, or chord=null")
        if self.decay == 0 and self.peak != self.valley and self.warmup == 0:
            raise ValueError(
                "chord.peak is never reached without warmup and decay: set decay, or peak to the value of valley"
            )
        return self


class Observations(Record):
    """Weights of the NLL of what the environment said, by the role of the message (ECHO, prime-rl)."""

    tool: float = Field(0.1, ge=0)
    """Weight of results of tools, and of text inside the assistant's turn such as `<information>`."""
    user: float = Field(0.0, ge=0)
    """Weight of messages of the user after the first answer: a simulated user, a game."""
    system: float = Field(0.0, ge=0)
    """Weight of system messages after the first answer."""

    @model_validator(mode="after")
    def _check_a_role_counts(self) -> Observations:
        if max(self.tool, self.user, self.system) == 0:
            raise ValueError("observations with weight 0 for every role add nothing: set one, or observations=null")
        return self


class Auxiliary(Record):
    """Supervised terms added to the policy loss."""

    positive_nll: float = Field(0.0, ge=0)
    """Weight of the mean NLL of right answers (VAPO, 2504.05118: 0.1)."""
    sft: float = Field(0.0, ge=0)
    """Weight of the mean NLL of demonstrations."""
    chord: Chord | None = None
    """Demonstrations by CHORD's schedule and gate instead of a fixed weight."""
    observations: Observations | None = None
    """NLL of what the environment said after the first answer: sum of weight x NLL / number of such tokens in the mini-batch (ECHO)."""

    @property
    def imitates(self) -> bool:
        """Whether data.demonstrations are imitated beside the policy loss."""
        return self.sft > 0 or self.chord is not None

    @model_validator(mode="after")
    def _check_one_weight(self) -> Auxiliary:
        if self.sft > 0 and self.chord is not None:
            raise ValueError(
                "auxiliary.chord weighs demonstrations by its own schedule: set auxiliary.sft=0, or chord=null"
            )
        return self
