"""A teacher with another tokenizer: what it reads, which tokens are compared, and a gradient that no split changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from burnish.algorithms.aligned_columns import batch_groups, group_ends
from burnish.algorithms.batch_columns import ALIGNED, TAUGHT, TEACHER_ANSWER, TEACHER_PROMPT
from burnish.algorithms.terms.spec import DemonstrationContext
from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.data.template import render
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.aligned_groups import GroupComparison
from burnish.models.kernels.logprob import Divergence
from burnish.models.token_alignment import Spelling, shared_vocabulary
from burnish.models.tokenizer import Tokenizer
from burnish.trainers.aligned_answers import AlignedAnswers
from burnish.trainers.minibatches import build_policy_loss, with_loss_weights
from burnish.training.aligned_teacher import AlignedTeacher, teacher_tokens
from burnish.training.learner import Learner
from burnish.training.reference import make_reference
from tests.made_tokenizers import byte_level, merging

STUDENT = Tokenizer.from_characters("0123456789>ab ")
TEACHER = merging("0123456789>ab", ("1", "7"), ("3", ">"), ("7", "7"))
CHAT = byte_level()
CHAT._inner.chat_template = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[answer:{% endif %}"
)
ROWS = [Row("rows/0", "3>", "math", "4", {"shown": "b"}), Row("rows/1", "5>", "math", "6", {"shown": "a"})]
PROMPTS = {(row.id, 0): Prompt(row, str(row.prompt), render(row, STUDENT, Template()).tokens) for row in ROWS}
END = STUDENT.eos_ids[0]


def trajectory(row: Row, sample: int, completion: str, own: int | None = None) -> Trajectory:
    start, answer = PROMPTS[row.id, 0].tokens, [*STUDENT.encode(completion), END]
    mask = np.array([False] * len(start) + [k != own for k in range(len(answer))])
    zeros = np.zeros(len(mask))
    nodes = chain_nodes(np.array(start + answer), mask, zeros, zeros)
    return Trajectory(row.id, 0, sample, nodes, "stop", completion, 0.0, 0.0)


SAMPLES = [trajectory(ROWS[k // 3], k % 3, text) for k, text in enumerate(["17", "4", "177a", " 1", "717", "b1717"])]


def columns(teacher: Tokenizer = TEACHER, max_positions: int | None = None, context: Any = None) -> Batch:
    made = AlignedAnswers(STUDENT, teacher, Template(), max_positions, context)
    return made(pack(SAMPLES), SAMPLES, PROMPTS)


def read_by(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """What the teacher reads of each row; its prompt and answer are parted by a stroke."""
    prompt, answer = (batch.ragged[name] for name in (TEACHER_PROMPT, TEACHER_ANSWER))
    texts = [
        [
            tokenizer.decode(c.values[i:j].tolist(), skip_special=False)
            for i, j in zip(c.offsets, c.offsets[1:], strict=False)
        ]
        for c in (prompt, answer)
    ]
    return [f"{a}/{b}" for a, b in zip(*texts, strict=True)]


def test_the_teacher_reads_its_own_prompt_and_tokens() -> None:
    batch = columns()
    assert read_by(batch, TEACHER) == ["3>/17<eos>", "3>/4<eos>", "3>/177a<eos>", "/", "5>/717<eos>", "5>/b1717<eos>"]
    assert batch.sequence[TAUGHT].tolist() == [True, True, True, False, True, True]  # it cannot spell a space
    assert batch.ragged[TEACHER_PROMPT].values.tolist()[:1] == TEACHER.encode("3>")  # one token
    rows = [batch.token[ALIGNED][i:j].tolist() for i, j in zip(batch.offsets, batch.offsets[1:], strict=False)]
    assert rows[0] == [-1, -1, 0, 0, 1]
    assert rows[2] == [-1, -1, 0, 0, 1, 2, 3]
    assert rows[3] == [-1, -1, -1, -1, -1]
    chat = columns(CHAT)
    assert read_by(chat, CHAT)[0] == "[user:3>][answer:/17<|end|>"
    shown = columns(CHAT, context=DemonstrationContext(text="={context}", column="shown"))
    assert read_by(shown, CHAT)[0] == "[user:3>=b][answer:/17<|end|>"
    only_the_policys = Template(kwargs={"enable_thinking": False})
    assert AlignedAnswers(STUDENT, CHAT, only_the_policys, None).template.kwargs == {}
    with pytest.raises(
        UserError, match=r"does not fit the teacher of loss gold: template\.system is for chat templates"
    ):
        AlignedAnswers(STUDENT, TEACHER, Template(system="be brief"), None)
    assert columns(max_positions=4).sequence[TAUGHT].tolist() == [True, True, False, False, False, False]


def test_a_group_counts_once_and_only_as_a_whole() -> None:
    batch = columns()
    assert batch_groups(batch).num == 2 + 2 + 4 + 3 + 4
    algorithm = algorithm_from_preset("gold")
    weights = with_loss_weights(batch, algorithm, 8).sequence["weight"]
    assert weights.tolist() == pytest.approx([1 / 15] * 6)
    mask = batch.loss_mask.clone()
    mask[2] = False  # the 1 of 17
    dropped = batch.with_token(loss_mask=mask)
    assert batch_groups(dropped).num == 14
    assert group_ends(dropped).nonzero().squeeze(1).tolist()[:2] == [4, 7]
    assert batch_groups(dropped).teacher.tolist()[:3] == [-1, 0, 1]


def test_an_environment_that_writes_into_the_answer_is_refused() -> None:
    one = trajectory(ROWS[0], 0, "177", own=1)
    with pytest.raises(UserError, match="the environment wrote into the answer: use environment=single_turn"):
        AlignedAnswers(STUDENT, TEACHER, Template(), None)(pack([one]), [one], PROMPTS)


def make_model(seed: int, rows: int) -> Decoder:
    model = Decoder(Architecture("qwen3", rows, 8, 1, 2, 1, 4, 12, 64, qkv_bias=True, qk_norm=True, tied=False))
    initialise(model.double(), seed, std=0.4)
    return model.double()


def gradient(model: Decoder, reference: Any, batch: Batch, algorithm: Any, budget: int) -> tuple[float, torch.Tensor]:
    learner = Learner(copy.deepcopy(model), Optimizer(lr=1e-2), 10, budget, 0.9)
    learner.reference = reference.distribution
    mini = with_loss_weights(batch, algorithm, 8)
    mini = mini.with_sequence(advantages=torch.zeros(mini.num_sequences, dtype=torch.float64))
    total = learner._accumulate(mini, build_policy_loss(algorithm, None))[0]
    return total, torch.cat([g.flatten() for g in learner.optimizer.gradients().values()])


def teacher_of(model: Decoder, own: Decoder, other: Tokenizer, **options: Any) -> AlignedTeacher:
    spelled = Spelling(STUDENT, "it"), Spelling(other, "it")
    vocabulary = shared_vocabulary(*spelled, own.head_weight.shape[0], model.head_weight.shape[0])
    return AlignedTeacher(model, 1000, 0.9, GroupComparison(vocabulary, **options))


@pytest.mark.parametrize("options", [{}, {"merge": "bayesian"}, {"compare": "sorted"}], ids=str)
def test_the_gradient_does_not_depend_on_the_split(options: dict[str, Any]) -> None:
    policy, batch = make_model(0, 16), columns()
    teacher = teacher_of(make_model(1, 18), policy, TEACHER, **options)
    algorithm = algorithm_from_preset("gold")
    whole = gradient(policy, teacher, batch, algorithm, 1000)
    assert whole[0] > 0.01
    assert float(whole[1].abs().max()) > 1e-4
    for budget in (12, 1):
        total, found = gradient(policy, teacher, batch, algorithm, budget)
        assert total == pytest.approx(whole[0], abs=1e-9)
        torch.testing.assert_close(found, whole[1], atol=1e-9, rtol=0)
    tokens, offsets, place = teacher_tokens(batch)
    assert int(offsets[-1]) == tokens.numel()
    assert tokens[place].equal(batch.ragged[TEACHER_ANSWER].values)


def test_a_teacher_with_the_same_tokenizer_gives_the_plain_divergence() -> None:
    policy, other, batch = make_model(0, 16), make_model(1, 16), columns(STUDENT)
    aligned = gradient(policy, teacher_of(other, policy, STUDENT), batch, algorithm_from_preset("gold"), 1000)
    reference = make_reference("frozen", other, 1000, 0.9)
    reference.divergence = Divergence(0.5)
    plain = algorithm_from_preset("gold").model_copy(
        update={"loss": algorithm_from_preset("sdft").loss.model_copy(update={"support": "full", "cap": None})}
    )
    ragged = {name: c for name, c in batch.ragged.items() if name != TEACHER_PROMPT}
    bare = Batch(
        batch.tokens, batch.offsets, {k: v for k, v in batch.token.items() if k != ALIGNED}, batch.sequence, ragged
    )
    expected = gradient(policy, reference, bare, plain, 1000)
    assert aligned[0] == pytest.approx(expected[0], abs=1e-9)
    torch.testing.assert_close(aligned[1], expected[1], atol=1e-9, rtol=0)
