"""From scored rollouts to mini-batches: filters, columns, advantages, weights, and a user's own functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.spec import Algorithm
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext

HORIZON = 7
NO_MODELS = StepContext(cast(Any, None))
"""For steps that ask no model."""


def num_in_the_loss(batch: Batch) -> Tensor:
    """[S] tokens of each sequence."""
    return torch.stack([part.sum() for part in batch.loss_mask.split(batch.lengths.tolist())])


def make_batch(
    lengths: list[int], groups: list[int], rewards: list[float], truncated: list[int] | None = None
) -> Batch:
    """One prompt token before `lengths` written ones; old and reference log-probs are counted off per token."""
    mask = torch.tensor([i > 0 for n in lengths for i in range(n + 1)], dtype=torch.bool)
    return Batch(
        tokens=torch.arange(mask.numel()),
        offsets=offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64) + 1),
        token={"action_mask": mask, "loss_mask": mask.clone()},
        sequence={
            "group_ids": torch.tensor(groups, dtype=torch.int64),
            "reward": torch.tensor(rewards, dtype=torch.float64),
            "truncated": torch.tensor([i in (truncated or []) for i in range(len(lengths))], dtype=torch.bool),
        },
    )


def example() -> Batch:
    """A mixed group, a constant one, a mixed one; ids neither dense nor sorted; the second sample is truncated."""
    return make_batch([2, 1, 3, 2, 1, 2], [8, 8, 3, 3, 5, 5], [1, 0, 1, 1, 0.25, 0.75], truncated=[1])


class Scorer:
    """Stands where the learner or the reference stands, and counts its calls."""

    is_policy = False

    def __init__(self, slope: float) -> None:
        self.slope, self.calls = slope, 0

    def logprobs(self, batch: Batch) -> Tensor:
        return self.outputs(batch, frozenset())["logp"]

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        self.calls += 1
        logp = torch.where(batch.action_mask, -self.slope * batch.positions.double(), 0.0)
        return {"logp": logp, **{name: logp.exp() for name in needs}}


def pipeline_of(algorithm: dict[str, Any], num_updates: int = 1, base: Path | None = None) -> AlgorithmPipeline:
    return AlgorithmPipeline(Algorithm.model_validate(algorithm), num_updates, base)


def prepared(it: AlgorithmPipeline, batch: Batch, reference: Scorer | None = None) -> tuple[Batch, dict[str, float]]:
    context = StepContext(cast(Any, Scorer(0.5)), cast(Any, reference))
    return it.prepare(batch, context), context.metrics


@pytest.fixture
def plug_in(tmp_path: Path) -> Callable[[str], str]:
    """A function's source to the name it has in a config; each test has its own folder."""

    def write(source: str) -> str:
        (tmp_path / "mine.py").write_text("import torch\n\n\n" + source)
        return f"{tmp_path / 'mine.py'}:f"

    return write


# --- the list of steps ---------------------------------------------------------------------------------------------------

KL = {"reward": {"estimator": "k1", "coef": 0.1}, "reference": "frozen"}
OF_TEACHER = {
    "advantage": "none",
    "ratio": "none",
    "clip": "none",
    "loss": "teacher_surrogate",
    "kl": {"reference": "teacher"},
}
STEPS: list[tuple[dict[str, Any], int, list[str]]] = [
    ({}, 1, ["token_rewards", "advantages"]),
    ({}, 2, ["old_logprobs", "token_rewards", "advantages"]),
    ({"kl": KL}, 1, ["old_logprobs", "reference_logprobs", "token_rewards", "kl_in_reward", "advantages"]),
    ({"correction": "bypass"}, 2, ["bypass_anchor", "token_rewards", "advantages"]),
    ({"correction": "decoupled_k3_rs"}, 1, ["old_logprobs", "correction", "token_rewards", "advantages"]),
    ({"replay": {}}, 1, ["old_logprobs", "replay_anchor", "token_rewards", "advantages"]),
    ({"advantage": "gae", "critic": {}}, 1, ["values", "token_rewards", "advantages"]),
    (OF_TEACHER, 1, ["reference_logprobs", "author_logprobs", "token_rewards", "advantages"]),
]


@pytest.mark.parametrize(("algorithm", "num_updates", "names"), STEPS)
def test_an_option_adds_its_steps_and_a_plain_algorithm_has_no_others(
    algorithm: dict[str, Any], num_updates: int, names: list[str]
) -> None:
    assert [step.name for step in pipeline_of(algorithm, num_updates).preparation] == names


def test_filters_are_steps_in_their_order() -> None:
    pipeline = pipeline_of({"filters": ["zero_signal", "overlong"]})
    assert [one.name for one in pipeline.group_filters] == ["zero_signal"]
    assert [step.name for step in pipeline.sample_filters] == ["overlong", "drop_empty"]


