"""Time of every advantage estimator and every loss on 4096 sequences, 8 M tokens, compared with verl in the same run.

    python bench/algorithms.py [--verl-python /path/to/python] [--repeats 5] [--tokens 8192000] [--sequences 4096]
                               [--only loss/ppo ...]

512 groups of 8 answers with lengths drawn uniformly from 64 to 3936 (seed 0), a prompt of one token each, float32, two
threads. The time of a loss is forward and backward to the log-probs, including the view of the batch; the aggregation
weights are given. verl gets the same numbers padded to [4096, 3936], with the answers alone and its own types: an int64
mask, uids as text. If verl has two functions for one estimator, the faster one is compared. The two systems take turns,
one call at a time, and medians are compared.

Rewards are continuous, because the two define some estimators differently if all rewards of a group are equal or 0.
Before timing, both compute the same results once. `difference` is the largest difference, divided by verl's largest value.
Rounding may put a token on either side of a threshold, so one token in 100,000 may differ (`edges`). If more tokens
differ, the two are not comparable and the row has no ratio. clip_cov leaves tokens out at random; it is compared with a
share that takes all tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save, table
from torch import Tensor

from burnish.algorithms.advantages.advantage_functions import ADVANTAGES
from burnish.algorithms.advantages.returns import AdvantagesAndReturns
from burnish.algorithms.advantages.spec import ADVANTAGE_RECORDS
from burnish.algorithms.advantages.spo import cutpoints
from burnish.algorithms.losses.loss_functions import LOSSES
from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.losses.model_losses import ValueLoss
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.records import default_options
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import ids_from_offsets, offsets_from_lengths

THREADS = 2
GROUP = 8
TOLERANCE = 1e-4
EDGES = 1e-5
"""The share of tokens that may differ by more than the tolerance."""


# --- the workload ------------------------------------------------------------------------------------------------------


def make_columns(sequences: int, tokens: int) -> dict[str, np.ndarray]:
    """What both systems read: a number a sequence, or one a written token, packed."""
    draw = np.random.default_rng(0)
    mean = tokens // sequences
    shortest = max(1, mean * 4 // 125)
    lengths = draw.integers(shortest, 2 * mean - shortest, sequences, endpoint=True)
    total = int(lengths.sum())
    groups = np.arange(sequences) // GROUP
    parts = draw.standard_normal((2, sequences), dtype=np.float32)
    old = -draw.standard_exponential(total, dtype=np.float32)
    values = 0.3 * draw.standard_normal(total, dtype=np.float32)
    reward = parts[0] + parts[1]
    p = np.exp(old)
    return {
        "lengths": lengths,
        "group_ids": groups,
        "reward": reward,
        "part_a": parts[0],
        "part_b": parts[1],
        "greedy_reward": draw.standard_normal(groups[-1] + 1, dtype=np.float32)[groups],
        "advantages": reward + 0.5,  # of the losses, whose value would otherwise be a small difference of large numbers
        "old_logp": old,
        "logp": np.minimum(old + 0.1 * draw.standard_normal(total, dtype=np.float32), 0),
        "sum_p2": p**2 + (1 - p) ** 2 * draw.random(total, dtype=np.float32),
        "values": values,
        "value": values + 0.3 * draw.standard_normal(total, dtype=np.float32),
        "returns": values + draw.standard_normal(total, dtype=np.float32),
    }


DEFAULTS = default_options(*ADVANTAGE_RECORDS)


@dataclass(frozen=True)
class Workload:
    """The batch as the learner has it, and what the model would have given for its written tokens."""

    batch: Batch
    logp: Tensor  # [M]
    entropy: Tensor  # [M]
    value: Tensor  # [M]

    def written(self, result: Tensor) -> Tensor:
        """[M] a result with one number a sequence or a token, at the written tokens."""
        if result.shape == (self.batch.num_sequences,):
            result = result[ids_from_offsets(self.batch.offsets)]
        return result[self.batch.action_mask] if result.shape == (self.batch.num_tokens,) else result


def make_workload(columns: dict[str, np.ndarray]) -> Workload:
    """The columns in a packed batch, one prompt token before each answer, with what only some of burnish reads."""
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    offsets = offsets_from_lengths(tensors["lengths"] + 1)
    num = tensors["lengths"].numel()
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool).index_fill(0, offsets[:-1], False)

    def spaced(name: str) -> Tensor:
        return torch.zeros(mask.numel()).masked_scatter(mask, tensors[name])

    token = {name: spaced(name) for name in ("old_logp", "sum_p2", "values", "returns")}
    token |= {"action_mask": mask, "loss_mask": mask, "ref_logp": token["old_logp"], "process_rewards": token["values"]}
    sequence = {name: tensors[name].double() for name in ("reward", "greedy_reward", "advantages")}
    sequence |= {"part/a": tensors["part_a"].double(), "part/b": tensors["part_b"].double()}
    index = torch.arange(num)
    within, first = index % GROUP, index - index % GROUP
    sequence |= {
        "group_ids": tensors["group_ids"],
        "key": index * 7919,
        "accuracy": (sequence["reward"] > 0).double(),
        "chosen": index % 2 == 0,
        "desirable": sequence["reward"] > 0,
        "mismatched": index % 4 == 3,
        "demonstration": within == 0,
        # An agent's trajectory is four steps in one of three states; a tree has two branches of three leaves.
        "step": index % 4,
        "step_reward": sequence["reward"],
        "state_ids": index % 3,
        "node_ids": index,
        "parent_ids": torch.where(within < 2, num + tensors["group_ids"], first + within % 2),
    }
    batch = Batch(torch.zeros_like(mask, dtype=torch.long), offsets, token, sequence)
    segments, starts = cutpoints(batch, rho=0.9, every=5)
    borders = Ragged(torch.from_numpy(columns["values"][: starts.values.numel()]).double(), starts.offsets)
    batch = replace(batch.with_token(segment_ids=segments), ragged={"border_values": borders})
    return Workload(batch, tensors["logp"], -tensors["logp"], tensors["value"])


# --- what is measured --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One row: what burnish runs, and the requests that make verl run the same."""

    name: str
    run: Callable[[Workload], tuple[Tensor, ...]]
    peers: tuple[dict[str, Any], ...] = ()
    check: Work | None = None
    """What is compared instead, where the thing itself has chance in it."""


