# SFT with arguments of argparse and of the environment.
import argparse
import os

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M")
args = parser.parse_args()

rows = Dataset.from_list([{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}])
BATCH = int(os.environ.get("BATCH", "4"))

trainer = SFTTrainer(
    model=args.model,
    train_dataset=rows,
    args=SFTConfig(
        output_dir="sft-out",
        learning_rate=args.lr,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=BATCH * 2,
        max_length=4096,
        packing=True,
        assistant_only_loss=True,
        max_steps=100,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        weight_decay=compute_decay(),
    ),
)
trainer.train()
