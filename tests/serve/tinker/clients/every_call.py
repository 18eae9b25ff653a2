"""Calls of the stock `tinker` package, as its documentation writes them. Run by the package's own interpreter; prints JSON."""

import json
import sys

import tinker
import torch
from tinker import types

NAME = sys.argv[1]


def squared(data, logprobs):
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"squared": loss.item()}


def failure(call):
    try:
        call()
    except tinker.RequestFailedError as error:
        return {"category": str(error.category), "message": str(error)}
    return None


def main():
    found = {}
    service = tinker.ServiceClient()
    found["models"] = [one.model_name for one in service.get_server_capabilities().supported_models]
    first, second = (service.create_lora_training_client(NAME, rank=rank, seed=rank) for rank in (4, 2))
    found["rank"] = [one.get_info().lora_rank for one in (first, second)]
    tokens = list(range(20, 60))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 39},
    )
    short = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:3]),
        loss_fn_inputs={"target_tokens": tokens[1:4], "weights": [1.0] * 3},
    )
    # More than a chunk has, so that the parts are sent at once and out of order.
    futures = [one.forward_backward([short] * 1100, "cross_entropy") for one in (first, second)]
    steps = [one.optim_step(types.AdamParams(learning_rate=1e-2)) for one in (first, second)]
    results = [future.result() for future in futures]
    found["loss"] = [one.metrics["loss:sum"] for one in results]
    found["num_outputs"] = [len(one.loss_fn_outputs) for one in results]
    found["grad_norm"] = [one.result().metrics["unclipped_grad_l2:mean"] for one in steps]
    wide = torch.stack([torch.tensor(tokens[1:]), torch.tensor(tokens[:-1])], 1)
    weights = torch.zeros(39, 2)
    weights[5, 0] = weights[6, 1] = 0.5
    several = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": wide, "weights": weights}
    )
    output = first.forward([several, datum], "cross_entropy").result()
    found["wide"] = [one["logprobs"].shape for one in output.loss_fn_outputs]
    found["wide_equals_plain"] = torch.allclose(
        output.loss_fn_outputs[0]["logprobs"].to_torch()[:, 0], output.loss_fn_outputs[1]["logprobs"].to_torch()
    )
    policy = {"target_tokens": tokens[1:], "logprobs": [-1.0] * 39, "advantages": [0.5] * 39}
    for loss, config in (
        ("importance_sampling", None),
        ("ppo", {"clip_high_threshold": 1.1}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
    ):
        rl = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=policy)
        found[loss] = first.forward([rl], loss, config).result().metrics["loss:sum"]
    found["custom"] = first.forward_backward_custom([datum], squared).result().metrics
    first.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    prompt, params = (
        types.ModelInput.from_ints(tokens[:8]),
        types.SamplingParams(max_tokens=5, temperature=0.9, stop=[]),
    )
    samplers = [one.save_weights_and_get_sampling_client() for one in (first, second)]
    base = service.create_sampling_client(base_model=NAME)
    sampled = [one.sample(prompt, 2, params, topk_sample_logprobs=2) for one in (*samplers, base)]
    found["samples"] = [[len(s.tokens) for s in one.result().sequences] for one in sampled]
    found["ids"] = len({s.sequence_id for one in sampled for s in one.result().sequences})
    scores = [one.compute_logprobs(prompt).result() for one in (*samplers, base)]
    found["distinct"] = len({tuple(one[1:]) for one in scores})
    found["kl"] = sum(p - q for p, q in zip(scores[0][1:], scores[2][1:], strict=True))

    state = first.save_state("state").result().path
    weights_path = first.save_weights_for_sampler("weights").result().path
    resumed = service.create_training_client_from_state_with_optimizer(state)
    found["resumed"] = [one.forward([datum], "cross_entropy").result().metrics["loss:sum"] for one in (first, resumed)]
    saved = service.create_sampling_client(model_path=weights_path)
    found["saved"] = saved.compute_logprobs(prompt).result() == samplers[0].compute_logprobs(prompt).result()
    rest = tinker.RestClient()
    listed = rest.list_checkpoints(first.model_id).result().checkpoints
    found["checkpoints"] = sorted(one.checkpoint_id for one in listed)
    found["run"] = rest.get_training_run_by_tinker_path(state).result().lora_rank
    found["failures"] = [
        failure(lambda: service.create_lora_training_client("another/model")),
        failure(lambda: first.forward_backward([datum], "stable_reinforce").result()),
        failure(lambda: base.sample(types.ModelInput.from_ints([10**6]), 1, params).result()),
    ]
    found["after_failures"] = first.forward([datum], "cross_entropy").result().metrics["loss:sum"]
    print(json.dumps(found))


main()
