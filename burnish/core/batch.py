"""`Batch`: many sequences packed without padding, with columns per token and per sequence.

`tokens[N]` and `offsets[S+1]` define S sequences: sequence s is `tokens[offsets[s]:offsets[s+1]]`. There are three kinds of columns:

- `token`: length N. Each value describes the token at its own index: `logp[t]` is the log-prob of token t given the tokens
  before it. The first token of a sequence has none and holds 0.
- `sequence`: length S. Id columns such as `group_ids` and `trajectory_ids` are sequence columns.
- `ragged`: any number of values per sequence, with separate [S+1] offsets. `picture_starts` and `picture_keys` say where images are;
  `pictures` has each image once, however many sequences read it.

Two token columns are masks: `action_mask` (the model wrote the token) and `loss_mask` (the token is still in the loss).
A batch is immutable: its methods return new batches and never write to the tensors of the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from burnish.core.pictures import PICTURE_COLUMNS, PICTURE_KEYS, PICTURE_STARTS, Picture, PictureSpan
from burnish.core.segments import ids_from_offsets, offsets_from_lengths


@dataclass(frozen=True)
class Ragged:
    """A column with any number of values per sequence: sequence s has `values[offsets[s]:offsets[s+1]]`."""

    values: Tensor
    offsets: Tensor  # [S+1]


@dataclass(frozen=True)
class Batch:
    """Many packed sequences with their columns. The module's docstring describes the layout."""

    tokens: Tensor  # [N]
    offsets: Tensor  # [S+1]
    token: dict[str, Tensor] = field(default_factory=dict)
    sequence: dict[str, Tensor] = field(default_factory=dict)
    ragged: dict[str, Ragged] = field(default_factory=dict)
    origin: Origin | None = field(default=None, compare=False, repr=False)
    """The batch that these sequences were selected from. A worker that already has that batch is sent only the indices."""
    pictures: Mapping[int, Picture] = field(default_factory=dict, compare=False, repr=False)
    """Images by key, in host memory. A selection has those of the whole batch; `needed_pictures` are its own."""

    def __post_init__(self) -> None:
        n, s = self.num_tokens, self.num_sequences
        if int(self.offsets[-1]) != n or int(self.offsets[0]) != 0:
            raise ValueError(
                f"offsets run from {int(self.offsets[0])} to {int(self.offsets[-1])}, but there are {n} tokens"
            )
        for name, column in self.token.items():
            if column.shape[:1] != (n,):
                raise ValueError(f"token column {name!r} has {tuple(column.shape)}, expected {n} rows")
        for name, column in self.sequence.items():
            if column.shape[:1] != (s,):
                raise ValueError(f"sequence column {name!r} has {tuple(column.shape)}, expected {s} rows")
        for name, ragged in self.ragged.items():
            if ragged.offsets.shape != (s + 1,):
                raise ValueError(f"ragged column {name!r} has {ragged.offsets.numel() - 1} sequences, expected {s}")
            if int(ragged.offsets[-1]) != ragged.values.shape[0]:
                raise ValueError(
                    f"ragged column {name!r} ends at {int(ragged.offsets[-1])} of {ragged.values.shape[0]} values"
                )

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:  # [S]
        return self.offsets.diff()

    @property
    def sequence_ids(self) -> Tensor:  # [N]
        return ids_from_offsets(self.offsets)

    @property
    def positions(self) -> Tensor:  # [N]
        return torch.arange(self.num_tokens, device=self.tokens.device) - self.offsets[:-1][self.sequence_ids]

    @property
    def action_mask(self) -> Tensor:  # [N] bool
        return self.token["action_mask"]

    @property
    def loss_mask(self) -> Tensor:  # [N] bool
        return self.token["loss_mask"]

    @property
    def needed_pictures(self) -> dict[int, Picture]:
        """The images that its sequences read, by key."""
        if PICTURE_KEYS not in self.ragged:
            return {}
        return {key: self.pictures[key] for key in self.ragged[PICTURE_KEYS].values.unique().tolist()}

    def picture_spans(self) -> list[tuple[PictureSpan, ...]]:
        """Return the images of each sequence; starts count from its first token. [] if no sequence of the batch has any."""
        if PICTURE_KEYS not in self.ragged:
            return []
        starts, keys = self.ragged[PICTURE_STARTS].values.tolist(), self.ragged[PICTURE_KEYS].values.tolist()
        spans = [PictureSpan(start, self.pictures[key]) for start, key in zip(starts, keys, strict=True)]
        bounds = self.ragged[PICTURE_KEYS].offsets.tolist()
        return [tuple(spans[a:b]) for a, b in pairwise(bounds)]

    def spans_within(self, first: int, last: int) -> tuple[PictureSpan, ...]:
        """Return the images among the tokens [first, last) of the batch, which are of one sequence; starts count from `first`."""
        if PICTURE_KEYS not in self.ragged:
            return ()
        number = int(torch.searchsorted(self.offsets, first, right=True)) - 1
        begin, keys = int(self.offsets[number]), self.ragged[PICTURE_KEYS]
        own = slice(int(keys.offsets[number]), int(keys.offsets[number + 1]))
        starts = (self.ragged[PICTURE_STARTS].values[own] + begin).tolist()
        pairs = zip(starts, keys.values[own].tolist(), strict=True)
        return tuple(PictureSpan(start - first, self.pictures[key]) for start, key in pairs if first <= start < last)

    def distinct_tokens(self) -> Tensor:  # [N]
        """Tokens in host memory, with a negative number of its own in place of every placeholder of an image."""
        if PICTURE_KEYS not in self.ragged:
            return self.tokens.cpu()
        found, offsets = self.tokens.cpu().clone(), self.offsets.tolist()
        for first, spans in zip(offsets, self.picture_spans(), strict=False):
            for span in spans:
                found[first + span.start : first + span.end] = torch.from_numpy(span.picture.token_numbers)
        return found

    def with_pictures(self, spans: Sequence[Sequence[PictureSpan]]) -> Batch:
        """Return the batch with the images of each sequence. Without any it is the batch itself."""
        if not any(spans):
            return self
        return replace(
            self,
            ragged=self.ragged | picture_columns(spans),
            pictures={span.picture.key: span.picture for own in spans for span in own},
        )

    def with_token(self, **columns: Tensor) -> Batch:
        """Return the batch with token columns added or replaced."""
        return replace(self, token={**self.token, **columns})

    def with_sequence(self, **columns: Tensor) -> Batch:
        """Return the batch with sequence columns added or replaced."""
        return replace(self, sequence={**self.sequence, **columns})

    def select(self, index: Tensor) -> Batch:
        """Return the sequences at `index`, in that order; a repeated index repeats its sequence. A contiguous range on the CPU gives views."""
        index = index.to(self.offsets.device)
        first = _start_of_range(index)  # None if `index` is no contiguous range
        if first == 0 and index.numel() == self.num_sequences:
            return self
        elements, offsets = _select_elements(self.offsets, index, first)
        ragged = {}
        for name, column in self.ragged.items():
            inner, inner_offsets = _select_elements(column.offsets, index, first)
            ragged[name] = Ragged(column.values[inner], inner_offsets)
        rows = index if first is None else slice(first, first + index.numel())
        token = {name: column[elements] for name, column in self.token.items()}
        sequence = {name: column[rows] for name, column in self.sequence.items()}
        origin = Origin(self, index, dict(token), dict(sequence))
        return Batch(self.tokens[elements], offsets, token, sequence, ragged, origin, self.pictures)

    def split(self, parts: Sequence[Tensor]) -> Iterator[Batch]:
        """Yield one batch for each tensor of sequence indices."""
        return (self.select(part) for part in parts)

    @staticmethod
    def merge(batches: Sequence[Batch]) -> Batch:
        """Concatenate batches. All must have the same columns, but some may be without images."""
        if any(PICTURE_KEYS in b.ragged for b in batches):
            batches = [_with_picture_columns(b) for b in batches]
        first = batches[0]
        for other in batches[1:]:
            for kind in ("token", "sequence", "ragged"):
                different = set(getattr(first, kind)) ^ set(getattr(other, kind))
                if different:
                    raise ValueError(f"batches to merge differ in {kind} columns: {sorted(different)}")
        return Batch(
            tokens=torch.cat([b.tokens for b in batches]),
            offsets=offsets_from_lengths(torch.cat([b.lengths for b in batches])),
            token={name: torch.cat([b.token[name] for b in batches]) for name in first.token},
            sequence={name: torch.cat([b.sequence[name] for b in batches]) for name in first.sequence},
            ragged={
                name: Ragged(
                    torch.cat([b.ragged[name].values for b in batches]),
                    offsets_from_lengths(torch.cat([b.ragged[name].offsets.diff() for b in batches])),
                )
                for name in first.ragged
            },
            pictures={key: picture for b in batches for key, picture in b.pictures.items()},
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        if self.tokens.device == torch.device(device):
            return self
        return Batch(
            tokens=self.tokens.to(device),
            offsets=self.offsets.to(device),
            token={k: v.to(device) for k, v in self.token.items()},
            sequence={k: v.to(device) for k, v in self.sequence.items()},
            ragged={k: Ragged(v.values.to(device), v.offsets.to(device)) for k, v in self.ragged.items()},
            pictures=self.pictures,
        )


@dataclass(frozen=True)
class Origin:
    """The batch that a selection comes from, the selected indices, and the columns right after the selection."""

    batch: Batch
    index: Tensor  # [S]
    token: dict[str, Tensor]
    sequence: dict[str, Tensor]


def picture_columns(spans: Sequence[Sequence[PictureSpan]]) -> dict[str, Ragged]:
    """Return the ragged columns of the images of each sequence."""
    offsets = offsets_from_lengths(torch.tensor([len(own) for own in spans], dtype=torch.int64))
    starts = torch.tensor([span.start for own in spans for span in own], dtype=torch.int64)
    keys = torch.tensor([span.picture.key for own in spans for span in own], dtype=torch.int64)
    return {PICTURE_STARTS: Ragged(starts, offsets), PICTURE_KEYS: Ragged(keys, offsets)}


def _with_picture_columns(batch: Batch) -> Batch:
    if batch.ragged.keys() >= PICTURE_COLUMNS:
        return batch
    empty, offsets = batch.offsets.new_zeros(0), torch.zeros_like(batch.offsets)
    return replace(batch, ragged=batch.ragged | {name: Ragged(empty, offsets) for name in sorted(PICTURE_COLUMNS)})


def _start_of_range(index: Tensor) -> int | None:
    """Return the first index of a contiguous rising range on the CPU; None for any other index."""
    if index.device.type != "cpu" or not index.numel() or int(index[-1]) - int(index[0]) + 1 != index.numel():
        return None
    return int(index[0]) if bool((index.diff() == 1).all()) else None


def _select_elements(offsets: Tensor, index: Tensor, first: int | None) -> tuple[Tensor | slice, Tensor]:
    """Return an indexer for the elements of the selected segments, and the new offsets. A contiguous range gives a slice."""
    if first is None:
        return _element_index(offsets, index)
    bounds = offsets[first : first + index.numel() + 1]
    return slice(int(bounds[0]), int(bounds[-1])), bounds - bounds[0]


def _element_index(offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the elements of the selected segments, and the new offsets."""
    lengths = offsets.diff()[index]
    new_offsets = offsets_from_lengths(lengths)
    shift = torch.repeat_interleave(offsets[index] - new_offsets[:-1], lengths)
    return torch.arange(int(new_offsets[-1]), device=offsets.device) + shift, new_offsets


def to_padded(values: Tensor, offsets: Tensor, fill: float = 0.0) -> Tensor:
    """Return a packed column [N] as [S, longest], right-padded with `fill`. Tests and code that expects padding use it."""
    lengths = offsets.diff()
    width = int(lengths.max()) if lengths.numel() else 0
    padded = torch.full((lengths.numel(), width), fill, dtype=values.dtype, device=values.device)
    padded[torch.arange(width, device=values.device) < lengths[:, None]] = values
    return padded


def from_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the first `lengths[i]` entries of each row; return values and offsets. Inverse of `to_padded`."""
    mask = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return padded[mask], offsets_from_lengths(lengths)
