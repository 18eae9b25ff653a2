"""`Policy`: samples, log-probs and updates of the parts that `burnish train` is made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import burnish
from burnish.config.errors import UserError


@pytest.fixture
def policy(model: Path) -> burnish.Policy:
    return burnish.Policy.load(model, optimizer={"lr": 1e-2}, device="cpu", seed=5)


def rewarded(samples: list[burnish.Trajectory]) -> burnish.Batch:
    for sample in samples:
        sample.reward = float(sample.completion.count("1"))
    batch = burnish.pack(samples)
    return batch.with_sequence(advantages=batch.sequence["reward"] - batch.sequence["reward"].mean())


def test_samples_depend_on_seed_prompt_and_visit_alone(policy: burnish.Policy, model: Path) -> None:
    first = [s.completion for s in policy.sample(["1+1=", "2+2="], n=3, max_tokens=4)]
    second = [s.completion for s in policy.sample("1+1=", n=3, max_tokens=4)]
    assert second != first[:3]
    again = burnish.Policy.load(model, device="cpu", seed=5)
    assert [s.completion for s in again.sample({"prompt": "2+2="}, n=3, max_tokens=4)] == first[3:]
    assert [s.completion for s in again.sample(["1+1=", "1+1="], n=3, max_tokens=4)] == first[:3] + second
    chat = [{"role": "user", "content": "1+1="}]
    assert len(policy.sample(chat, max_tokens=2)) == 1  # one conversation
    assert len(policy.sample([chat, chat], max_tokens=2)) == 2
    greedy = policy.sample(["1+1="], n=2, max_tokens=4, temperature=0)
    assert greedy[0].completion == greedy[1].completion


def test_logprobs_are_those_of_the_samples_and_move_with_an_update(policy: burnish.Policy) -> None:
    batch = rewarded(policy.sample(["1+1=", "2+2="], n=8, max_tokens=4))
    before = policy.logprobs(batch)
    torch.testing.assert_close(before, batch.token["behaviour_logp"], atol=1e-5, rtol=1e-5)
    policy.update(batch, lambda logp, old_logp, advantages: -advantages * (logp - old_logp).exp())
    gain = (batch.sequence["advantages"][batch.sequence_ids] * (policy.logprobs(batch) - before)).sum()
    assert gain > 0
    later = policy.sample("1+1=", n=8, max_tokens=4)  # the engine samples from the new weights
    torch.testing.assert_close(
        policy.logprobs(rewarded(later)), rewarded(later).token["behaviour_logp"], atol=1e-5, rtol=1e-5
    )
    assert set(later[0].sequences[0].version) == {-1, 1}
    assert policy.num_updates == 1


def test_a_saved_policy_is_the_same_model(policy: burnish.Policy, tmp_path: Path) -> None:
    batch = rewarded(policy.sample("1+1=", n=4, max_tokens=4))
    policy.update(batch, "dr_grpo", horizon=4)
    saved = policy.save(tmp_path / "saved")
    torch.testing.assert_close(burnish.Policy.load(saved, device="cpu").logprobs(batch), policy.logprobs(batch))
    with pytest.raises(UserError, match="exists and is not empty"):
        policy.save(saved)


def test_what_a_loss_needs_is_asked_for(policy: burnish.Policy, model: Path) -> None:
    batch = rewarded(policy.sample("1+1=", n=4, max_tokens=4))
    with pytest.raises(UserError, match=r"add the reference's log-probs.*ref_logp"):
        policy.update(batch, "grpo")
    policy.update(batch.with_token(ref_logp=policy.logprobs(batch)), "grpo")
    with pytest.raises(UserError, match="give horizon"):
        policy.update(batch, "dr_grpo")
    with pytest.raises(UserError, match="unknown aggregation 'token_mean'; did you mean 'token-mean'"):
        policy.update(batch, "dr_grpo", aggregation="token_mean")
    with pytest.raises(UserError, match="has no advantages"):
        policy.update(dataclasses.replace(batch, sequence={"reward": batch.sequence["reward"]}), "dr_grpo", horizon=4)
    with pytest.raises(UserError, match=r"n=0, .*expected at least 1"):
        policy.sample("1+1=", n=0)
    with pytest.raises(UserError, match="data holds no rows"):
        policy.prompts([])
    with pytest.raises(UserError, match="give total_updates"):
        burnish.Policy.load(model, optimizer={"schedule": "linear"})
    with pytest.raises(UserError, match="unknown key; did you mean 'dtype'"):
        burnish.Policy.load(model, dtpye="float32")
