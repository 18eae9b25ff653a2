"""A reward function as a user of OpenRLHF writes it: whole texts in, a dict of tensors out."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    right = [label in query[len(prompt) :] for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    rewards = torch.tensor(right, dtype=torch.float32) * 2 - 1
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"chars": torch.tensor([len(q) for q in queries])}}