def estimate(work: Workload, name: str, options: dict[str, Any], columns: dict[str, Tensor]) -> tuple[Tensor, ...]:
    result = ADVANTAGES[name](work.batch.with_sequence(**columns), **{**DEFAULTS[name], **options})
    return (result.advantages, result.returns) if isinstance(result, AdvantagesAndReturns) else (result,)


def advantage(name: str, *peers: str, label: str = "", config: dict[str, Any] | None = None, **options: Any) -> Work:
    """An estimator with its options; `peers` are the ends of verl's function names, `config` what those read."""
    requests = tuple(
        {"kind": "advantage", "function": f"compute_{p}", "config": config or {}, "options": config or {}, "leaf": ""}
        for p in peers
    )
    return Work(f"advantage/{label or name}", partial(estimate, name=name, options=options, columns={}), requests)


def differentiate(work: Workload, loss: PolicyLoss | ValueLoss, weights: str, pairs: bool) -> tuple[Tensor, ...]:
    batch = work.batch.with_token(weight=work.batch.token[weights])
    if pairs:
        batch = batch.with_sequence(group_ids=torch.arange(batch.num_sequences) // 2)
    if isinstance(loss, ValueLoss):
        leaf = work.value.requires_grad_()
        total, _ = loss(loss_view(batch, value=leaf))
    else:
        leaf = work.logp.requires_grad_()
        total, _ = loss(loss_view(batch, logp=leaf, entropy=work.entropy))
    return total.detach(), *torch.autograd.grad(total, leaf)


def policy(
    label: str,
    peer: str = "",
    config: dict[str, Any] | None = None,
    by: str = "token-mean",
    pairs: bool = False,
    **record: Any,
) -> Work:
    """A loss record; `peer` is the end of the name of verl's policy loss, `config` its actor's."""
    request = {"kind": "loss", "function": f"compute_policy_loss_{peer}", "config": config or {}, "leaf": "log_prob"}
    request["options"] = {"loss_agg_mode": by}
    if record.get("clip") in ("clip_cov", "kl_cov") or record.get("loss") in ("bce", "kto") or pairs:
        record["scope"] = "batch"
    run = partial(differentiate, loss=PolicyLoss(**record), weights=by, pairs=pairs)
    return Work(f"loss/{label}", run, (request,) if peer else ())


VALUE = Work(
    "loss/value",
    partial(differentiate, loss=ValueLoss(clip=0.2), weights="token-mean", pairs=False),
    (
        {
            "kind": "loss", "function": "compute_value_loss", "config": {}, "leaf": "vpreds",
            "options": {"cliprange_value": 0.2},
        },
    ),
)  # fmt: skip


def drawn(share: float) -> Work:
    """clip_cov with a share of the tokens drawn."""
    config = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "policy_loss": {"clip_cov_ratio": share}}
    options = {"share": share, "low": 0.2, "high": 0.2}
    return policy("clip_cov", "clip_cov", config, clip="clip_cov", clip_options=options)


MEANS = "seq-mean-token-mean"
GSPO = {"low": 3e-4, "high": 4e-4}
GSPO_PEER = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
WIDE_PEER = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
NO_RATIO = {"ratio": "none", "clip": "none"}


