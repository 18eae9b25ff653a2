"""Each cause is injected into samples of known distributions and must be named; noise of a healthy engine must not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from burnish.algorithms.correction.corrections import decoupled_correction, no_correction
from burnish.algorithms.correction.mismatch_diagnostics import surprise_metrics, symptom_metrics
from burnish.algorithms.correction.spec import DecoupledCorrection
from burnish.config.records import slot_options
from burnish.core.batch import Batch
from burnish.run.health.mismatch_causes import HealthContext
from burnish.run.health.monitor import RECOVERY_STEPS, HealthMonitor, RangeRule

ROWS, LENGTH, VOCABULARY = 48, 20, 32


class World:
    """Contexts [N, V] from certain to open, as a language model's are."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        sharpness = 0.5 + 4 * torch.rand(ROWS * LENGTH, 1, generator=self.generator, dtype=torch.float64)
        self.logits = sharpness * self.noise()

    def noise(self) -> Tensor:
        return torch.randn(ROWS * LENGTH, VOCABULARY, generator=self.generator, dtype=torch.float64)

    def batch(
        self, engine: Tensor, trainer: Tensor | None = None, reported: Tensor | None = None, lag: Tensor | None = None
    ) -> Batch:
        """Tokens drawn from the logits `engine`, with the log-probs of `reported` (None: the same) and `trainer`."""
        trainer = self.logits if trainer is None else trainer
        tokens = torch.multinomial(engine.softmax(-1), 1, generator=self.generator)
        behaviour = (engine if reported is None else reported).log_softmax(-1).gather(1, tokens).squeeze(1)
        written = torch.ones(ROWS * LENGTH, dtype=torch.bool)
        return Batch(
            tokens=tokens.squeeze(1),
            offsets=torch.arange(0, ROWS * LENGTH + 1, LENGTH),
            token={
                "action_mask": written,
                "loss_mask": written,
                "old_logp": trainer.log_softmax(-1).gather(1, tokens).squeeze(1),
                "behaviour_logp": behaviour,
                "entropy": -(trainer.softmax(-1) * trainer.log_softmax(-1)).sum(-1),
                "version": 100 - (torch.zeros_like(tokens.squeeze(1)) if lag is None else lag),
            },
        )


Inject = Callable[[World, int], Batch]


def metrics_of(batch: Batch) -> dict[str, float]:
    """What a step of the trainer measures."""
    gap = (batch.token["old_logp"] - batch.token["behaviour_logp"]).abs()
    seen = symptom_metrics(batch, version=100) | surprise_metrics(
        batch, batch.token["old_logp"], batch.token["entropy"]
    )
    return {"mismatch/mean": float(gap.mean())} | no_correction(batch).metrics | seen


def lines_of(
    inject: Inject, facts: HealthContext | None = None, steps: Iterable[int] = range(10), seed: int = 0
) -> list[str]:
    health, facts = HealthMonitor(), facts or HealthContext()
    return [
        line for step in steps for line in health.check(step, metrics_of(inject(World(100 * seed + step), step)), facts)
    ]


def noisy(size: float) -> Inject:
    return lambda world, step: world.batch(world.logits + size * world.noise())


def truncate(logits: Tensor, top_p: float = 1.0, top_k: int = VOCABULARY) -> Tensor:
    p, order = logits.softmax(-1).sort(-1, descending=True)
    out = (p.cumsum(-1) - p >= top_p) | (torch.arange(VOCABULARY) >= top_k)
    return logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)


def stale(world: World, step: int) -> Batch:
    lag = torch.randint(0, 5, (ROWS,), generator=world.generator).repeat_interleave(LENGTH)
    return world.batch(world.logits + 0.1 * lag[:, None] * world.noise(), lag=lag)


def partly_stale(world: World, step: int) -> Batch:
    """After the first step one row in four is one update old."""
    lag = (torch.rand(ROWS, generator=world.generator) < 0.25 * min(step, 1)).long().repeat_interleave(LENGTH)
    return world.batch(world.logits + 0.3 * lag[:, None] * world.noise(), lag=lag)


def equally_stale(world: World, step: int) -> Batch:
    return world.batch(world.logits + 0.2 * world.noise(), lag=torch.full((ROWS * LENGTH,), 3))


def stale_and_growing(world: World, step: int) -> Batch:
    return world.batch(world.logits + 0.03 * step * world.noise(), lag=torch.full((ROWS * LENGTH,), 3))


def never_arrived(world: World, step: int) -> Batch:
    return world.batch(world.logits + 0.03 * step * world.noise())


def never_arrived_while_sharpening(world: World, step: int) -> Batch:
    return world.batch(world.logits, trainer=(1 + 0.03 * step) * world.logits)


def after_a_clean_start(inject: Inject, start: int = 3) -> Inject:
    return lambda world, step: (noisy(1e-6) if step < start else inject)(world, step)


