"""Two supervised controls beside an RL run on a generated task: would imitation alone have done it?

Both start from nothing like the run itself, see ten times its demonstrations and make four times its updates. One
imitates the same flawed demonstrations, the other only those the verifier calls right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from burnish.config.errors import UserError
from burnish.config.schema import Sft, Source, TrainConfig
from burnish.controller import roles
from burnish.data.supervised import load_examples
from burnish.rewards.rewards import Rewards
from burnish.run.files import atomic_write
from burnish.run.run import Run
from burnish.trainers import sft
from burnish.trainers.build import build_validation, held_out_prompts
from burnish.training.learner import Learner

MORE_DEMONSTRATIONS, MORE_UPDATES = 10, 4
CONTROLS = {"SFT on more of the same demonstrations": {}, "SFT on verified demonstrations only": {"verified": True}}


def check_controls(config: TrainConfig) -> tuple[Sft, Source]:
    """The warm start and its task; controls exist only where both do."""
    stage = config.warm_start
    if stage is None or len(stage.data) != 1 or stage.data[0].task is None or not config.data.validation:
        raise UserError("--controls needs a warm_start on one task's demonstrations, and data.validation to measure on")
    return stage, stage.data[0]


def run_controls(
    config: TrainConfig, base: Path, run: Run, tell: Callable[[str], None] = print
) -> dict[str, dict[str, float]]:
    """Held-out metrics of each control, printed, and written to controls.json in the run."""
    stage, source = check_controls(config)
    longer = stage.model_copy(update={"updates": stage.updates * MORE_UPDATES})
    num = source.options.get("num", 2000) * MORE_DEMONSTRATIONS
    results = {}
    with Rewards(config.reward, base) as rewards:
        for number, (title, options) in enumerate(CONTROLS.items(), 1):
            policy = roles.build_policy(config.model, config.data.train, config.seed, base)
            data = [source.model_copy(update={"options": {**source.options, **options, "num": num}})]
            examples, _ = load_examples(
                data, policy.tokenizer, config.data.template, stage.max_tokens, stage.overlong, base, config.seed
            )
            learner = Learner(policy.module, longer.optimizer, longer.updates, longer.token_budget)
            run.display.start(f"control: {title}, {len(examples):,} examples", longer.updates)
            sft.train(learner, examples, longer, config.seed, run.display.step)
            driver = roles.build_driver(config, policy, roles.build_engine(policy, config.rollout), base)
            held_out = held_out_prompts(config, base, policy)
            results[title] = build_validation(config, run, policy, driver, rewards, held_out, f"control-{number}-")(0)
            run.display.stop()
            accuracies = [f"{k.split('/')[1]} {v:.3f}" for k, v in results[title].items() if k.endswith("/accuracy")]
            tell(f"control, {title}: {', '.join(accuracies)}")
    atomic_write(run.directory.path / "controls.json", json.dumps(results, indent=1))
    return results
