"""verl's advantages and losses on a padded batch, run by `bench/algorithms.py --verl-python` one at a time.

python verl_algorithms.py WORKLOAD_DIRECTORY THREADS

The folder holds one packed file per column. The first output line describes the installation. After that every input line
is a request, and every output line the seconds that it took. A request names a function of `verl.trainer.ppo.core_algos`,
its options and those of its config, and the input to differentiate by. "save" is the number of results to write, packed.
"""

import inspect
import json
import os
import sys
import time
import uuid
from pathlib import Path

# What verl's imports print must not come between the answers.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import verl  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402

directory = Path(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
lengths = torch.from_numpy(np.load(directory / "lengths.npy"))
inside = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
rows = torch.arange(lengths.numel())


def column(name):
    return torch.from_numpy(np.load(directory / f"{name}.npy"))


def padded(name):
    result = torch.zeros(inside.shape)
    result[inside] = column(name)
    return result


def on_last_token(name):
    result = torch.zeros(inside.shape)
    result[rows, lengths - 1] = column(name)
    return result


mask = inside.long()  # verl's masks are int64
groups = np.array([str(uuid.UUID(int=int(g))) for g in column("group_ids")], dtype=object)
given = {
    "token_level_rewards": on_last_token("reward"),
    "reward_baselines": column("greedy_reward"),
    "response_mask": mask,
    "index": groups,
    "values": padded("values"),
    "old_log_probs": padded("old_logp"),
    "old_log_prob": padded("old_logp"),
    "sum_pi_squared": padded("sum_p2"),
    "non_tensor_batch": {"a": column("part_a").numpy(), "b": column("part_b").numpy()},
    "batch": {"prompts": torch.zeros(lengths.numel(), 0), "attention_mask": mask},
    "advantages": column("advantages")[:, None] * mask,
    "returns": padded("returns"),
    "rollout_is_weights": None,
}
leaves = {"log_prob": padded("logp"), "vpreds": padded("value")}


def config_of(request):
    options = dict(request["config"])
    if request["kind"] == "advantage":
        return OmegaConf.create(options)
    policy_loss = PolicyLossConfig(**options.pop("policy_loss", {}))
    return ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, **options)


def serve(request):
    """Seconds and results of one call; of a loss, the value and the gradient."""
    function = getattr(core_algos, request["function"])
    arguments = {**given, **leaves, "config": config_of(request), **request["options"]}
    leaf = leaves.get(request["leaf"])
    if leaf is not None:
        leaf.requires_grad_()
    names = inspect.signature(function).parameters
    arguments = {name: arguments[name] for name in names if name in arguments}
    started = time.perf_counter()
    results = function(**arguments)
    if leaf is not None:
        results = (results[0].detach(), *torch.autograd.grad(results[0], leaf))
    return time.perf_counter() - started, results


print(json.dumps({"version": verl.__version__}), file=answers)
for line in sys.stdin:
    request = json.loads(line)
    seconds, results = serve(request)
    for number in range(request["save"]):
        result = results[number]
        np.save(directory / f"result_{number}.npy", (result[inside] if result.dim() == 2 else result).numpy())
    del results
    print(json.dumps({"seconds": seconds}), file=answers)