def with_lag(inject: Inject, drift: float = 0.001) -> Inject:
    """A trainer that is always one update ahead after its first step, and does not move far in one."""

    def late(world: World, step: int) -> Batch:
        batch, lag = inject(world, step), torch.full((ROWS * LENGTH,), min(step, 1))
        moved = batch.token["old_logp"] + drift * lag * world.noise()[:, 0]
        return batch.with_token(version=100 - lag, old_logp=moved)

    return late


def with_bos(world: World, step: int) -> Batch:
    shifted = world.logits + 1e-4 * world.noise()
    shifted[::LENGTH] += world.noise()[::LENGTH]
    return world.batch(shifted)


def re_encoded(world: World, step: int) -> Batch:
    """One row in eight has another token somewhere, and from there on the log-probs of the token before."""
    batch = world.batch(world.logits + 1e-4 * world.noise())
    behaviour = batch.token["behaviour_logp"].clone().view(ROWS, LENGTH)
    place = torch.arange(LENGTH)
    for row in range(step % 3, ROWS, 8):
        change = 3 + int(torch.randint(0, LENGTH - 6, (1,), generator=world.generator))
        behaviour[row] = torch.where(place < change, behaviour[row], behaviour[row].roll(1))
        behaviour[row, change] = -9.0
    return batch.with_token(behaviour_logp=behaviour.flatten())


def tempered(temperature: float) -> Inject:
    return lambda world, step: world.batch(world.logits / temperature)


def reported_before_temperature(world: World, step: int) -> Batch:
    return world.batch(world.logits / 0.7, trainer=world.logits / 0.7, reported=world.logits)


def in_secret(change: Callable[[Tensor], Tensor]) -> Inject:
    """Drawn from changed logits, reported as if from those asked for."""
    return lambda world, step: world.batch(change(world.logits), reported=world.logits)


CAUSES: dict[str, tuple[Inject, str]] = {
    "precision": (noisy(0.1), "precision of the engine"),
    "coarse precision": (noisy(0.3), "precision of the engine"),
    "precision, while the trainer is ahead": (with_lag(noisy(0.1)), "precision of the engine"),
    "precision, all at once": (after_a_clean_start(noisy(0.1)), "precision of the engine"),
    "stale": (stale, "stale weights"),
    "partly stale": (partly_stale, "stale weights: the gap grows by"),
    "equally stale": (equally_stale, "stale weights"),
    "stale and growing": (stale_and_growing, "stale weights"),
    "stale after the first step": (with_lag(noisy(0.0), drift=0.1), "stale weights"),
    "top-p": (lambda w, s: w.batch(truncate(w.logits, top_p=0.9)), "top-p or top-k"),
    "low top-p": (lambda w, s: w.batch(truncate(w.logits, top_p=0.5)), "top-p or top-k"),
    "mild top-p": (lambda w, s: w.batch(truncate(w.logits + 1e-3 * w.noise(), top_p=0.98)), "top-p or top-k"),
    "top-k": (lambda w, s: w.batch(truncate(w.logits + 0.01 * w.noise(), top_k=8)), "top-p or top-k"),
    "top-p in secret": (
        in_secret(lambda x: truncate(x, top_p=0.9)),
        "top-p or top-k is on, by a default of its own, or",
    ),
    "colder": (tempered(0.7), "colder policy"),
    "a little colder": (tempered(0.9), "colder policy than the trainer's, at about 0.9 times"),
    "a little hotter": (tempered(1.1), "hotter policy than the trainer's, at about 1.1 times"),
    "hotter": (tempered(1.5), "hotter policy"),
    "hotter, all at once": (after_a_clean_start(tempered(1.2)), "hotter policy"),
    "hotter, while the trainer is ahead": (with_lag(tempered(1.2)), "hotter policy"),
    "hotter in secret": (in_secret(lambda x: x / 1.5), "tokens are drawn hotter than asked for"),
    "raw log-probs": (reported_before_temperature, "wrong temperature"),
    "bos": (with_bos, "added BOS"),
    "re-encoding": (re_encoded, "re-encodes text"),
    "re-encoding, while the trainer is ahead": (with_lag(re_encoded), "re-encodes text"),
    "never arrived": (never_arrived, "weights never arrived"),
    "never arrived, sharper": (never_arrived_while_sharpening, "weights never arrived"),
    "no longer arriving": (lambda w, s: never_arrived(w, max(0, s - 3)), "weights never arrived"),
    "another model": (noisy(3.0), "another model"),
}


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_injected_cause_is_named_in_one_line(name: str, seed: int) -> None:
    inject, words = CAUSES[name]
    lines = lines_of(inject, seed=seed)
    assert len(lines) == 1, lines
    assert words in lines[0]
    assert "; likely cause: " in lines[0]
    assert "; try: " in lines[0]
    assert "(healthy " in lines[0]


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_healthy_engine_is_not_spoken_of(size: float) -> None:
    assert lines_of(noisy(size)) == []


