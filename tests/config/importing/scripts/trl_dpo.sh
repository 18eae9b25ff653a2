# TRL's own script for DPO, started by accelerate.
MODEL=Qwen/Qwen2-0.5B-Instruct
accelerate launch --config_file zero2.yaml --num_processes 4 trl/scripts/dpo.py \
    --model_name_or_path $MODEL \
    --dataset_name trl-lib/ultrafeedback_binarized --dataset_train_split "train[:1000]" \
    --learning_rate 5.0e-7 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --max_steps 200 --gradient_checkpointing --output_dir out/dpo --no_remove_unused_columns \
    --use_peft --lora_r 32 --lora_alpha=16 --lora_target_modules q_proj v_proj --load_in_4bit
