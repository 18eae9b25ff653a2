"""What configs of verl's RL and SFT trainers have in common: files, adapters, the length and the folder of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from burnish.config.importing.draft import DataFacts, Draft
from burnish.config.model import PROJECTIONS


def data_files(value: Any) -> list[str]:
    """The paths of `train_files` or `val_files`: none, one or several. `~` is the home folder."""
    files = value if isinstance(value, list) else [] if value in (None, "") else [value]
    return [str(Path(str(file)).expanduser()) if str(file).startswith("~") else str(file) for file in files]


def set_adapters(draft: Draft, model: str) -> None:
    """LoRA, in the section `model`: `lora_rank` of FSDP, or `lora.rank` of Megatron."""
    rank = draft.first_given(f"{model}.lora_rank", f"{model}.lora.rank")
    prefix = rank.removesuffix("rank")
    has_adapters = draft.integer(rank) > 0
    if has_adapters:
        draft.translate(rank, "model.lora.rank", draft.integer(rank))
        draft.translate(f"{prefix}alpha", "model.lora.alpha", draft.number(f"{prefix}alpha", 32))
        _lora_targets(draft, f"{prefix}target_modules" if prefix.endswith(".") else f"{model}.target_modules")
    adapter = f"{model}.lora_adapter_path"
    if draft.is_given(adapter):
        draft.translate(adapter, "model.adapter", draft.value(adapter))
        draft.tree["model"].pop("lora", None)
    keys = [key for key in draft.given if re.match(rf"{re.escape(model)}\.(lora|target_modules|exclude_modules)", key)]
    draft.explain(keys, "none" if has_adapters else "same", "" if has_adapters else "no adapters: the rank is 0")


def _lora_targets(draft: Draft, key: str) -> None:
    targets = draft.value(key, "all-linear")
    names = targets if isinstance(targets, list) else [targets]
    if names == ["all-linear"]:
        draft.explain([key], "translated", "model.lora.targets=all-linear, the default")
    elif all(name in PROJECTIONS for name in names):
        draft.translate(key, "model.lora.targets", names)
    else:
        draft.differs(key, f"model.lora.targets=all-linear; the names are {', '.join(PROJECTIONS)}")


def set_length(draft: Draft, ours: str, batch: int, facts: DataFacts) -> None:
    """`total_training_steps`, or epochs if the rows can be counted. verl drops the last, incomplete batch of an epoch."""
    if draft.is_given("trainer.total_training_steps"):
        draft.translate("trainer.total_training_steps", ours, draft.integer("trainer.total_training_steps"))
        draft.explain(["trainer.total_epochs"], "same", "total_training_steps counts")
        return
    epochs = draft.integer("trainer.total_epochs")
    counts = [facts.num_rows(path) for path in data_files(draft.value("data.train_files"))]
    if counts and all(count is not None for count in counts):
        rows = sum(count or 0 for count in counts)
        draft.translate("trainer.total_epochs", ours, max(1, rows // batch * epochs), f"{epochs} epochs of {rows} rows")
        return
    draft.differs(
        "trainer.total_epochs",
        f"burnish counts steps, and the data is not here to count its rows: set {ours} to {epochs} x rows / {batch}",
    )


def set_run(draft: Draft, steps: int | None) -> None:
    """The section `run`. `steps` is the length of the run, if it is known."""
    if draft.is_given("trainer.experiment_name"):
        name = re.sub(r"[^\w.-]+", "-", str(draft.value("trainer.experiment_name"))).strip("-.")
        if name:
            draft.translate("trainer.experiment_name", "run.name", name)
    if draft.is_given("trainer.default_local_dir"):
        folder = Path(str(draft.value("trainer.default_local_dir")))
        is_named = folder.name == str(draft.value("trainer.experiment_name"))
        draft.translate("trainer.default_local_dir", "run.directory", str(folder.parent if is_named else folder))
    save, remark = draft.integer("trainer.save_freq"), "the last step is always saved"
    if save > 0:
        draft.translate("trainer.save_freq", "run.save_every", save)
    elif steps is not None:
        draft.translate("trainer.save_freq", "run.save_every", steps, f"verl never saves; {remark}")
    else:
        draft.differs("trainer.save_freq", f"verl never saves; run.save_every=25 steps is the default, and {remark}")
    kept = draft.first_given("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")
    if draft.is_given(kept):
        draft.translate(kept, "run.keep_last", max(1, draft.integer(kept)))
    draft.set_trackers("trainer.logger", always_there=("console", "file"))
