"""The same GRPO step in TRL, run by `bench/grpo_step_cpu.py --trl-python`; prints one JSON line.

python trl_grpo_step.py MODEL_DIRECTORY STEPS
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

directory, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
transformers.logging.set_verbosity_error()
prompts = json.loads(Path(directory, "prompts.json").read_text())
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
model.generation_config.eos_token_id = None  # exactly 64 new tokens
tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)


def reward(prompts, completions, **kwargs):
    """About half of the samples are right, whatever they say."""
    return [float(sum(map(ord, c)) % 2) for c in completions]


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.started)


clock = Clock()
with tempfile.TemporaryDirectory() as folder:
    config = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=64,
        max_steps=steps,
        temperature=1.0,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        generation_kwargs={"min_new_tokens": 64},
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
        callbacks=[clock],
    )
    lengths = []
    original = trainer._generate

    def generate(*args, **kwargs):
        started = time.perf_counter()
        result = original(*args, **kwargs)
        lengths.append(time.perf_counter() - started)
        return result

    trainer._generate = generate
    trainer.train()
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"version": trl.__version__, "steps_s": clock.seconds, "generate_s": lengths, "memory_gib": memory}))