def test_a_cause_is_named_from_the_second_form_of_the_report() -> None:
    health, said = HealthMonitor(), []
    for step in range(4):
        batch = stale(World(step), step)
        said += health.check(
            step,
            decoupled_correction(batch, **slot_options(DecoupledCorrection())).metrics
            | symptom_metrics(batch, version=100),
            HealthContext(),
        )
    assert len(said) == 1
    assert "rollout_corr/k3_kl" in said[0]
    assert "stale weights" in said[0]


def test_the_line_has_value_range_and_what_the_configuration_says() -> None:
    line = lines_of(CAUSES["top-p"][0], HealthContext(top_p=0.9, top_k=0))[0]
    assert "top_p=0.9 is set" in line
    assert "top_k=0 is" not in line
    assert "rollout.top_p=1" in line
    assert "by a default of its own" in lines_of(CAUSES["top-p"][0], HealthContext(top_p=1.0, top_k=0))[0]
    line = lines_of(noisy(0.1), HealthContext(engine_dtype="bfloat16", learner_dtype="float32"))[0]
    assert "mismatch/mismatch_k3_kl is 0.00" in line
    assert "(healthy 0 to 0.001)" in line
    assert "bfloat16 against the trainer's float32" in line
    assert "temperature=0.7 is set" in lines_of(tempered(0.7), HealthContext(temperature=0.7))[0]


def test_surprise_is_not_judged_where_filters_prefer_likely_or_unlikely_samples() -> None:
    surer, hotter = CAUSES["top-p in secret"][0], CAUSES["hotter in secret"][0]
    assert len(lines_of(surer, HealthContext(selection="unlikely"))) == 1  # such a filter can only hide it
    assert lines_of(hotter, HealthContext(selection="unlikely")) == []
    assert lines_of(surer, HealthContext(selection="any")) == []


def test_a_second_cause_must_be_seen_twice_in_a_row() -> None:
    assert len(lines_of(lambda w, step: (with_bos if step == 5 else noisy(0.1))(w, step))) == 1


# --- episodes ----------------------------------------------------------------------------------------------------------

RULE = RangeRule(("a", "b"), 0.0, 1.0, patience=2, cause="it broke", remedy="mend it")


def spoken(values: list[float], name: str = "a") -> list[int]:
    health = HealthMonitor([RULE])
    return [step for step, value in enumerate(values) if health.check(step, {name: value}, HealthContext())]


def test_a_number_must_be_out_of_range_for_as_long_as_its_rule_says() -> None:
    assert spoken([2, 0, 2, 0, 2, 0]) == []
    assert spoken([0, 2, 2]) == [2]
    assert spoken([1.0, 0.0, 1.0]) == []
    assert spoken([-0.1, -0.1]) == [1]


def test_an_episode_is_spoken_of_once_and_ends_after_healthy_steps() -> None:
    assert spoken([2] * 20) == [1]
    assert spoken([2, 2, *[0] * (RECOVERY_STEPS - 1), 2, 2]) == [1]
    assert spoken([2, 2, *[0] * RECOVERY_STEPS, 2, 2]) == [1, RECOVERY_STEPS + 3]


def test_a_number_that_is_nan_is_out_of_range_and_one_that_is_missing_is_not() -> None:
    assert spoken([float("nan")] * 3) == [1]
    assert spoken([2.0] * 3, name="c") == []
    assert spoken([2.0] * 3, name="b") == [1]


def test_the_line_names_step_number_range_cause_and_remedy() -> None:
    health = HealthMonitor([RULE])
    health.check(6, {"b": 2.5}, HealthContext())
    assert health.check(7, {"b": 2.5}, HealthContext()) == [
        "step 7: b is 2.5 (healthy 0 to 1); likely cause: it broke; try: mend it"
    ]


def test_another_cause_in_the_same_episode_is_spoken_of() -> None:
    first, second = lines_of(lambda w, step: (noisy(0.1) if step < 4 else with_bos)(w, step))
    assert "precision" in first
    assert "BOS" in second


def test_a_gap_without_symptoms_is_not_given_a_cause() -> None:
    health = HealthMonitor()
    for step in range(2):
        lines = health.check(step, {"mismatch/mismatch_kl": 0.5}, HealthContext())
    assert len(lines) == 1
    assert "not known" in lines[0]


def test_truncated_answers_are_spoken_of_apart_from_the_gap() -> None:
    health = HealthMonitor()
    said = [line for step in range(5) for line in health.check(step, {"rollout/truncated": 0.9}, HealthContext())]
    assert len(said) == 1
    assert "step 2: rollout/truncated is 0.9" in said[0]
