"""GRPO in one plain file with torch only, for reading: the algorithm that `burnish train recipes/sort_digits.yaml` runs.

    python examples/one_file_grpo.py            # a minute and a half on two CPU cores: 45% -> 99%

A small Llama-shaped decoder learns to sort digits (`507508>` -> `005578`). It learns first from demonstrations that are
often wrong, then by RL with a reward of 1 for a correct answer. The library has what this file leaves out: packed batches
(here rows are padded), a KV cache (here every token costs a whole forward), KL, checkpoints, worker processes. It also
makes several updates a batch, so that the ratio differs from 1 and the clip has an effect. `tests/examples` compares
`grpo_loss` and the model below with the library's numbers.
"""

import hashlib
import math
import random

import torch
from torch import nn
from torch.nn import functional as F

PAD, EOS = 0, 1
CHARACTERS = ["<pad>", "<eos>", *"0123456789>"]
ID = {c: i for i, c in enumerate(CHARACTERS)}


# --- the task ----------------------------------------------------------------------------------------------------------


def is_held_out(digits: str) -> bool:
    """A problem is held out by a hash of its sorted digits, so all its permutations and its answer are on one side."""
    return hashlib.blake2b("".join(sorted(digits)).encode()).digest()[0] % 4 == 0


def problem(rng: random.Random, held_out: bool = False) -> str:
    while True:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(4, 7)))
        if is_held_out(digits) == held_out:
            return digits


def demonstration(rng: random.Random) -> tuple[str, str]:
    """A problem and what a careless teacher answers: right 80/60/40/20% of the time, otherwise a copy."""
    digits = problem(rng)
    right = rng.random() < {4: 0.8, 5: 0.6, 6: 0.4, 7: 0.2}[len(digits)]
    return digits, "".join(sorted(digits)) if right else digits


# --- the model ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Llama: pre-norm, rotary positions, gated MLP. 0.39 M parameters."""

    def __init__(self, vocab: int = 13, width: int = 128, layers: int = 2, heads: int = 4, mlp: int = 336) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(width, 1e-6)
        self.head = nn.Linear(width, vocab, bias=False)
        self.inverse = 1.0 / 10000.0 ** (torch.arange(0, width // heads, 2) / (width // heads))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p, std=0.02 / (math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1)
                )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(tokens.shape[1])[:, None] * self.inverse
        x, cos, sin = (
            self.embedding(tokens),
            angles.cos().to(self.norm.weight.dtype),
            angles.sin().to(self.norm.weight.dtype),
        )
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# --- the algorithm -----------------------------------------------------------------------------------------------------


def pack(rows: list[list[int]]) -> torch.Tensor:
    """Right-padded rows."""
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def logprobs(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, length-1] log-prob of each token given those before it."""
    return model(tokens)[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


@torch.no_grad()
def generate(model: nn.Module, prompts: list[str], temperature: float, max_new: int = 10) -> list[list[int]]:
    """Completions of all prompts at once, prompts of equal length together, each up to its <eos>."""
    done: dict[int, list[int]] = {}
    for length in sorted({len(p) for p in prompts}):
        index = [i for i, p in enumerate(prompts) if len(p) == length]
        tokens = torch.tensor([[ID[c] for c in prompts[i]] for i in index])
        for _ in range(max_new):
            logits = model(tokens)[:, -1]
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            tokens = torch.cat([tokens, new], 1)
        for i, row in zip(index, tokens[:, length:].tolist()):
            done[i] = row[: row.index(EOS) + 1] if EOS in row else row
    return [done[i] for i in range(len(prompts))]


def text(completion: list[int]) -> str:
    return "".join(CHARACTERS[t] for t in completion if t > EOS)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[prompts, samples]: (r - mean) / (std + 1e-6) within each group; exactly 0 where all are equal."""
    centred = rewards - rewards.mean(1, keepdim=True)
    scaled = centred / (rewards.std(1, keepdim=True) + 1e-6)
    constant = rewards.max(1, keepdim=True).values == rewards.min(1, keepdim=True).values
    return torch.where(constant, torch.zeros_like(scaled), scaled)


def grpo_loss(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip: float = 0.2
) -> torch.Tensor:
    """PPO's clipped surrogate, averaged over the completion tokens of the whole batch (token mean)."""
    ratio = (new - old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
    return (loss * mask).sum() / mask.sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, loss: torch.Tensor) -> None:
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def warm_start(model: nn.Module, rng: random.Random, updates: int = 250) -> None:
    """Supervised training on 2,000 flawed demonstrations."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    data = [demonstration(rng) for _ in range(2000)]
    for i in range(updates):
        chosen = rng.sample(data, 128)
        tokens = pack([[ID[c] for c in d + ">" + a] + [EOS] for d, a in chosen])
        prompt = torch.tensor([len(d) + 1 for d, _ in chosen])[:, None]
        mask = (torch.arange(1, tokens.shape[1]) >= prompt) & (tokens[:, 1:] != PAD)
        lr = 3e-3 * ((i + 1) / 20 if i < 20 else 1 - 0.9 * (i - 20) / (updates - 21))
        step(model, optimizer, lr, -(logprobs(model, tokens) * mask).sum() / mask.sum())


def reinforce(model: nn.Module, rng: random.Random, steps: int = 150, prompts: int = 64, samples: int = 8) -> None:
    """GRPO: sample groups, compare within each, move towards what was better than its siblings."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    for i in range(steps):
        digits = [problem(rng) for _ in range(prompts)]
        repeated = [d for d in digits for _ in range(samples)]
        completions = generate(model, [d + ">" for d in repeated], temperature=1.0)
        rewards = torch.tensor([float(text(c) == "".join(sorted(d))) for d, c in zip(repeated, completions)])
        advantages = group_advantages(rewards.view(prompts, samples)).flatten()
        keep = [k for k in range(len(repeated)) if advantages[k] != 0]  # groups without a difference teach nothing
        if i % 25 == 0 or i == steps - 1:
            print(f"step {i:3d}  reward {rewards.mean():.3f}")
        if not keep:
            continue
        tokens = pack([[ID[c] for c in repeated[k] + ">"] + completions[k] for k in keep])
        prompt = torch.tensor([len(repeated[k]) + 1 for k in keep])[:, None]
        length = prompt + torch.tensor([len(completions[k]) for k in keep])[:, None]
        position = torch.arange(1, tokens.shape[1])
        mask = (position >= prompt) & (position < length)
        new = logprobs(model, tokens)
        # One update a batch: the policy that sampled is the policy that learns, so the old log-probs are its own.
        step(
            model,
            optimizer,
            2e-4 * (1 - 0.9 * i / (steps - 1)),
            grpo_loss(new, new.detach(), advantages[keep][:, None], mask),
        )


def accuracy(model: nn.Module, num: int = 1000) -> float:
    rng = random.Random(12345)
    digits = [problem(rng, held_out=True) for _ in range(num)]
    completions = generate(model, [d + ">" for d in digits], temperature=0)
    return sum(text(c) == "".join(sorted(d)) for d, c in zip(digits, completions)) / num


def main(seed: int = 0) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = Decoder()
    warm_start(model, rng)
    print(f"held-out accuracy before RL: {accuracy(model):.3f}")
    reinforce(model, rng)
    print(f"held-out accuracy after RL: {accuracy(model):.3f}")


if __name__ == "__main__":
    main()
