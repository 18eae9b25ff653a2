# PPO with a critic and a reward model, on one GPU, with arrays of arguments as newer examples have them.
MODEL=${MODEL:-deepseek-ai/deepseek-llm-7b-chat}
REWARD_MODEL=models/reward
LR=1e-6

DATA=(
    data.train_files=data/full_hh_rlhf/train.parquet
    data.train_batch_size=512
    data.max_prompt_length=128
    data.max_response_length=128
    data.return_raw_chat=True
)
ACTOR=(
    actor_rollout_ref.model.path=$MODEL
    actor_rollout_ref.actor.optim.lr=$LR
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.clip_ratio=0.25
    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
)
CRITIC=(
    critic.optim.lr=1e-5
    critic.optim.lr_warmup_steps_ratio=0.05
    critic.model.path=$MODEL
    critic.ppo_micro_batch_size_per_gpu=4
    critic.fsdp.param_offload=False
)
if [ -n "$REWARD_MODEL" ]; then
    DATA+=(reward_model.enable=True reward_model.model.path="$REWARD_MODEL")
fi

python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.target_kl=0.2 \
    "${DATA[@]}" "${ACTOR[@]}" "${CRITIC[@]}" \
    trainer.critic_warmup=5 trainer.n_gpus_per_node=1 trainer.nnodes=1 \
    trainer.total_training_steps=100 trainer.logger=console my.own.key=7
