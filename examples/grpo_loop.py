"""GRPO (DeepSeekMath, 2402.03300) as a loop of your own, on the parts of burnish: sample, reward, compare, update.

    python examples/grpo_loop.py MODEL ROWS.jsonl       # rows with `question` and `answer`

`burnish train` with the same seed gives the same rewards and losses, step by step (tests/examples/test_grpo_loop.py). It adds what a long
run needs: checkpoints and resuming, worker processes for rewards, validation, filters, asynchronous sampling, many GPUs.
"""

import json
import sys
from pathlib import Path

import torch

import burnish


def reward(sample, row):
    return float(sample.completion.strip() == row.answer)


def grpo_loss(logp, old_logp, advantages):
    ratio = (logp - old_logp).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))  # PPO's clipped surrogate


def train(model, rows, steps=20, prompts=8, n=8, max_tokens=16, lr=1e-5, seed=0):
    policy = burnish.Policy.load(model, optimizer={"lr": lr}, seed=seed)
    stream = policy.prompts(rows)
    for step in range(1, steps + 1):
        draws = stream.draw(prompts)
        samples = policy.sample(draws, n=n, max_tokens=max_tokens)
        for i, sample in enumerate(samples):
            sample.reward = reward(sample, draws[i // n].prompt.row)
        rewards = torch.tensor([sample.reward for sample in samples]).view(prompts, n)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        batch = burnish.pack(samples).with_sequence(advantages=advantages.flatten())
        stats = policy.update(batch, grpo_loss)  # the mean over all tokens that the model wrote
        print(f"step {step}  reward {rewards.mean():.3f}  loss {stats['loss']:+.5f}")
        yield rewards.mean().item(), stats["loss"]
    policy.save(f"{model}-grpo")


if __name__ == "__main__":
    for _ in train(sys.argv[1], [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]):
        pass
