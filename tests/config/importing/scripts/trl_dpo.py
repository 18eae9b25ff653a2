# DPO with LoRA on 4-bit weights; the trainer is made in main(), so importing the script starts nothing.
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer


def main():
    base = "meta-llama/Llama-3.2-1B-Instruct"
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.bfloat16, quantization_config=four_bits)
    tokenizer = AutoTokenizer.from_pretrained(base)
    adapters = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    pairs = load_dataset("trl-lib/ultrafeedback_binarized")
    options = dict(learning_rate=5e-6, beta=0.05, max_length=2048, loss_type="ipo")
    args = DPOConfig(
        "dpo-out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=16,
        max_steps=300,
        eval_strategy="steps",
        eval_steps=50,
        gradient_checkpointing=True,
        optim="adamw_8bit",
        push_to_hub=True,
        seed=7,
        **options,
    )
    trainer = DPOTrainer(
        model,
        args=args,
        train_dataset=pairs["train"],
        eval_dataset=pairs["test"].select(range(500)),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    trainer.train()


if __name__ == "__main__":
    main()