# --- select ------------------------------------------------------------------------------------------------------------


def test_select_without_filters_keeps_everything() -> None:
    assert pipeline_of({}).select(example()).tokens.tolist() == example().tokens.tolist()


def test_select_drops_whole_groups_and_leaves_samples_to_trim() -> None:
    kept = pipeline_of({"filters": ["overlong", "zero_signal"]}).select(example())
    assert kept.sequence["group_ids"].tolist() == [8, 8, 5, 5]
    assert kept.sequence["reward"].tolist() == [1, 0, 0.25, 0.75]
    assert torch.equal(kept.loss_mask, kept.action_mask)


def test_select_may_leave_nothing() -> None:
    batch = pipeline_of({"filters": ["zero_signal"]}).select(make_batch([1, 2], [0, 0], [1, 1]))
    assert (batch.num_sequences, batch.num_tokens) == (0, 0)


# --- prepare -----------------------------------------------------------------------------------------------------------


def test_prepare_adds_one_advantage_a_sequence_and_no_column_of_tokens() -> None:
    batch, stats = prepared(pipeline_of({"advantage": {"name": "grpo", "std": "none"}}), example())
    assert batch.sequence["advantages"].tolist() == [0.5, -0.5, 0, 0, -0.25, 0.25]
    assert stats == {}
    assert set(batch.token) == set(example().token)


def test_prepare_adds_one_advantage_a_token_for_an_estimator_of_returns() -> None:
    batch, _ = prepared(pipeline_of({"advantage": {"name": "reinforce", "gamma": 0.5}}), make_batch([3], [0], [1]))
    assert batch.token["advantages"].tolist() == [0, 0.25, 0.5, 1]
    assert "advantages" not in batch.sequence


@pytest.mark.parametrize(
    ("algorithm", "num_updates", "needed"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"kl": {"reward": {"estimator": "k1", "coef": 0.1}, "reference": "frozen"}}, 1, True),
        ({"kl": {"loss": {"coef": 0.1}, "reference": "frozen"}}, 1, False),
    ],
)
def test_old_log_probs_are_computed_only_where_something_reads_them(
    algorithm: dict[str, Any], num_updates: int, needed: bool
) -> None:
    actor = Scorer(0.5)
    context = StepContext(cast(Any, actor), cast(Any, Scorer(0.25)))
    batch = pipeline_of(algorithm, num_updates).prepare(example(), context)
    assert actor.calls == int(needed)
    assert ("old_logp" in batch.token) == needed
    if needed:
        assert torch.equal(batch.token["old_logp"], actor.logprobs(batch))


def test_kl_in_the_reward_reaches_the_advantages() -> None:
    algorithm = {
        "advantage": {"name": "grpo", "std": "none"},
        "kl": {"reward": {"estimator": "k1", "coef": 0.1}, "reference": "frozen"},
    }
    batch, stats = prepared(pipeline_of(algorithm), make_batch([2, 1], [0, 0], [1, 0]), Scorer(0.25))
    # d = -0.25 * position: the sums over written tokens are -0.75 and -0.25, the token means -0.375 and -0.25.
    assert batch.token["token_rewards"].tolist() == pytest.approx([0, 0.025, 1.05, 0, 0.025])
    assert batch.sequence["advantages"].tolist() == pytest.approx([0.525, -0.525])
    assert stats == {"kl_reward": pytest.approx(-0.3125), "kl_coef": 0.1}


def test_bypass_is_anchored_on_the_engine_whatever_else_is_computed() -> None:
    """Log-probs for the optimal token baseline, or for a reference that is the policy, do not take the anchor's place."""
    batch = example()
    batch = batch.with_token(behaviour_logp=torch.where(batch.action_mask, -7.0, 0.0).double())
    reference = Scorer(0.25)
    reference.is_policy = True
    kl = {"loss": {"coef": 0.1}, "reference": "iterate"}
    for algorithm in ({"kl": kl}, {"kl": kl, "advantage": "otb"}):
        found, _ = prepared(pipeline_of({**algorithm, "correction": "bypass"}, num_updates=2), batch, reference)
        assert torch.equal(found.token["old_logp"], batch.token["behaviour_logp"])
        assert torch.equal(found.token["ref_logp"], reference.logprobs(batch))


