"""Reward functions as a user of verl writes them: one sample a call, or a batch with the names in the plural."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    is_right = ground_truth in solution_str
    return {
        "score": 1.0 if is_right else -0.25,
        "acc": is_right,
        "length": len(solution_str),
        "source": data_source,
        "index": extra_info["index"],
    }


def short(solution_str, ground_truth, bonus=0.0):
    return float(ground_truth in solution_str) + bonus


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(extra_infos)
    return [
        {"score": float(truth in said), "tried": 1} for said, truth in zip(solution_strs, ground_truths, strict=True)
    ]