def all_work() -> list[Work]:
    """Every estimator and every loss; those verl has first."""
    work = [
        advantage("gae", "gae_advantage_return", config={"gamma": 0.99, "lam": 0.95}, gamma=0.99, lam=0.95),
        advantage(
            "reinforce_plus_plus", "reinforce_plus_plus_outcome_advantage",
            label="reinforce_plus_plus, discounted", config={"gamma": 0.99}, gamma=0.99,
        ),
        advantage("reinforce_plus_plus", "reinforce_plus_plus_outcome_advantage", config={"gamma": 1.0}),
        advantage("remax", "remax_outcome_advantage"),
        advantage("grpo", "grpo_outcome_advantage", "grpo_vectorized_outcome_advantage"),
        advantage(
            "grpo", "grpo_outcome_advantage", "grpo_vectorized_outcome_advantage",
            label="dr_grpo", config={"norm_adv_by_std_in_grpo": False}, std="none",
        ),
        advantage("rloo", "rloo_outcome_advantage", "rloo_vectorized_outcome_advantage"),
        advantage("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline_outcome_advantage"),
        advantage("opo", "opo_outcome_advantage"),
        advantage("gpg", "gpg_outcome_advantage"),
        advantage("grpo_passk", "grpo_passk_outcome_advantage"),
        advantage("gdpo", "gdpo_outcome_advantage", config={"gdpo_reward_keys": ["a", "b"]}),
        advantage("otb", "optimal_token_baseline_advantage", "multi_turn_optimal_token_baseline_advantage"),
        advantage("gae", label="gae, length-adaptive", gamma=0.99, length_adaptive=0.05),
        policy("ppo", "vanilla", clip="ppo", clip_options={"dual": 3.0}),
        policy("ppo, by sequence", "vanilla", by=MEANS, clip="ppo", clip_options={"dual": 3.0}),
        policy("gspo", "gspo", GSPO_PEER, by=MEANS, ratio="sequence", clip="ppo", clip_options=GSPO),
        policy("gspo_token", "gspo", GSPO_PEER, by=MEANS, ratio="seq_token", clip="ppo", clip_options=GSPO),
        policy("gmpo", "geo_mean", WIDE_PEER, by=MEANS, ratio="sequence", clip="log_geo"),
        policy("cispo", "cispo", loss="sg_logprob", clip="is_weight", clip_options={"low": 0.2, "cap": 1.2}),
        policy("sapo", "sapo", by=MEANS, clip="soft"),
        policy("dppo_tv", "dppo_tv", {"clip_ratio_c": 20.0}, loss="sg_logprob", clip="dppo_tv"),
        policy(
            "dppo_kl", "dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
            loss="sg_logprob", clip="dppo_kl",
        ),
        replace(drawn(2e-4), check=drawn(1.0)),
        policy("kl_cov", "kl_cov", {"policy_loss": {"kl_cov_ratio": 2e-3, "ppo_kl_coef": 1.0}}, clip="kl_cov"),
        policy("logprob", "gpg", loss="logprob", **NO_RATIO),
        policy("dro", "dro", {"policy_loss": {"dro_beta": 0.1}}, loss="dro", **NO_RATIO),
        VALUE,
        policy("seq_prod, unclipped", by=MEANS, ratio="seq_prod", clip="none"),
        policy("ppo, drift", by=MEANS, clip="ppo", clip_options={"drift": 0.1}),
    ]  # fmt: skip
    names = {w.name for w in work}
    work += [
        advantage(name) for name in ADVANTAGES if f"advantage/{name}" not in names and name not in ("gigpo", "none")
    ]
    work.append(Work("advantage/gigpo", gigpo))
    for name in ("omd_sq", "sppo_sq", "bce", "mixed_offpolicy", "nll", "dpo", "ipo", "simpo", "orpo", "kto"):
        pairs = name in ("dpo", "ipo", "simpo", "orpo")
        work.append(policy(name, by=MEANS, pairs=pairs, loss=name, **NO_RATIO))
    work.append(Work(f"aggregation/{MEANS}", lambda w: (aggregation_weights(w.batch, MEANS),)))
    missing = {f"loss/{name}" for name in LOSSES} - {w.name for w in work} - {"loss/surrogate", "loss/sg_logprob"}
    assert not missing, f"not measured: {missing}"
    return sorted(work, key=lambda w: (w.name.split("/")[0], not w.peers))


