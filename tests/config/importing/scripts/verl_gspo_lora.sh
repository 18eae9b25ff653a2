# GSPO with LoRA adapters and a reward function of the user's.
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer.yaml \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_low=0.0003 actor_rollout_ref.actor.clip_ratio_high=0.0004 \
    data.train_files=train.parquet data.train_batch_size=64 data.shuffle=False data.seed=7 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.model.path=models/qwen \
    actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=[q_proj,v_proj] \
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.rollout.n=8 \
    custom_reward_function.path=rewards/score.py custom_reward_function.name=graded \
    +custom_reward_function.reward_kwargs.strict=true \
    trainer.n_gpus_per_node=1 trainer.save_freq=-1 trainer.total_training_steps=50 \
    ~critic.megatron
