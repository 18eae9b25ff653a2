"""Bytes and seconds of a weight sync in bfloat16, of all values and of the changed values only.

    python bench/delta_sync.py --model DIRECTORY [--lr 1e-6] [--updates 4]

The library's AdamW updates the model on random tokens, and the library publishes it (`inference/weight_sync`). Both
variants include the checksums of all tensors. An engine loads every publication, and its bits are compared with the trainer's.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from common import save, table

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.distributed import roles
from burnish.inference.weight_sync import Publisher, apply_publication


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    options = [f"model.path={args.model}", "model.dtype=bfloat16", "model.device=cpu", "data.train={task: sort_digits}"]
    config = load(TrainConfig, None, [*options, f"training.optimizer.lr={args.lr}"]).config
    policy = roles.build_policy(config.model, config.data.train, config.seed, None)
    learner = roles.build_learner(config, policy)
    parameters = dict(policy.module.named_parameters())
    engine = {name: parameter.detach().clone() for name, parameter in copy.copy(parameters).items()}
    publisher, rows = Publisher(lambda data: data, keeps_base=True), []
    whole = publisher.publish(0, parameters.items(), as_delta=False, complete=True)
    for version in range(1, args.updates + 1):
        tokens = torch.randint(0, policy.tokenizer.vocab_size, (args.tokens,))
        mask = torch.arange(args.tokens) > 0
        batch = Batch(tokens, torch.tensor([0, args.tokens]), {"action_mask": mask, "loss_mask": mask})
        learner.update(batch.with_token(weight=mask / args.tokens), NllLoss())
        learner.release()
        started = time.perf_counter()
        sent = publisher.publish(version, parameters.items(), as_delta=True, complete=True)
        published = time.perf_counter()
        apply_publication(sent, engine, lambda data: data)
        rows.append(
            {
                "update": version,
                "MB_whole": whole.num_bytes / 1e6,
                "MB_delta": sent.num_bytes / 1e6,
                "share": sent.num_bytes / whole.num_bytes,
                "publish_s": published - started,
                "take_s": time.perf_counter() - published,
                "same_bits": all(torch.equal(engine[name], parameter) for name, parameter in parameters.items()),
            }
        )
    print(table(rows, list(rows[0])))
    save("delta_sync", [{"model": args.model.rsplit("/", 1)[-1], "lr": args.lr, **row} for row in rows])


if __name__ == "__main__":
    main()
