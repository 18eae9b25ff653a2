"""The model a command is pointed at: a Hugging Face directory, or a run, which stands for its best checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, did_you_mean, hub_hint
from burnish.config.model import Model
from burnish.config.rollout import Environment
from burnish.config.yaml_text import parse_yaml, read_json_object
from burnish.models.tokenizer import MAX_CHARACTER_BYTES, MAX_PENDING_TOKENS, REPLACEMENT_CHARACTER, Tokenizer
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.run_directory import RunDirectory


@dataclass(frozen=True)
class ModelSource:
    """Where the weights are; for a run also its config, and a note that says what was chosen."""

    path: Path
    note: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


def find_model(path: Path) -> ModelSource:
    """The model in a directory: a Hugging Face or PEFT one as it is, of a run the best checkpoint (the newest if none is scored)."""
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return ModelSource(path)
    if (path / "config.yaml").is_file():
        return _best_of_run(RunDirectory.open(path))
    if not path.is_dir():
        beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"{path} is not a directory{did_you_mean(path.name, beside) or hub_hint(str(path))}")
    raise UserError(
        f"{path} is neither a Hugging Face model directory (it has no config.json or adapter_config.json) nor a run (it has no config.yaml)"
    )


def stored_dtype(path: Path) -> str | None:
    """The type the weights of a directory are stored in, of an adapter those of its base, as its config says; None where it
    does not."""
    if not (path / "config.json").is_file():
        from burnish.models.lora.peft_files import base_model_of

        path = base_model_of(path)
    config = read_json_object(path / "config.json")
    found = config.get("dtype") or config.get("torch_dtype")
    return found if isinstance(found, str) else None


def compute_dtype(subject: ModelSource, on_gpu: bool) -> str:
    """The type to sample in where the command gives none: that of the run the model comes from.

    Without a run it is, on a GPU, the half precision that the weights are stored in, else bfloat16. A CPU samples in float32, and in
    float64 where the run did: half precision saves no time there.
    """
    beside = subject.path.parent.parent / "config.yaml" if subject.path.parent.name == "checkpoints" else None
    config = subject.config
    if not config and beside is not None and beside.is_file():  # a checkpoint that was named itself
        config = parse_yaml(beside.read_text(encoding="utf-8"), str(beside)) or {}
    ran_in = (config.get("model") or {}).get("dtype", Model().dtype) if config else None
    if not on_gpu:
        return "float64" if ran_in == "float64" else "float32"
    stored = stored_dtype(subject.path)
    return ran_in or (stored if stored in ("bfloat16", "float16") else "bfloat16")


def _best_of_run(run: RunDirectory) -> ModelSource:
    checkpoints = Checkpoints(run.checkpoints, keep_last=1)
    best = checkpoints.best()
    chosen = best or checkpoints.latest()
    if chosen is None:
        raise UserError(f"run {run.path} has no checkpoint yet; wait for its first one (run.save_every)")
    why = "the newest checkpoint, none has a score" if chosen.score is None else f"its best: {chosen.score_text}"
    config = parse_yaml(run.config.read_text(encoding="utf-8"), str(run.config))
    if not isinstance(config, dict):
        raise UserError(f"{run.config}: expected `key: value` lines")
    return ModelSource(chosen.path, f"{run.path} is a run: taking {chosen.path.name} ({why})", config)


def fit_max_tokens(
    max_tokens: int,
    longest_prompt: int,
    positions: int | None,
    environment: Environment = Environment(),  # noqa: B008 (a frozen record)
) -> tuple[int, str | None]:
    """`max_tokens` cut to what the model's positions and environment.max_tokens leave after the longest prompt, and a note if it was.

    Several turns share what is left: a turn that might not fit is not begun, so one that may take all of it would be the only one.
    """
    limits = [limit for limit in (positions, environment.max_tokens) if limit is not None]
    longest, turns = min(limits, default=None), environment.max_turns
    if longest is None or longest_prompt + max_tokens <= longest:
        return max_tokens, None
    is_own = longest == environment.max_tokens
    left = (longest - longest_prompt) // turns
    if left < 1:
        limit = f"environment.max_tokens={longest} is" if is_own else f"the model is made for {longest} positions"
        whole = "in all" if turns == 1 else f"for all {turns} turns together"
        advice = "; raise it" if is_own else ""
        raise UserError(f"the prompt has {longest_prompt} tokens, but {limit} {whole}{advice}")
    of = f"environment.max_tokens={longest}" if is_own else f"{longest} positions"
    rest = "" if turns == 1 else f", the rest for {turns} turns"
    return left, f"max_tokens cut from {max_tokens} to {left}: {of}, {longest_prompt} of them prompt{rest}"


# --- Text from tokens as they come: only what no later token can change.


class TextStream:
    """Decodes one completion token by token; what `push` and `finish` give, joined, is the decoded whole.

    A character whose bytes are spread over several tokens waits for its last one. Tokens are decoded behind the last
    ones shown, because decoders drop the space before a text's first word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []  # those shown last, then those not shown yet
        self._num_shown = 0
        self._shown = ""

    def push(self, token: int) -> str:
        """The text this token completes, perhaps none."""
        if self.tokenizer.is_special(token):  # decoding leaves it out
            return ""
        self._tokens.append(token)
        text = self.tokenizer.decode(self._tokens)
        if not text.endswith(REPLACEMENT_CHARACTER):
            return self._show(text, len(self._tokens))
        if (
            len(self._tokens) - self._num_shown > MAX_PENDING_TOKENS
        ):  # bytes that are no text: what is old enough stays as it is
            early = len(self._tokens) - MAX_CHARACTER_BYTES
            part = self.tokenizer.decode(self._tokens[:early])
            return self._show(part, early) if text.startswith(part) else ""
        return ""

    def finish(self) -> str:
        """What is left: the bytes of a character that never came to its end, as the decoder writes them."""
        return self._show(self.tokenizer.decode(self._tokens), len(self._tokens))

    def _show(self, text: str, count: int) -> str:
        """What is new in the text of the first `count` tokens."""
        new = text[len(self._shown) :]
        if new:  # a token without text is no context: the next word would lose its space behind it
            context = self._tokens[self._num_shown : count]
            self._tokens = context + self._tokens[count:]
            self._num_shown = len(context)
            self._shown = self.tokenizer.decode(context)
        return new
