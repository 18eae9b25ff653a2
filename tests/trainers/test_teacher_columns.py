"""What a teacher reads: prompts with demonstrations, successes and feedback, and log-probs behind other prompts than the policy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from burnish.algorithms.batch_columns import TAUGHT, TEACHER_IDS, TEACHER_PROMPT
from burnish.algorithms.terms.spec import DemonstrationContext, SuccessContext
from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.core.batch import Batch, Ragged
from burnish.core.trajectory import LAST_WORDS, Trajectory, chain_nodes, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.data.template import render
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.tokenizer import Tokenizer
from burnish.trainers.teacher_columns import TeacherOfRow, TeacherPrompts
from burnish.training.forward import MicroBatch
from burnish.training.reference import make_reference
from burnish.training.teacher_context import in_teacher_context

TOKENIZER = Tokenizer.from_characters("0123456789>ab ")
ROW = Row("rows/0", "3>", "math", "4", {"shown": "b", "kind": "up"})
OTHER = Row("rows/1", "5>", "code", "6", {"shown": "a", "kind": "down"})


def make_model() -> Decoder:
    model = Decoder(Architecture("qwen3", 24, 8, 1, 2, 1, 4, 12, 64, qkv_bias=True, qk_norm=True, tied=False))
    initialise(model.double(), 1, std=0.4)
    return model.double()


def prompt_of(row: Row) -> Prompt:
    return Prompt(row, str(row.prompt), render(row, TOKENIZER, Template()).tokens)


PROMPTS = {(row.id, 0): prompt_of(row) for row in (ROW, OTHER)}


def trajectory(row: Row, sample: int, completion: str, reward: float, **metadata: Any) -> Trajectory:
    start, answer = PROMPTS[row.id, 0].tokens, TOKENIZER.encode(completion)
    mask = np.array([False] * len(start) + [True] * len(answer))
    zeros = np.zeros(len(mask))
    nodes = chain_nodes(np.array(start + answer), mask, zeros, zeros)
    return Trajectory(row.id, 0, sample, nodes, "stop", completion, reward, reward, metadata=metadata)


SAMPLES = [
    trajectory(ROW, 0, "4", 1.0),
    trajectory(ROW, 1, "17", 0.0, **{LAST_WORDS: "too large"}),
    trajectory(ROW, 2, "4", 1.0),
    trajectory(OTHER, 0, "6", 1.0),
    trajectory(OTHER, 1, "9", 0.0),
    trajectory(OTHER, 2, "8", 0.0, **{LAST_WORDS: "b"}),
]


def texts(batch: Batch) -> list[str | None]:
    """What each teacher reads; None for a row that is not taught."""
    column, taught = batch.ragged[TEACHER_PROMPT], batch.sequence[TAUGHT].tolist()
    bounds = zip(column.offsets[:-1].tolist(), column.offsets[1:].tolist(), strict=True)
    return [
        TOKENIZER.decode(column.values[i:j].tolist()) if ok else None for (i, j), ok in zip(bounds, taught, strict=True)
    ]


def columns(context: Any, samples: list[Trajectory] = SAMPLES, max_positions: int | None = None) -> Batch:
    return TeacherPrompts(context, TOKENIZER, Template(), max_positions)(pack(samples), samples, PROMPTS)


def test_a_sample_is_shown_the_first_other_success_of_its_group() -> None:
    found = texts(columns(SuccessContext(text=">{context}")))
    assert found == ["3>>4", "3>>4", "3>>4", None, "5>>6", "5>>6"]  # the only success of a group has no teacher
    assert texts(columns(SuccessContext(text="a{context}>", place="system")))[:2] == ["a4>3>", "a4>3>"]
    assert texts(columns(SuccessContext(text=">{context}", threshold=2.0))) == [None] * 6


def test_feedback_teaches_where_no_success_does() -> None:
    context = SuccessContext(text=">{context}", threshold=2.0, feedback=True)
    samples = [s for s in SAMPLES if s.metadata.get(LAST_WORDS) != "too large"]
    assert texts(columns(context, samples)) == [None] * 4 + ["5>>b"]


def test_a_demonstration_comes_from_the_row() -> None:
    batch = columns(DemonstrationContext(text="{context}", column="shown"))
    assert texts(batch) == ["3>b"] * 3 + ["5>a"] * 3
    skipped = columns(DemonstrationContext(text="{context}", column="answer", skip=1))
    assert texts(skipped)[0] == "3>4"
    assert int(skipped.loss_mask.sum()) == int(batch.loss_mask.sum()) - 6
    assert bool(skipped.action_mask.eq(batch.action_mask).all())
    with pytest.raises(UserError, match=r"no column 'show' for algorithm\.kl\.context\.column; did you mean 'shown'"):
        columns(DemonstrationContext(column="show"))


def test_a_context_that_does_not_fit_leaves_its_row_without_a_teacher() -> None:
    assert texts(columns(DemonstrationContext(text="{context}", column="shown"), max_positions=4))[:2] == ["3>b", None]


def test_rows_name_their_teachers() -> None:
    batch = TeacherOfRow("kind", ["down", "up"])(pack(SAMPLES), SAMPLES, PROMPTS)
    assert batch.sequence[TEACHER_IDS].tolist() == [1, 1, 1, 0, 0, 0]
    by_source = TeacherOfRow("data_source", ["math", "code"])(pack(SAMPLES), SAMPLES, PROMPTS)
    assert by_source.sequence[TEACHER_IDS].tolist() == [0, 0, 0, 1, 1, 1]


def test_log_probs_and_distributions_are_those_behind_the_teachers_prompt() -> None:
    batch = columns(SuccessContext(text=">{context}"))
    taught = in_teacher_context(batch)
    assert taught.batch.tokens[taught.batch.offsets[1] : taught.batch.offsets[2]].tolist() == TOKENIZER.encode("3>>417")
    model = make_model()
    reference = make_reference("frozen", model, 1000, 1.0)
    found = reference.logprobs(batch)
    with torch.no_grad():
        whole = model.logits(model.hidden(taught.batch.tokens, taught.batch.offsets)).log_softmax(-1)
    for index in batch.action_mask.nonzero().squeeze(1).tolist():
        place = int(taught.position[index])
        expected = (
            float(whole[place - 1, batch.tokens[index]]) if batch.sequence[TAUGHT][batch.sequence_ids[index]] else 0.0
        )
        assert float(found[index]) == pytest.approx(expected, abs=1e-5)
    wanted = batch.action_mask.nonzero().squeeze(1)
    seen: Any = reference.distribution(MicroBatch(batch, wanted, wanted))
    torch.testing.assert_close((seen.hidden @ seen.weight.t()).log_softmax(-1), whole[taught.position[wanted] - 1])


def test_the_policys_own_prompt_as_context_changes_nothing() -> None:
    plain = pack(SAMPLES)
    starts = [PROMPTS[t.prompt_id, 0].tokens for t in SAMPLES]
    lengths = torch.tensor([0, *(len(one) for one in starts)]).cumsum(0)
    own = Ragged(torch.tensor([token for one in starts for token in one]), lengths)
    batch = Batch(plain.tokens, plain.offsets, plain.token, plain.sequence, {TEACHER_PROMPT: own})
    reference = make_reference("frozen", make_model(), 1000, 1.0)
    torch.testing.assert_close(reference.logprobs(batch), reference.logprobs(plain))
