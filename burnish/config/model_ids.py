"""Models by their id on the Hugging Face hub: `model.path: Qwen/Qwen2.5-0.5B`, or `org/name@revision` with a branch, tag or commit.

A local directory of that name wins. Else the user's Hugging Face cache is read, without asking the network, if it has all files of the
model. Else `huggingface_hub` downloads the files that burnish reads (config, safetensors, tokenizer, chat template) into that cache; a
download that broke off continues. HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN are those of `huggingface_hub`.

A branch moves, so a run replaces the id by `org/name@commit` in its config (`burnish.config.requirements.pin_model_ids`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from burnish.config.errors import UserError, is_hub_id

COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "*.safetensors.index.json",
    "tokenizer*",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "preprocessor_config.json",
)
WEIGHT_FILES = ("*.safetensors",)
UNUSED_FILES = ("*/*", "consolidated*", "training_args*")
"""Files in subfolders, and a second copy of the weights in another layout (Mistral's)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class ModelId(NamedTuple):
    """A repository of the hub, and a branch, tag or commit of it. None: the branch main."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which cannot change."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None


def parse_model_id(text: str, roots: Iterable[Path] = (Path(),)) -> ModelId | None:
    """The id that a text names, or None for a path. A text whose first part is a folder of one of the `roots` is a path."""
    repo, at, revision = text.partition("@")
    if not is_hub_id(repo, roots) or (at and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", revision)):
        return None
    return ModelId(repo, revision or None)


def local_directory(path: str, base: Path | None) -> Path | None:
    """The directory of a path, relative to the recipe's folder or the working directory; None if there is none."""
    candidates = [Path(path)] if base is None else [base / path, Path(path)]
    return next((c for c in candidates if c.is_dir()), None)


def model_directory(
    path: str, base: Path | None, with_weights: bool = True, say: Callable[[str], None] = lambda text: None
) -> Path | None:
    """The directory of a model path, or of an id in the cache, to which it is downloaded if need be; None if there is none."""
    found = local_directory(path, base)
    model = parse_model_id(path, (base or Path(), Path())) if found is None else None
    return found if model is None else fetch_model(model, with_weights, say)


def cached_directory(model: ModelId, with_weights: bool) -> Path | None:
    """The folder of a model in the Hugging Face cache, or None if files are missing there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(model, with_weights, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return folder if missing_part(folder, with_weights) is None else None


def fetch_model(model: ModelId, with_weights: bool = True, say: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a model in the cache, downloaded if files are missing. Without weights, only the small files are needed."""
    found = cached_directory(model, with_weights)
    if found is not None:
        return found
    from huggingface_hub import constants, errors

    if not constants.HF_HUB_OFFLINE:
        say(
            f"{model}: downloading {'the model' if with_weights else 'its config and tokenizer'} from {constants.ENDPOINT}"
        )
    try:
        folder = _snapshot(model, with_weights, local_files_only=False)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model}: the hub gives this model only to accounts that have accepted its terms: accept them at "
            f"{constants.ENDPOINT}/{model.repo}, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{model}: {constants.ENDPOINT}/{model.repo} has no branch, tag or commit {model.revision}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{model}: there is no directory of that name, and {constants.ENDPOINT} has no such model (a private one needs `hf auth login` "
            "or HF_TOKEN)"
        ) from error
    except errors.HFValidationError as error:
        raise UserError(f"there is no directory {model}, and it cannot be an id of the hub: {error}") from error
    except (errors.HTTPError, OSError) as error:  # LocalEntryNotFoundError and OfflineModeIsEnabled are OSErrors
        raise UserError(_unreachable_text(model, error)) from error
    problem = missing_part(folder, with_weights)
    if problem is not None:
        raise UserError(f"{model}: burnish cannot use this model, because its repository has {problem}")
    return folder


def _snapshot(model: ModelId, with_weights: bool, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=[*SMALL_FILES, *(WEIGHT_FILES if with_weights else ())],
            ignore_patterns=list(UNUSED_FILES),
            local_files_only=local_files_only,
        )
    )


def missing_part(folder: Path, with_weights: bool) -> str | None:
    """What a model directory lacks, or None. An adapter needs no tokenizer of its own."""
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        return "no config.json"
    if not is_adapter and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return f"no tokenizer (one of {', '.join(TOKENIZER_FILES)})"
    if not with_weights:
        return None
    indices = sorted(folder.glob("*.safetensors.index.json"))
    shards = {
        name for index in indices for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    }
    absent = sorted(name for name in shards if not (folder / name).is_file())
    if absent:
        return f"no {absent[0]}, which {indices[0].name} names"
    return None if any(folder.glob("*.safetensors")) else "no weights in *.safetensors files"


def _unreachable_text(model: ModelId, error: Exception) -> str:
    """What to do if the cache lacks a model and the hub does not answer."""
    from huggingface_hub import constants

    reason = " ".join(str(error.__cause__ or error).split())[:200]
    why = (
        "HF_HUB_OFFLINE=1 forbids asking the hub"
        if constants.HF_HUB_OFFLINE
        else f"the hub at {constants.ENDPOINT} cannot be reached ({type(error.__cause__ or error).__name__}: {reason})"
    )
    name = model.repo.partition("/")[2]
    revision = "" if model.revision is None else f" --revision {model.revision}"
    cache = Path(constants.HF_HUB_CACHE)
    return (
        f"{model} is neither a directory nor complete in the Hugging Face cache {cache}, and {why}. On a machine with network: "
        f"`hf download {model.repo}{revision} --local-dir models/{name}`; copy models/{name} here and give that path. Or copy its folder "
        f"models--{model.repo.replace('/', '--')} of ~/.cache/huggingface/hub into {cache}. A mirror is set with HF_ENDPOINT, another cache "
        "with HF_HOME; a download that broke off continues when the same command runs again"
    )