def test_what_a_correction_rejects_leaves_the_loss_and_stays_in_its_groups_baseline() -> None:
    batch = example()
    far = batch.sequence_ids == 1  # the second of the first group
    own = torch.where(batch.action_mask, -0.5 * batch.positions.double(), 0.0)
    batch = batch.with_token(behaviour_logp=torch.where(far & batch.action_mask, own - 3, own))
    grpo = {"advantage": {"name": "grpo", "std": "none"}}
    found, stats = prepared(pipeline_of({**grpo, "correction": "decoupled_k3_rs"}), batch)
    assert found.loss_mask.tolist() == (batch.loss_mask & ~far).tolist()
    assert stats["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 6)
    assert found.sequence["advantages"].tolist() == [0.5, -0.5, 0, 0, -0.25, 0.25]


# --- trim --------------------------------------------------------------------------------------------------------------


def test_trim_removes_truncated_samples_whose_rewards_still_counted() -> None:
    it = pipeline_of({"filters": ["overlong"], "advantage": {"name": "grpo", "std": "none"}})
    batch, _ = prepared(it, example())
    trimmed = it.trim(batch, NO_MODELS)
    assert trimmed.sequence["group_ids"].tolist() == [8, 3, 3, 5, 5]
    assert trimmed.sequence["advantages"].tolist() == [0.5, 0, 0, -0.25, 0.25]
    assert bool(trimmed.loss_mask[trimmed.action_mask].all())


def test_a_users_filter_of_tokens_leaves_the_rest_of_the_sequence(plug_in: Callable[[str], str]) -> None:
    name = plug_in("def f(batch, first=1):\n    return batch.positions <= first\n")
    it = pipeline_of({"filters": [{"name": name, "options": {"first": 2}}]})
    trimmed = it.trim(make_batch([3, 1], [0, 0], [1, 0]), NO_MODELS)
    assert trimmed.loss_mask.tolist() == [False, True, True, False, False, True]
    assert trimmed.action_mask.tolist() == [False, True, True, True, False, True]


def test_a_users_filter_of_sequences_removes_them(plug_in: Callable[[str], str]) -> None:
    it = pipeline_of({"filters": ["overlong", plug_in("def f(batch):\n    return batch.sequence['reward'] < 1\n")]})
    trimmed = it.trim(example(), NO_MODELS)
    assert trimmed.sequence["reward"].tolist() == [0.25, 0.75]  # 0 is below 1 too, but was truncated


def test_a_users_filter_of_the_wrong_shape_is_named(plug_in: Callable[[str], str]) -> None:
    name = plug_in("def f(batch):\n    return torch.ones(2, dtype=torch.bool)\n")
    with pytest.raises(UserError, match=r"filter .*mine\.py:f returned torch\.bool of shape \(2,\).*\[6\].*\[17\]"):
        pipeline_of({"filters": [name]}).trim(example(), NO_MODELS)


# --- a user's advantage and loss ---------------------------------------------------------------------------------------


def test_a_users_advantage_may_be_one_a_sequence_or_one_a_token(plug_in: Callable[[str], str]) -> None:
    name = plug_in(
        "def f(batch, scale, tokens=False):\n"
        "    rewards = batch.token['token_rewards'] * scale\n"
        "    return rewards if tokens else batch.sequence['reward'] * scale\n"
    )
    batch, _ = prepared(pipeline_of({"advantage": {"name": name, "options": {"scale": 2.0}}}), example())
    assert batch.sequence["advantages"].tolist() == [2, 0, 2, 2, 0.5, 1.5]
    batch, _ = prepared(
        pipeline_of({"advantage": {"name": name, "options": {"scale": 2.0, "tokens": True}}}), example()
    )
    assert torch.equal(batch.token["advantages"], 2 * batch.token["token_rewards"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return torch.ones(3)", r"advantage .*mine\.py:f returned shape \(3,\); .*\[6\] or a token \[17\]"),
        ("return torch.ones(6, 1)", r"returned shape \(6, 1\)"),
        ("return batch.sequence['reward'] / 0", r"advantage .*mine\.py:f gave values that are not finite.*1\.0, 0\.0"),
        ("return batch.sequence['reward'] * 1e30", "too large to be squared in float32"),
    ],
)
def test_a_users_advantage_that_cannot_be_used_is_named(plug_in: Callable[[str], str], body: str, message: str) -> None:
    it = pipeline_of({"advantage": plug_in(f"def f(batch):\n    {body}\n")})
    with pytest.raises(UserError, match=message):
        prepared(it, example())


@pytest.mark.parametrize("body", ["batch.sequence['reward'] * 1e307", "-1e10 * batch.action_mask.double()"])
def test_a_users_shaper_that_leaves_the_range_of_rewards_is_named(plug_in: Callable[[str], str], body: str) -> None:
    it = pipeline_of({"shaping": [plug_in(f"def f(batch, step):\n    return {body}\n")]})
    with pytest.raises(UserError, match=r"shaper .*mine\.py:f returned a reward out of range: 1e\+"):
        it.shape(example(), 1, 8)


def test_an_advantage_never_carries_a_gradient(plug_in: Callable[[str], str]) -> None:
    it = pipeline_of(
        {"advantage": plug_in("def f(batch):\n    return batch.sequence['reward'].requires_grad_() * 2\n")}
    )
    batch, _ = prepared(it, example())
    assert not batch.sequence["advantages"].requires_grad


def test_a_users_loss_is_minimised_with_its_options(plug_in: Callable[[str], str]) -> None:
    name = plug_in("def f(logp, anchor, advantages, power=1.0):\n    return -(advantages * logp) ** power\n")
    it = pipeline_of({"ratio": "none", "clip": "none", "loss": {"name": name, "options": {"power": 2.0}}})
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    columns = {"weight": torch.tensor([0.5, 1.0]), "advantages": torch.tensor([2.0, 1.0])}
    loss, _ = it.loss(LossView(torch.tensor([0, 2]), columns, {}, logp, torch.zeros(2)))
    assert loss.item() == pytest.approx(-(0.5 * 4 + 9))


def test_options_a_users_function_does_not_take_are_refused_when_the_pipeline_is_built(
    plug_in: Callable[[str], str],
) -> None:
    name = plug_in("def f(batch, scale=1.0):\n    return batch.sequence['reward'] * scale\n")
    with pytest.raises(UserError, match=r"unknown option 'scal'; did you mean 'scale'\?"):
        pipeline_of({"advantage": {"name": name, "options": {"scal": 2.0}}})


def test_a_users_function_is_found_beside_the_recipe_file(plug_in: Callable[[str], str], tmp_path: Path) -> None:
    plug_in("def f(batch):\n    return batch.sequence['reward'] + 1\n")
    batch, _ = prepared(pipeline_of({"advantage": "mine.py:f"}, base=tmp_path), example())
    assert batch.sequence["advantages"].tolist() == [2, 1, 2, 2, 1.25, 1.75]
    with pytest.raises(UserError, match=r"defines no 'g'"):
        pipeline_of({"advantage": "mine.py:g"}, base=tmp_path)


# --- mini-batches ------------------------------------------------------------------------------------------------------


@st.composite
def grouped(draw: st.DrawFn) -> Batch:
    pairs = draw(st.lists(st.tuples(st.integers(-4, 4), st.integers(1, 4)), min_size=1, max_size=12))
    return make_batch([n for _, n in pairs], [g for g, _ in pairs], [1.0] * len(pairs))


@settings(max_examples=60, deadline=None)
@given(grouped(), st.integers(1, 5), st.integers(1, 2))
def test_mini_batches_hold_every_group_whole_once_an_epoch(batch: Batch, num: int, epochs: int) -> None:
    parts = list(mini_batches(batch, Algorithm(), num, epochs, HORIZON))
    groups = set(batch.sequence["group_ids"].tolist())
    size = min(num, len(groups))
    assert len(parts) == size * epochs
    held = [set(part.sequence["group_ids"].tolist()) for part in parts]
    for epoch in range(epochs):
        own = held[epoch * size : (epoch + 1) * size]
        assert sum(map(len, own)) == len(groups)
        assert set.union(*own) == groups
        assert max(map(len, own)) - min(map(len, own)) <= 1
        tokens = [t for part in parts[epoch * size : (epoch + 1) * size] for t in part.tokens.tolist()]
        assert sorted(tokens) == batch.tokens.tolist()


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@settings(max_examples=40, deadline=None)
@given(grouped(), st.integers(1, 3), st.sampled_from(MODES))
def test_weights_are_normalised_in_each_mini_batch(batch: Batch, num: int, mode: str) -> None:
    for part in mini_batches(batch, Algorithm.model_validate({"aggregation": mode}), num, 1, HORIZON):
        tokens, sequences = int(part.loss_mask.sum()), part.num_sequences
        expected = {
            "token-mean": 1,
            "token-sum": tokens,
            "seq-mean-token-sum": tokens / sequences,
            "seq-mean-token-mean": 1,
            "seq-mean-token-sum-norm": tokens / sequences / HORIZON,
        }[mode]
        assert float((part.sequence["weight"] * num_in_the_loss(part)).sum()) == pytest.approx(expected)


def test_the_configs_horizon_comes_before_the_rollouts() -> None:
    batch = make_batch([2], [0], [1])
    for horizon, expected in ((None, 1 / HORIZON), (4, 1 / 4)):
        it = Algorithm.model_validate({"aggregation": {"name": "seq-mean-token-sum-norm", "horizon": horizon}})
        (part,) = mini_batches(batch, it, 1, 1, HORIZON)
        assert part.sequence["weight"].tolist() == pytest.approx([expected])


def test_an_empty_batch_has_no_mini_batches() -> None:
    empty = example().select(torch.tensor([], dtype=torch.int64))
    assert list(mini_batches(empty, Algorithm(), 2, 3, HORIZON)) == []
