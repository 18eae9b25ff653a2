"""Sampling and training of a 135M model in bfloat16 on a CPU, beside transformers in the same run.

    python bench/model_135m_cpu.py [--repeats 3] [--threads 2] [--tiny]

SmolLM2-135M's shape with random weights. Sampling: 16 prompts of 64 tokens, 64 new tokens each at temperature 1, with the log-prob of each token,
which transformers' `generate` does not give. Training: one update on 16 rows of 128 tokens, policy gradient of the last 64, AdamW with a learning rate of 1e-6.
burnish keeps float32 master weights and moments (its default), transformers bfloat16 ones (torch's fused AdamW on the weights as they are).
transformers computes 4 rows at a time, without gradient checkpointing; burnish packs as many. The two systems take turns and medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import save, table

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Optimizer
from burnish.config.rollout import Rollout
from burnish.core.batch import Batch
from burnish.core.engine import Engine, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.core.segments import offsets_from_lengths
from burnish.distributed.engine_builder import build_engine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import save_decoder
from burnish.training.learner import Learner

SIZES: dict[str, Any] = {
    "hidden_size": 576,
    "mlp_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
}
TINY_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "mlp_size": 96,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
}
ROWS, PROMPT, NEW, MICRO_ROWS = 16, 64, 64, 4


def model_of(sizes: dict[str, Any], vocab: int) -> Decoder:
    arch = Architecture(family="llama", vocab_size=vocab, max_positions=2048, tied=True, **sizes)
    model = Decoder(arch)
    initialise(model, seed=0)
    return model.to(torch.bfloat16)


def prompts_of(vocab: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab, (ROWS, PROMPT))


class Burnish:
    """Engine and learner on one model."""

    def __init__(self, model: Decoder, vocab: int) -> None:
        policy = PolicyModel(model, Tokenizer.from_characters("0123456789"), None, "a bench")
        self.engine: Engine = build_engine(policy, Rollout(max_rows=ROWS))
        self.learner = Learner(model, Optimizer(lr=1e-6), 100, token_budget=MICRO_ROWS * (PROMPT + NEW))
        self.prompts, self.round = prompts_of(vocab), 0

    def sample(self) -> None:
        self.round += 1
        options = SamplingOptions(max_tokens=NEW)
        named = [(f"{self.round}.{i}", tuple(row.tolist())) for i, row in enumerate(self.prompts)]
        self.engine.submit([Request(name, tokens, options, fold(name)) for name, tokens in named])
        assert sum(len(c.tokens) for c in self.engine.stream()) == ROWS * NEW

    def train(self, rows: torch.Tensor) -> None:
        length = PROMPT + NEW
        mask = (torch.arange(ROWS * length) % length) >= PROMPT
        signs = torch.where(torch.arange(ROWS) % 2 == 0, -1.0, 1.0)
        columns = {"advantages": signs, "group_ids": torch.arange(ROWS)}
        offsets = offsets_from_lengths(torch.full((ROWS,), length))
        batch = Batch(rows.flatten(), offsets, {"action_mask": mask, "loss_mask": mask}, columns)
        self.learner.update(batch.with_token(weight=aggregation_weights(batch, "token-mean")), PolicyLoss())


class Transformers:
    """The same work with `transformers`."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.generation_config.eos_token_id = None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.prompts = torch.from_numpy(prompts_of(vocab))

    def sample(self) -> None:
        self.model.eval()
        mask = torch.ones_like(self.prompts)
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": NEW, "min_new_tokens": NEW}
        with torch.no_grad():
            out = self.model.generate(self.prompts, attention_mask=mask, pad_token_id=0, **options)
        assert out.shape[1] == PROMPT + NEW

    def train(self, rows: torch.Tensor) -> None:
        self.model.train()
        for start in range(0, ROWS, MICRO_ROWS):
            ids = rows[start : start + MICRO_ROWS]
            logits = self.model(ids, use_cache=False, logits_to_keep=NEW + 1).logits[:, :-1]
            logp = logits.float().log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
            signs = torch.where(torch.arange(start, start + len(ids)) % 2 == 0, -1.0, 1.0)
            (-(signs[:, None] * (logp - logp.detach()).exp()).sum() / (ROWS * NEW)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs; saves nothing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes, vocab = (TINY_SIZES, 300) if args.tiny else (SIZES, 49152)
    model = model_of(sizes, vocab)
    with tempfile.TemporaryDirectory() as folder:
        save_decoder(model, Path(folder), None, (), 0)
        systems: dict[str, Burnish | Transformers] = {
            "burnish": Burnish(model, vocab),
            f"transformers {transformers.__version__}": Transformers(Path(folder), vocab),
        }
    rows = torch.from_numpy(np.random.default_rng(1).integers(3, vocab, (ROWS, PROMPT + NEW)))
    times: dict[tuple[str, str], list[float]] = {}
    for repeat in range(args.repeats + 1):
        for name, system in systems.items():
            for work, call in (("sample", system.sample), ("train", partial(system.train, rows))):
                took = seconds(call)
                print(f"{repeat} {name} {work}: {took:.2f} s", flush=True)
                if repeat:  # the first compiles kernels and allocates
                    times.setdefault((name, work), []).append(took)
    found = []
    for (name, work), each in times.items():
        tokens = ROWS * (NEW if work == "sample" else PROMPT + NEW)
        took = statistics.median(each)
        found.append({"work": work, "system": name, "wall_s": took, "tokens_per_s": tokens / took, "runs": len(each)})
    peer = {row["work"]: row["wall_s"] for row in found if row["system"] != "burnish"}
    for row in found:
        row["times_the_peer"] = peer[row["work"]] / row["wall_s"]
    print(table(found, ["work", "system", "wall_s", "tokens_per_s", "times_the_peer"]))
    if not args.tiny:
        print(f"saved {save('model_135m_cpu', found)}")


if __name__ == "__main__":
    main()
