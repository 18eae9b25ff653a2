"""Two supervised controls beside an RL run on a generated task: would imitation alone have done it?

Both start from nothing like the run itself and make four times its supervised updates. One imitates ten times as many
of the same flawed demonstrations, the other those of the run's own demonstrations that the verifier calls right. (Ten
times as many that are *all* right is a perfect teacher, not a control: on sort_digits it reaches 99.7% by itself.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.schema import Sft, TrainConfig
from burnish.controller import roles
from burnish.data.supervised import load_examples
from burnish.data.tasks.registry import make_demonstrations
from burnish.models.activations import set_activations
from burnish.rewards.rewards import Rewards
from burnish.run.files import atomic_write
from burnish.run.run import Run
from burnish.trainers import sft
from burnish.trainers.build import build_validation, held_out_prompts
from burnish.training.learner import Learner

MORE_DEMONSTRATIONS, MORE_UPDATES = 10, 4
Rows = list[dict[str, str]]


def check_controls(config: TrainConfig) -> tuple[Sft, Source]:
    """The warm start and its task; controls exist only where both do."""
    stage = config.warm_start
    if stage is None or len(stage.data) != 1 or stage.data[0].task is None or not config.data.validation:
        raise UserError("--controls needs a warm_start on one task's demonstrations, and data.validation to measure on")
    return stage, stage.data[0]


def control_data(source: Source, seed: int) -> dict[str, Rows]:
    """The demonstrations of each control, by its title."""

    def draw(**options: object) -> Rows:
        return make_demonstrations(str(source.task), {**source.options, **options}, seed)

    own, right = draw(), draw(verified=True)
    # Both walk the same stream, one leaving out what is wrong: the right ones of the run's own come first.
    verified = {tuple(row.values()) for row in right}
    num_right = sum(tuple(row.values()) in verified for row in own)
    return {
        f"SFT on {MORE_DEMONSTRATIONS}x the demonstrations": draw(num=len(own) * MORE_DEMONSTRATIONS),
        "SFT on the demonstrations that are right": right[:num_right],
    }


def run_controls(
    config: TrainConfig, base: Path, run: Run, tell: Callable[[str], None] = print
) -> dict[str, dict[str, float]]:
    """Held-out metrics of each control, printed, and written to controls.json in the run."""
    stage, source = check_controls(config)
    longer = stage.model_copy(update={"updates": stage.updates * MORE_UPDATES})
    results = {}
    with Rewards(config.reward, base) as rewards:
        for number, (title, rows) in enumerate(control_data(source, config.seed).items(), 1):
            policy = roles.build_policy(config.model, config.data.train, config.seed, base)
            rewards.hand_in(roles.build_scorers(config.reward, policy.tokenizer, base))
            path = run.directory.path / f"control-{number}.jsonl"
            atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))
            data = [Source(path=str(path.resolve()))]
            template = config.data.template
            examples, _ = load_examples(data, policy.tokenizer, template, stage.max_tokens, stage.overlong)
            set_activations(policy.module, longer.activations)
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
