"""Rollouts and a GRPO step of an image-text model: Qwen2.5-VL-3B's shape with random weights and images of 448 x 448 pixels.

python bench/vision.py [--parts rollout step] [--transformers] [--tiny] [--repeats 3]

32 prompts of 64 text tokens and one image (256 tokens) each, 8 samples a prompt, 256 new tokens, temperature 1, no stop token. The tower is
frozen, so its features are computed once for a prompt and read by engine and learner. A step is these rollouts and one update of the
decoder's weights in bfloat16 with float32 master weights and moments. `peak_gib` of a step is that of its update, beside `planned_gib`.

`--transformers` runs the same work with `transformers`: `generate` on the whole batch, which computes each image once for a sample, then
forward and backward in micro-batches with gradient checkpointing and fused AdamW on bfloat16 weights, as TRL's trainer does it with this
backend. TRL itself is not run. `--tiny` is a small model on a CPU, which shows that the script works.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from common import on_this_gpu, save_beside, table

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.random_keys import fold
from burnish.core.segments import offsets_from_lengths
from burnish.inference.native.paged_engine import PagedEngine
from burnish.memory_plan.planner import GIB, RunSetup, plan_memory
from burnish.models.architecture import architecture_from_hf
from burnish.models.decoder import Decoder
from burnish.models.weight_files import materialise, on_meta_device
from burnish.training.learner import Learner

Row = dict[str, Any]
IMAGE_TOKEN = 151655


@dataclass(frozen=True)
class Work:
    """What is asked of a system."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    tokens: dict[str, int]
    prompts: int
    group: int
    text_tokens: int
    new: int
    pixels: int
    micro_batch: int
    """Rows of a micro-batch of transformers."""
    budget: int
    """Tokens of a micro-batch of burnish."""

    @property
    def requests(self) -> int:
        return self.prompts * self.group

    @property
    def side(self) -> int:
        """Tokens on the side of an image."""
        return self.pixels // (self.vision["patch_size"] * self.vision["spatial_merge_size"])

    def config(self) -> Any:
        """The config of transformers."""
        return transformers.Qwen2_5_VLConfig(
            text_config=self.text, vision_config=self.vision, **self.tokens, tie_word_embeddings=True
        )


