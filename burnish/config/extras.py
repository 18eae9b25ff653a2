"""The extras of the package: what each brings, and the command that installs it.

`pip install 'burnish[NAME]'` also works beside an editable install: pip keeps the package and adds what the extra needs.
"""

from __future__ import annotations

from pathlib import Path

EXTRAS = {
    "math": "the math reward (math-verify)",
    "tasks": "reasoning-gym/<name> tasks",
    "tensorboard": "run.trackers=tensorboard",
    "wandb": "run.trackers=wandb: Weights & Biases",
    "mlflow": "run.trackers=mlflow",
    "swanlab": "run.trackers=swanlab, with its local dashboard",
    "trackio": "run.trackers=trackio",
    "notebook": "burnish in Jupyter, and functions of its cells (cloudpickle)",
    "vision": "images and videos of rows, prompts and requests (pillow)",
    "plot": "burnish view --png: the curves as an image (matplotlib)",
    "ray": "placement=ray and burnish launch: several processes or machines",
    "serve": "burnish serve: an OpenAI-compatible server; burnish view: the live page of runs",
    "agents": "programs that call the model themselves (environment.agent)",
    "search": "the tool search: BM25 over a local corpus",
    "searchdata": "burnish data prepare search: the tables of its corpus",
    "mcp": "tools of MCP servers",
    "openenv": "environments of OpenEnv servers",
    "gym": "environments of gymnasium",
    "textarena": "games of TextArena",
    "scienceworld": "the environment science_world, with its Java",
    "vllm": "the vLLM engine",
    "dev": "the tests and the linters",
}
"""What each extra of pyproject.toml brings."""

UNPINNED = ("swanlab", "trackio")
"""Extras that need other versions than constraints.txt has (protobuf below 7, pillow below 13)."""


def install_command(extra: str) -> str:
    """The command that installs an extra. In a checkout it takes the pinned versions where they fit."""
    checkout = Path(__file__).parents[2]
    if Path.cwd() == checkout and (checkout / "constraints.txt").is_file():
        return f"pip install -e '.[{extra}]'" + ("" if extra in UNPINNED else " -c constraints.txt")
    return f"pip install 'burnish[{extra}]'"


def install_hint(extra: str) -> str:
    """For an error: the command that installs an extra, and what the extra brings."""
    return f"pip install 'burnish[{extra}]' (brings {EXTRAS[extra]})"
