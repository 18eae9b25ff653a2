# GRPO with two reward functions, as a first script with TRL looks like. It trains on import: it has no main().
import re

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
LR = 2e-6
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def said(completion):
    text = completion if isinstance(completion, str) else completion[0]["content"]
    found = TAG.search(text)
    return found.group(1).strip() if found else ""


def correct(completions, answer, **kwargs):
    return [1.0 if said(one) == str(gold) else 0.0 for one, gold in zip(completions, answer)]


def tagged(completions, **kwargs):
    return [0.5 if said(one) else 0.0 for one in completions]


dataset = load_dataset("json", data_files="data/sums.jsonl", split="train")
dataset = dataset.rename_column("question", "prompt").map(lambda row: {"prompt": row["prompt"] + "?"})

training_args = GRPOConfig(
    output_dir=f"outputs/{MODEL.split('/')[-1]}-grpo",
    run_name="sums",
    learning_rate=LR,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_prompt_length=256,
    max_completion_length=2**9,
    num_train_epochs=1,
    beta=0.04,
    loss_type="dr_grpo",
    scale_rewards=False,
    epsilon_high=0.28,
    bf16=True,
    use_vllm=True,
    vllm_gpu_memory_utilization=0.3,
    logging_steps=1,
    save_steps=100,
    report_to=["wandb", "my_tracker"],
    reward_weights=[1.0, 0.2],
    my_new_option=3,
    model_init_kwargs={"torch_dtype": torch.bfloat16, "attn_implementation": "flash_attention_2"},
)
training_args.max_steps = 40

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[correct, tagged],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
