# Supervised training on messages, with torchrun.
nproc_per_node=${1:-4}
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \
    -m verl.trainer.sft_trainer \
    data.train_files=data/multiturn/train.parquet data.val_files=data/multiturn/test.parquet \
    data.messages_key=messages data.max_length=2048 data.truncation=right data.train_batch_size=64 \
    model.path=Qwen/Qwen2.5-0.5B-Instruct model.lora_rank=32 model.target_modules=all-linear \
    optim.lr=1e-5 optim.lr_scheduler_type=cosine optim.lr_warmup_steps_ratio=0.1 optim.clip_grad=0.5 \
    engine.ulysses_sequence_parallel_size=2 \
    trainer.project_name=sft trainer.experiment_name=small trainer.total_training_steps=20 trainer.logger=console
