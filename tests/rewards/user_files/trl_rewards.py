"""Reward functions as a user of TRL's GRPO trainer writes them: a batch a call, columns of the data set by name, a list of numbers."""

import asyncio


def text_of(completion):
    """Completions of chat prompts are lists of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def starts_with_digit(completions, **kwargs):
    return [0.5 if text_of(completion)[:1].isdigit() else 0.0 for completion in completions]


def accuracy(prompts, completions, ground_truth, **kwargs):
    assert len(prompts) == len(completions)
    return [1.0 if truth in text_of(said) else 0.0 for said, truth in zip(completions, ground_truth, strict=True)]


def answer_column(completions, answer=None, **kwargs):
    """Rows with `extra_info.answer` have no column `answer`: that is their ground truth."""
    return [float(len(one)) for one in answer]


def brevity(completions, completion_ids, log_extra, log_metric):
    lengths = [len(ids) for ids in completion_ids]
    log_metric("longest", max(lengths))
    log_extra("ids", [str(ids) for ids in completion_ids])
    log_extra("is_short", [length < 4 for length in lengths])
    return [-0.01 * length for length in lengths]


async def progress(completions, trainer_state, **kwargs):
    await asyncio.sleep(0)
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def only_sums(completions, kind, **kwargs):
    """Applies to rows of one kind only."""
    return [0.25 if one == "sum" else None for one in kind]
