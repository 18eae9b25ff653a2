"""The works of `bench/rollout.py` in vLLM, run by `bench/rollout.py --vllm-python`; prints one JSON line.

python vllm_rollout.py '{"shape": {...}, "works": {"R1": {"requests": 256, "new": 256, "prompt": 128}}, "repeats": 3}'

Random weights of the named shape in bfloat16, temperature 1, no stop token, the log-prob of every sampled token.
"""

import json
import sys
import tempfile
import time

import numpy as np
import transformers
import vllm


def model_directory(folder, shape):
    """A directory with nothing but the config: the weights are made up."""
    config = transformers.Qwen2Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["mlp_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    return folder


def main():
    asked = json.loads(sys.argv[1])
    works = asked["works"]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = vllm.LLM(
            model=model_directory(folder, asked["shape"]),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max(w["prompt"] + w["new"] for w in works.values()),
            max_num_seqs=max(w["requests"] for w in works.values()),
            gpu_memory_utilization=0.8,
            enable_prefix_caching=False,
        )
    start_s = time.perf_counter() - started
    rows = []
    for name, work in works.items():
        random = np.random.default_rng(0)
        prompts = random.integers(0, asked["shape"]["vocab_size"], (work["requests"], work["prompt"])).tolist()
        options = vllm.SamplingParams(
            temperature=1.0, max_tokens=work["new"], ignore_eos=True, logprobs=0, detokenize=False
        )
        times = []
        for _ in range(asked["repeats"]):
            begun = time.perf_counter()
            done = engine.generate([{"prompt_token_ids": p} for p in prompts], options, use_tqdm=False)
            times.append(time.perf_counter() - begun)
        tokens = sum(len(one.outputs[0].token_ids) for one in done)
        wall_s = sorted(times)[(len(times) - 1) // 2]
        row = {"work": name, "system": f"vLLM {vllm.__version__}", "tokens": tokens, "wall_s": wall_s}
        rows.append(row | {"tokens_per_s": tokens / wall_s, "first_run_s": start_s})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
