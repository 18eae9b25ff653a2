"""The GRPO step of `bench/grpo_step.py` in TRL, run by that script with `--trl-python`; prints one JSON line.

python trl_grpo_step_gpu.py '{"shape": {...}, "prompts": 32, "samples": 8, "prompt_tokens": 128, "new_tokens": 256, "micro_batch": 16, "steps": 4, "vllm": false}'

Random weights of the shape in bfloat16, a tokenizer with as many words, no end token, so completions have full length.
"""

import json
import random
import sys
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback


def word(k):
    """The token's text; of one width, so that no special token is found inside another word."""
    return f"w{k:06d}"


asked = json.loads(sys.argv[1])
shape, steps = asked["shape"], asked["steps"]
on_gpu = torch.cuda.is_available()
transformers.logging.set_verbosity_error()
words = Tokenizer(models.WordLevel({word(k): k for k in range(shape["vocab_size"])}, unk_token=word(0)))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=word(0), eos_token=word(1), padding_side="left")
config = transformers.Qwen2Config(
    vocab_size=shape["vocab_size"],
    hidden_size=shape["hidden_size"],
    intermediate_size=shape["mlp_size"],
    num_hidden_layers=shape["num_layers"],
    num_attention_heads=shape["num_heads"],
    num_key_value_heads=shape["num_kv_heads"],
    tie_word_embeddings=shape["tied"],
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
with torch.device("cuda" if on_gpu else "cpu"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.generation_config.eos_token_id = None
draw = random.Random(0)
length, vocab = asked["prompt_tokens"], shape["vocab_size"]
prompts = [" ".join(word(draw.randrange(2, vocab)) for _ in range(length)) for _ in range(asked["prompts"] * steps)]


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
        if on_gpu:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)


clock = Clock()
new_tokens, total = asked["new_tokens"], asked["prompts"] * asked["samples"]
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if asked["vllm"]:
        del model
        torch.cuda.empty_cache()
        how = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        how["generation_kwargs"] = {"min_tokens": new_tokens, "ignore_eos": True}
    else:
        how = {"generation_kwargs": {"min_new_tokens": new_tokens}}
    options = trl.GRPOConfig(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=asked["micro_batch"],
        gradient_accumulation_steps=total // asked["micro_batch"],
        num_generations=asked["samples"],
        max_completion_length=new_tokens,
        max_steps=steps,
        temperature=1.0,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.bfloat16} if asked["vllm"] else None,
        **how,
    )
    trainer = trl.GRPOTrainer(
        model=folder if asked["vllm"] else model,
        reward_funcs=reward,
        args=options,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[clock],
    )
    generated = []
    original = trainer._generate

    def generate(*args, **kwargs):
        started = time.perf_counter()
        result = original(*args, **kwargs)
        generated.append(time.perf_counter() - started)
        return result

    trainer._generate = generate
    trainer.train()
peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
print(json.dumps({"version": trl.__version__, "steps_s": clock.seconds, "generate_s": generated, "peak_gib": peak}))
