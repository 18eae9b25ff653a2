"""Published models by their id on the Hugging Face hub: what their config.json says, known without a download.

A check of a recipe reads this table where the model's own config.json is not there yet, so that a setting that the model's family does not
support is refused before gigabytes are fetched. A directory's own config.json always wins over the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class PublishedModel(NamedTuple):
    """The keys of a published config.json that decide what can be done with the model."""

    repo: str
    model_type: str
    max_positions: int | None
    quantised: str | None = None
    """The format of the published weights if it is not a floating-point type of 16 bits or more."""

    def hf_config(self) -> dict[str, Any]:
        """The keys as in a config.json."""
        config: dict[str, Any] = {"model_type": self.model_type}
        if self.max_positions is not None:
            config["max_position_embeddings"] = self.max_positions
        if self.quantised is not None:
            config["quantization_config"] = {"quant_method": self.quantised}
        return config


K = 1024
_SHAPES: dict[tuple[str, int], tuple[str, ...]] = {
    ("qwen2", 128 * K): (
        *(f"Qwen/Qwen2.5-{size}" for size in ("1.5B", "7B", "14B", "32B", "72B")),
        *(f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}" for size in ("1.5B", "7B", "14B", "32B")),
        "agentica-org/DeepScaleR-1.5B-Preview",
        "l3lab/L1-Qwen-1.5B-Exact",
        "l3lab/L1-Qwen-1.5B-Max",
    ),
    ("qwen2", 32 * K): (
        *(f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "3B")),
        *(f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")),
        *(f"Qwen/Qwen2.5-Coder-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")),
        *(f"Qwen/Qwen2.5-Coder-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")),
    ),
    ("qwen2", 16 * K): ("Elliott/Qwen2.5-Math-7B-16k-think",),
    ("qwen2", 4 * K): (
        *(f"Qwen/Qwen2.5-Math-{size}" for size in ("1.5B", "7B", "72B")),
        *(f"Qwen/Qwen2.5-Math-{size}-Instruct" for size in ("1.5B", "7B", "72B")),
        "PRIME-RL/Eurus-2-7B-SFT",
    ),
    ("qwen3", 32 * K): tuple(f"Qwen/Qwen3-{size}-Base" for size in ("0.6B", "1.7B", "4B", "8B", "14B")),
    ("qwen3", 40 * K): tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")),
    ("qwen3_moe", 32 * K): ("Qwen/Qwen3-30B-A3B-Base",),
    ("qwen3_moe", 40 * K): ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
    ("llama", 128 * K): (
        *(f"meta-llama/Llama-3.1-{size}" for size in ("8B", "8B-Instruct", "70B", "70B-Instruct")),
        *(f"meta-llama/Llama-3.2-{size}" for size in ("1B", "1B-Instruct", "3B", "3B-Instruct")),
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ),
    ("llama", 8 * K): (
        *(f"meta-llama/Meta-Llama-3-{size}" for size in ("8B", "8B-Instruct", "70B", "70B-Instruct")),
        *(f"HuggingFaceTB/SmolLM2-{size}" for size in ("135M", "135M-Instruct", "360M", "360M-Instruct")),
    ),
    ("llama", 2 * K): ("realtreetune/rho-1b-sft-GSM8K",),
    ("llama", 4 * K): tuple(f"deepseek-ai/deepseek-math-7b-{kind}" for kind in ("base", "instruct", "rl")),
    ("mistral", 32 * K): ("mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-Instruct-v0.3"),
    ("gemma2", 8 * K): tuple(f"google/gemma-2-{size}" for size in ("2b", "2b-it", "9b", "9b-it", "27b", "27b-it")),
    ("gemma3_text", 32 * K): ("google/gemma-3-270m", "google/gemma-3-270m-it", "google/gemma-3-1b-it"),
    ("gemma3", 128 * K): tuple(
        f"google/gemma-3-{size}-{kind}" for size in ("4b", "12b", "27b") for kind in ("pt", "it")
    ),
    ("smolvlm", 8 * K): tuple(f"HuggingFaceTB/SmolVLM2-{size}-Video-Instruct" for size in ("256M", "500M")),
    ("idefics3", 8 * K): tuple(f"HuggingFaceTB/SmolVLM-{size}-Instruct" for size in ("256M", "500M")),
    ("qwen2_5_vl", 125 * K): tuple(f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B", "72B")),
}
PUBLISHED: dict[str, PublishedModel] = {
    repo: PublishedModel(repo, model_type, positions)
    for (model_type, positions), repos in _SHAPES.items()
    for repo in repos
} | {
    repo: PublishedModel(repo, "deepseek_v3", 160 * K, "fp8")
    for repo in ("deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1")
}
_BY_NAME = {repo.partition("/")[2].lower(): model for repo, model in PUBLISHED.items()}


def find_published(path: str) -> PublishedModel | None:
    """The published model that a path or hub id names: by its id, or by the name of its folder (`models/Qwen2.5-7B`).

    A name that goes on behind a published one (`Llama-3.1-8B-long-cot`) is a model that was trained from it: it has the family, but its
    positions and the format of its weights may differ.
    """
    repo = path.partition("@")[0].rstrip("/")
    if repo in PUBLISHED:
        return PUBLISHED[repo]
    name = repo.rpartition("/")[2].lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    origins = [known for known in _BY_NAME if name.startswith(f"{known}-")]
    if not origins:
        return None
    return _BY_NAME[max(origins, key=len)]._replace(max_positions=None, quantised=None)