def gigpo(work: Workload) -> tuple[Tensor, ...]:
    return estimate(work, "gigpo", {}, {"trajectory_ids": work.batch.sequence["node_ids"] // 4})


# --- measuring ---------------------------------------------------------------------------------------------------------


class Peer:
    """verl in its own interpreter, one request at a time."""

    def __init__(self, python: str, directory: Path) -> None:
        script = Path(__file__).parent / "peers" / "verl_algorithms.py"
        self.directory, self.errors = directory, (directory / "stderr").open("w+")
        self.process = subprocess.Popen(
            [python, str(script), str(directory), str(THREADS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            sys.exit(f"verl failed:\n{self.errors.read()[-3000:]}")
        return json.loads(line)

    def ask(self, request: dict[str, Any], results: int = 0) -> float:
        """Seconds of one call; the first `results` of what it returned are kept for `result`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**request, "save": results}) + "\n")
        self.process.stdin.flush()
        return self._answer()["seconds"]

    def result(self, number: int) -> Tensor:
        return torch.from_numpy(np.load(self.directory / f"result_{number}.npy"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


def compare(work: Work, workload: Workload, peer: Peer) -> tuple[float, int, bool]:
    """The largest difference within the tolerance, how many elements are beyond it, and whether that is agreement."""
    subject = work.check or work
    ours = subject.run(workload)
    largest, edges, agree = 0.0, 0, True
    for request in subject.peers:
        peer.ask(request, len(ours))
        for number, mine in enumerate(ours):
            theirs = peer.result(number).double()
            difference = (workload.written(mine).double() - theirs).abs() / theirs.abs().max()
            beyond = ~(difference <= TOLERANCE)
            agree &= int(beyond.sum()) <= EDGES * difference.numel()
            edges = max(edges, int(beyond.sum()))
            largest = max(largest, float((difference if not agree else difference[~beyond]).max()))
    return largest, edges, agree


def measure(work: Work, workload: Workload, peer: Peer | None, repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, by system; one call each before that is a warm-up."""
    seconds: dict[str, list[float]] = {"burnish": []}
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        work.run(workload)
        ours = time.perf_counter() - started
        theirs = {r["function"]: peer.ask(r) for r in work.peers} if peer else {}
        if repeat:
            for name, value in {"burnish": ours, **theirs}.items():
                seconds.setdefault(name, []).append(value)
    return seconds


def rows_of(work: Work, workload: Workload, peer: Peer | None, repeats: int) -> Iterator[dict[str, Any]]:
    """The result rows of one piece of work: burnish, then verl's faster function."""
    size = {"tokens": workload.logp.numel(), "sequences": workload.batch.num_sequences, "repeats": repeats, "seed": 0}
    found = compare(work, workload, peer) if peer and work.peers else None
    medians = {name: statistics.median(s) for name, s in measure(work, workload, peer, repeats).items()}
    ours = {"work": work.name, "system": "burnish", "wall_s": medians.pop("burnish"), **size}
    if found is None or peer is None:
        yield ours
        return
    function, best = min(medians.items(), key=lambda item: item[1])
    difference, edges, agree = found
    ours |= {"difference": difference, "edges": edges, "agree": agree}
    if agree:
        ours["times_faster"] = best / ours["wall_s"]
    yield ours
    yield {"work": work.name, "system": f"verl {peer.version}", "function": function, "wall_s": best, **size}


def line_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table from the result rows of one piece of work."""
    ours = rows[0]
    line = {"what": ours["work"], "burnish ms": 1000 * ours["wall_s"]}
    if len(rows) > 1:
        ratio = f"{ours['times_faster']:.3g}x" if ours["agree"] else "they disagree"
        line |= {"verl ms": 1000 * rows[1]["wall_s"], "ratio": ratio, "difference": ours["difference"]}
        line["edges"] = ours["edges"] or None
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl-python", help="interpreter of an environment with verl")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8_192_000)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--only", nargs="*", default=[""], help="names of rows, or their beginnings")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    columns = make_columns(args.sequences, args.tokens)
    workload = make_workload(columns)
    weights = {mode: aggregation_weights(workload.batch, mode) for mode in ("token-mean", MEANS)}
    workload = replace(workload, batch=workload.batch.with_token(**weights))
    rows, lines, peer = [], [], None
    with tempfile.TemporaryDirectory() as folder:
        if args.verl_python:
            for name, column in columns.items():
                np.save(Path(folder, f"{name}.npy"), column)
            peer = Peer(args.verl_python, Path(folder))
        for work in all_work():
            if work.name.startswith(tuple(args.only)):
                found = list(rows_of(work, workload, peer, args.repeats))
                rows += found
                lines.append(line_of(found))
        if peer:
            peer.close()
    print(table(lines, ["what", "burnish ms", "verl ms", "ratio", "difference", "edges"]))
    if args.only == [""]:
        print(f"saved {save('algorithms', rows)}")


if __name__ == "__main__":
    main()