QWEN_3B = Work(
    "Qwen2.5-VL-3B",
    {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": None,
        "eos_token_id": 151645, "pad_token_id": 151643,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    {
        "hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "out_hidden_size": 2048, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    },
    {"image_token_id": IMAGE_TOKEN, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653},
    prompts=32, group=8, text_tokens=64, new=256, pixels=448, micro_batch=16, budget=16384,
)  # fmt: skip
TINY = Work(
    "tiny Qwen2.5-VL",
    QWEN_3B.text | {
        "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "eos_token_id": 1, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    },
    QWEN_3B.vision | {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [1]},
    {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193},
    prompts=4, group=2, text_tokens=8, new=8, pixels=112, micro_batch=4, budget=512,
)  # fmt: skip


def random_decoder(work: Work, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A native model of the shape with random weights and a frozen tower."""
    with on_meta_device():
        model = Decoder(architecture_from_hf(work.config().to_dict()))
    materialise(model, dtype, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    assert model.vision is not None
    model.vision.requires_grad_(False)
    return model


def requests_of(work: Work, tag: str) -> list[Request]:
    """The requests, with images that no other `tag` has."""
    random = np.random.default_rng(abs(fold(tag)) % 2**32)
    image = work.tokens["image_token_id"]
    found = []
    for i in range(work.prompts):
        pixels = random.integers(0, 256, (1, work.pixels, work.pixels, 3), dtype=np.uint8)
        picture = Picture(pixels, (1, work.side, work.side))
        text = random.integers(2, image - 10, work.text_tokens).tolist()
        tokens = (*text[:4], *[image] * picture.num_tokens, *text[4:])
        options = SamplingOptions(max_tokens=work.new)
        found += [
            Request(f"{tag}{i}.{j}", tokens, options, fold(tag, i, j), pictures=(PictureSpan(4, picture),))
            for j in range(work.group)
        ]
    return found


def batch_of(work: Work, requests: list[Request], done: dict[str, Completion], device: torch.device) -> Batch:
    """The rollouts as one packed batch with advantages of both signs."""
    pairs = [(r, done[r.id]) for r in requests]
    tokens = torch.tensor([t for r, c in pairs for t in (*r.tokens, *c.tokens.tolist())])
    offsets = offsets_from_lengths(torch.tensor([len(r.tokens) + len(c.tokens) for r, c in pairs]))
    mask = torch.tensor([k >= len(r.tokens) for r, c in pairs for k in range(len(r.tokens) + len(c.tokens))])
    number = torch.arange(len(pairs))
    columns = {"advantages": torch.where(number % 2 == 0, -1.0, 1.0), "group_ids": number // work.group}
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, columns)
    batch = batch.with_pictures([request.pictures for request in requests])
    return batch.with_token(weight=aggregation_weights(batch, "token-mean")).to(device)


class Clock:
    """Seconds since it was made, after all work of the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sync()
        self.started = time.perf_counter()

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self) -> float:
        self._sync()
        return time.perf_counter() - self.started


def burnish_rows(work: Work, device: torch.device, dtype: torch.dtype, parts: list[str], repeats: int) -> list[Row]:
    """Median rollout and step of burnish, after a first one."""
    model = random_decoder(work, device, dtype)
    engine = PagedEngine(model, max_rows=work.requests)
    learner = Learner(model, Optimizer(lr=1e-6), 100, token_budget=work.budget) if "step" in parts else None
    assert model.feature_cache is not None
    rollouts, steps, learns, towers = [], [], [], []
    peaks: list[float | None] = []
    tokens = 0
    for k in range(repeats + 1):
        requests = requests_of(work, f"step{k}-")
        clock = Clock(device)
        engine.submit(requests)
        done = {c.id: c for c in engine.stream()}
        rollouts.append(clock.seconds())
        tokens = sum(len(c.tokens) for c in done.values())
        if learner is not None:
            batch = batch_of(work, requests, done, device)
            engine.sleep()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            learner.update(batch, PolicyLoss())
            peaks.append(peak_gib(device))
            learner.release()
            engine.load(k, ())
            steps.append(clock.seconds())
            learns.append(steps[-1] - rollouts[-1])
        else:
            engine.load(k, ())
        assert model.feature_cache.num_computed == work.prompts * (k + 1), "each image once"
        towers.append(tower_seconds(model, requests, device))
        print(f"burnish {k}: rollout {rollouts[-1]:.3f} s, step {steps[-1] if steps else 0:.3f} s", flush=True)
    row = {"work": f"{work.name} rollout", "system": "burnish", "wall_s": median(rollouts), "tokens": tokens}
    row |= {"tokens_per_s": tokens / row["wall_s"], "tower_s": median(towers), "peak_gib": peak_gib(device)}
    rows = [row]
    if learner is not None:
        rows.append(
            {
                "work": f"{work.name} GRPO step",
                "system": "burnish",
                "wall_s": median(steps),
                "learn_s": median(learns),
                "peak_gib": peaks[-1],
                "planned_gib": planned_gib(work, model, dtype),
            }
        )
    return rows


def planned_gib(work: Work, model: Decoder, dtype: torch.dtype) -> float:
    """The planned peak of torch's memory in an update after the first; `peak_gib` of a step is the measured one."""
    longest = work.text_tokens + work.side**2 + work.new
    name = str(dtype).removeprefix("torch.")
    setup = RunSetup(model.arch, name, True, Optimizer(lr=1e-6), work.budget, longest, work.requests * longest)
    return plan_memory(setup).learners_peak(2) / GIB


def tower_seconds(model: Decoder, requests: list[Request], device: torch.device) -> float:
    """Seconds of the tower for the distinct images of the requests."""
    pictures = list({span.picture.key: span.picture for r in requests for span in r.pictures}.values())
    assert model.vision is not None
    clock = Clock(device)
    with torch.no_grad():
        for start in range(0, len(pictures), 16):
            model.vision(pictures[start : start + 16])
    return clock.seconds()


def transformers_rows(
    work: Work, device: torch.device, dtype: torch.dtype, parts: list[str], repeats: int
) -> list[Row]:
    """Median `generate` and step with transformers, after a first short one."""
    torch.manual_seed(0)
    with device:
        theirs: Any = transformers.Qwen2_5_VLForConditionalGeneration(work.config()).to(dtype)
    theirs.model.visual.requires_grad_(False)
    decoder = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(decoder, lr=1e-6, fused=True) if "step" in parts else None
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": work.new}
    # transformers would sample placeholders too, and then fail in the next forward.
    never = [work.tokens["image_token_id"], work.tokens["video_token_id"]]
    options |= {"max_new_tokens": work.new, "suppress_tokens": never}
    rollouts, steps, tokens = [], [], 0
    for k in range(repeats + 1):
        requests = requests_of(work, f"step{k}-")
        clock = Clock(device)
        inputs = their_inputs(work, requests, device, dtype)
        theirs.eval()
        theirs.gradient_checkpointing_disable()
        with torch.no_grad():
            out = theirs.generate(**inputs, **options)
        rollouts.append(clock.seconds())
        tokens = work.requests * (out.shape[1] - inputs["input_ids"].shape[1])
        if optimizer is not None:
            their_update(work, theirs, optimizer, inputs, out)
            steps.append(clock.seconds())
        print(f"transformers {k}: rollout {rollouts[-1]:.3f} s, step {steps[-1] if steps else 0:.3f} s", flush=True)
    system = f"transformers {transformers.__version__}"
    row = {"work": f"{work.name} rollout", "system": system, "wall_s": median(rollouts), "tokens": tokens}
    rows = [row | {"tokens_per_s": tokens / row["wall_s"], "peak_gib": peak_gib(device)}]
    if steps:
        rows.append({"work": f"{work.name} GRPO step", "system": system, "wall_s": median(steps)})
        rows[-1] |= {
            "learn_s": median([s - r for s, r in zip(steps, rollouts, strict=True)]),
            "peak_gib": peak_gib(device),
        }
    return rows


def their_inputs(work: Work, requests: list[Request], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The whole batch; each sample has its own copy of its image's patches, as a processor makes them."""
    ids = torch.tensor([r.tokens for r in requests], device=device)
    patch, frames = work.vision["patch_size"], work.vision["temporal_patch_size"]
    grid = 2 * work.side
    sizes = 3 * frames * patch * patch
    random = torch.Generator(device).manual_seed(0)
    values = torch.randn(len(requests) * grid * grid, sizes, generator=random, device=device, dtype=dtype)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": values,
        "image_grid_thw": torch.tensor([[1, grid, grid]] * len(requests), device=device),
        "mm_token_type_ids": (ids == work.tokens["image_token_id"]).int(),
    }


def their_update(work: Work, theirs: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], out: Any) -> None:
    """One update: log-probs of the new tokens, their policy gradient, AdamW."""
    theirs.train()
    theirs.gradient_checkpointing_enable()
    prompt, patches = inputs["input_ids"].shape[1], inputs["pixel_values"].shape[0] // work.requests
    for start in range(0, work.requests, work.micro_batch):
        rows = slice(start, start + work.micro_batch)
        ids = out[rows]
        kinds = torch.zeros_like(ids, dtype=torch.int)
        kinds[:, :prompt] = inputs["mm_token_type_ids"][rows]
        logits = theirs(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=inputs["pixel_values"][start * patches : (start + len(ids)) * patches],
            image_grid_thw=inputs["image_grid_thw"][rows],
            mm_token_type_ids=kinds,
            logits_to_keep=work.new + 1,
            use_cache=False,
        ).logits[:, :-1]
        logp = torch.stack(
            [
                torch.gather(row.float().log_softmax(-1), 1, new[:, None]).squeeze(1)
                for row, new in zip(logits, ids[:, prompt:], strict=True)
            ]
        )
        sign = torch.where(torch.arange(start, start + len(ids), device=ids.device) % 2 == 0, -1.0, 1.0)
        (-(sign[:, None] * (logp - logp.detach()).exp()).sum() / (work.requests * work.new)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def median(seconds: list[float]) -> float:
    """The median after the first."""
    later = sorted(seconds[1:])
    return later[len(later) // 2]


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def measured(rows: Callable[[], list[Row]], device: torch.device) -> list[Row]:
    """The rows of a system that has the whole GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = rows()
    print(table(found, list(found[0])), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["rollout", "step"], default=["rollout", "step"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transformers", action="store_true", help="also the same work with transformers")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    args = parser.parse_args()
    work, device = (TINY, torch.device("cpu")) if args.tiny else (QWEN_3B, torch.device("cuda"))
    dtype = torch.float32 if args.tiny else torch.bfloat16
    options = work, device, dtype, args.parts, args.repeats
    rows = measured(lambda: burnish_rows(*options), device)
    if not args.tiny:  # before transformers, which may end for want of memory
        save_beside(on_this_gpu("vision"), rows, lambda row: (row["work"], row["system"]))
    if args.transformers:
        rows += measured(lambda: transformers_rows(*options), device)
    print(table(rows, ["work", "system", "wall_s", "tokens_per_s", "learn_s", "tower_s", "peak_gib", "planned_gib"]))
    if not args.tiny:
        print(f"saved {save_beside(on_this_gpu('vision'), rows, lambda row: (row['work'], row['system']))}")


if __name__ == "__main__":
    main()
