"""The tail of a batch with and without speculative decoding: a few rows of a real model that answer long.

python bench/rollout.py --tail MODEL_DIR --prompts questions.jsonl [--rows 1 4 8 16 32] [--drafts 3 7 15] [--new 1024] [--repeats 3]

The prompts are the questions of a JSONL file (`question`, `problem` or `prompt`) in the model's chat template, or with "Question:" and
"Answer:" around them. Each is answered four times first, as by the members of a group that have finished, so that drafts can come from
earlier answers. Then other samples of them are timed. `passes` are forward passes, of which a verified draft saves some.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch
from common import on_this_gpu, save, table

from burnish.config.rollout import Speculation
from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import load_decoder

Source = Literal["context", "answers", "both"]
COLUMNS = ("question", "problem", "prompt")
EARLIER = 4
"""Answers to each prompt before the timed one."""


def prompts_of(path: Path, tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """The first prompts of a JSONL file as tokens."""
    found = []
    for line in path.read_text().splitlines()[:count]:
        row = json.loads(line)
        text = next(row[column] for column in COLUMNS if column in row)
        if tokenizer.has_chat_template:
            found.append(tuple(tokenizer.chat([{"role": "user", "content": text}])))
        else:
            found.append(tuple(tokenizer.encode(f"Question: {text}\nAnswer:")))
    if len(found) < count:
        raise SystemExit(f"{path} has {len(found)} prompts, and {count} rows are asked for")
    return found


def requests_of(prompts: list[tuple[int, ...]], options: SamplingOptions, tag: str, samples: int) -> list[Request]:
    """`samples` requests of each prompt."""
    return [
        Request(f"{tag}-{i}-{k}", prompt, options, fold(tag, i, k))
        for i, prompt in enumerate(prompts)
        for k in range(samples)
    ]


def measure(
    model: Decoder, prompts: list[tuple[int, ...]], options: SamplingOptions, draft: int, source: Source, repeats: int
) -> dict[str, Any]:
    """Median over repeats of the same samples, after one that compiles and captures."""
    rows = len(prompts)
    speculation = Speculation(draft=draft, rows=rows, source=source) if draft else None
    engine = PagedEngine(model, max_rows=rows * EARLIER, speculation=speculation)
    engine.submit(requests_of(prompts, options, "earlier", EARLIER))
    list(engine.stream())
    runs = []
    for repeat in range(repeats + 1):
        if engine.answers is not None:  # each repeat has the same earlier answers, not those of the repeat before
            engine.answers, kept = type(engine.answers)(), engine.answers
        engine.load(repeat + 1, ())  # as after an update: nothing cached counts
        stats = engine.stats
        before = stats.decode_steps, stats.drafted_tokens, stats.accepted_tokens
        if engine.answers is not None:
            for prompt in prompts:
                for answer in kept.answers(prompt)[:EARLIER]:
                    engine.answers.add(prompt, answer.tolist())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        engine.submit(requests_of(prompts, options, "timed", 1))
        lengths = [len(completion.tokens) for completion in engine.stream()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - started
        passes, drafted, accepted = (
            new - old
            for new, old in zip((stats.decode_steps, stats.drafted_tokens, stats.accepted_tokens), before, strict=True)
        )
        runs.append((wall_s, sum(lengths), max(lengths), passes, drafted, accepted))
    wall_s, tokens, longest, passes, drafted, accepted = sorted(runs[1:])[(repeats - 1) // 2]
    return {
        "work": f"tail, {rows} rows",
        "system": f"{draft} drafts, {source}" if draft else "plain",
        "tokens_per_s": tokens / wall_s,
        "wall_s": wall_s,
        "tokens": tokens,
        "longest": longest,
        "passes": passes,
        "ms_per_pass": 1e3 * wall_s / passes,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else None,
    }


def run(args: argparse.Namespace) -> None:
    """Measure all combinations, print them and save them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.load(args.tail)
    model = load_decoder(Path(args.tail), torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    options = SamplingOptions(max_tokens=args.new, temperature=args.temperature, stop_tokens=tuple(tokenizer.eos_ids))
    prompts = prompts_of(args.prompts, tokenizer, max(args.rows))
    rows: list[dict[str, Any]] = []
    for count in args.rows:
        kinds = [(0, ""), *((draft, "both") for draft in args.drafts), (max(args.drafts), "context")]
        for draft, source in kinds:
            rows.append(measure(model, prompts[:count], options, draft, source, args.repeats))
            print(table(rows[-1:], list(rows[-1])), flush=True)
    print(table(rows, list(rows[0])))
    print(f"saved {save(on_this_gpu('tail'), rows)}")
