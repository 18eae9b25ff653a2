"""The cookbook's RL loop with PPO's loss, a KL penalty to the base model and evaluations, as its recipes configure it."""

import asyncio
import sys

from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDatasetBuilder
from tinker_cookbook.rl import train

NAME, FOLDER = sys.argv[1:]
builder = Gsm8kDatasetBuilder(
    batch_size=8, group_size=8, renderer_name="role_colon", model_name_for_tokenizer=NAME, convo_prefix="standard"
)
config = train.Config(
    model_name=NAME,
    recipe_name="test",
    renderer_name="role_colon",
    log_path=FOLDER,
    dataset_builder=builder,
    learning_rate=0.005,
    lora_rank=8,
    max_tokens=16,
    max_steps=6,
    eval_every=5,
    save_every=3,
    loss_fn="ppo",
    loss_fn_config={"clip_high_threshold": 1.3},
    kl_penalty_coef=0.01,
    kl_reference_config=train.KLReferenceConfig(base_model=NAME),
)
asyncio.run(train.main(config))
