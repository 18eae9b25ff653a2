"""The rate of searches on a device that only keeps an H200's time: what the host around the engine costs, without a GPU.

    python bench/simulated_searches.py --tokenizer DIR --data-dir FOLDER [--limit 50 300] [--profile]

The engine is the paged one on `simulated_device.py`, with the tokenizer of a real model. The questions are those of gsm8k_test.jsonl. The rows
write sentences of the answers in gsm8k_train.jsonl with empty lines between, where the steps of searches end. So stop strings, the tree, the
verifier (likelihood) and the scheduler cost what they cost on a GPU; launches of prefills and further passes do not.

`device_share` is the time in which the device had work. `tokens_per_device_second` is the rate if the host never kept it waiting, whatever else
runs on this machine. Results: bench/results/simulated_searches.json.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import save_beside, table
from simulated_device import SimulatedEngine
from test_time_scaling import SEARCHES, one_rate, rated_systems, rates_session

from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer

COLUMNS = [
    "system",
    "questions",
    "tokens_per_second",
    "share",
    "device_share",
    "tokens_per_device_second",
    "cpu_us_per_token",
    "tokens",
    "requests",
]
SENTENCES_A_STEP = 2


def model_folder(folder: Path, tokenizer: Tokenizer) -> Path:
    """A small model with the vocabulary of the tokenizer."""
    small = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 48}
    vocab = 128 * -(-tokenizer.vocab_size // 128)
    model = Decoder(Architecture(family="llama", vocab_size=vocab, max_positions=32768, tied=True, **small))
    initialise(model, seed=0)
    folder.mkdir()
    PolicyModel(model, tokenizer, None, "").save(folder)
    return folder


def steps_of(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Steps of the answers in a file of questions and answers, as tokens, an empty line behind each."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines()[:2000]:
        lines = json.loads(line)["answer"].splitlines()
        for k in range(0, len(lines), SENTENCES_A_STEP):
            found.append(tokenizer.encode(" ".join(lines[k : k + SENTENCES_A_STEP]) + "\n\n"))
    return found


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """Print what takes the most time in the block, if wanted."""
    if not wanted:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True, help="has gsm8k_train.jsonl and gsm8k_test.jsonl")
    parser.add_argument("--limit", type=int, nargs="+", default=[50, 300])
    parser.add_argument("--plain", type=int, default=16, help="plain samples of each question")
    parser.add_argument("--searches", nargs="*", default=SEARCHES, choices=SEARCHES)
    parser.add_argument("--max-rows", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(args.tokenizer)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        model = model_folder(Path(temporary) / "model", tokenizer)
        for limit in args.limit:
            plain_rate = None
            for name, strategy in rated_systems(args.searches, args.plain, {"name": "likelihood"}).items():
                with ExitStack() as stack:
                    options = argparse.Namespace(
                        model=model,
                        limit=limit,
                        temperature=1.0,
                        max_tokens=512,
                        set=["reward.workers=1"],
                        data_dir=args.data_dir,
                    )
                    session = rates_session(options, "gsm8k", [strategy], Path(temporary), args.plain, stack)
                    engine = SimulatedEngine(session.policy.module, args.max_rows, tokenizer.decode, cache_bytes=2**33)
                    engine.sentences, engine.end = (
                        steps_of(args.data_dir / "gsm8k_train.jsonl", tokenizer),
                        tokenizer.eos_ids[0],
                    )
                    engine.reserve(4096)
                    session.engine = engine
                    with profiled(args.profile):
                        found = one_rate(session, strategy, args.plain)
                    busy = engine.runner.clock.busy_s
                plain_rate = plain_rate or found["tokens_per_second"]
                found |= {"share": found["tokens_per_second"] / plain_rate, "device_share": busy / found["wall_s"]}
                found |= {"tokens_per_device_second": found["tokens"] / busy}
                found |= {"cpu_us_per_token": 1e6 * found["cpu_s"] / found["tokens"]}
                rows.append({"work": "rate", "system": name, "questions": limit, "code": "now", **found})
                print(table(rows[-1:], COLUMNS), flush=True)
    print("\n" + table(rows, COLUMNS))
    if not args.profile:
        save_beside("simulated_searches", rows, lambda row: (row["system"], row["questions"], row["code"]))


if __name__ == "__main__":
    main()
