"""The same DPO run in TRL, run by `bench/dpo_vs_trl.py --trl-python`; prints one JSON line.

python trl_dpo.py '{"directory": ..., "steps": 10, "pairs": 16, "lr": 1e-3, "beta": 0.1, "mode": "cached", "threads": 2}'
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

asked = json.loads(sys.argv[1])
directory = Path(asked["directory"])
torch.set_num_threads(asked["threads"])
transformers.logging.set_verbosity_error()
rows = [json.loads(line) for line in (directory / "in_order.jsonl").read_text().splitlines()]
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.started)


class InOrder(trl.DPOTrainer):
    """Takes the rows as they come, and keeps the loss of every step in full."""

    losses = []  # noqa: RUF012 (there is one trainer)

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


clock = Clock()
with tempfile.TemporaryDirectory() as folder:
    config = trl.DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=asked["pairs"],
        max_steps=asked["steps"],
        max_length=None,
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        beta=asked["beta"],
        precompute_ref_log_probs=asked["mode"] == "cached",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    trainer = InOrder(
        model=model,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.train()
print(json.dumps({"version": trl.__version__, "steps_s": clock.seconds, "losses": InOrder.losses}))
