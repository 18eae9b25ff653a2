"""Which processes of a mesh share parameters, sequences and experts. The process group is torch's fake one: nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed

from burnish.config.placement import MeshSizes
from burnish.training.parallel.mesh import LearnerMesh, learner_mesh

SIZES = MeshSizes(pipeline=2, data=4, context=2, expert=2, tensor=2, replicate=2)
RANK = 45  # stage 1, data 1 (copy 0, shard 1), context 1, expert 0, tensor 1: 32 + 8 + 4 + 0 + 1


@pytest.fixture
def mesh() -> Iterator[LearnerMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=SIZES.processes)
    try:
        yield learner_mesh("cpu", SIZES)
    finally:
        learner_mesh.cache_clear()
        distributed.destroy_process_group()


def test_dimensions_are_numbered_with_tensor_fastest_and_the_pipeline_slowest(mesh: LearnerMesh) -> None:
    members = {
        name: distributed.get_process_group_ranks(group)
        for name, group in (
            ("pipeline", mesh.pipeline_group),
            ("batch", mesh.batch_group),
            ("context", mesh.context_group),
            ("expert", mesh.expert_parts.get_group("expert")),
            ("tensor", mesh.tensor.get_group()),
        )
    }
    assert members == {
        "pipeline": [13, 45],
        "batch": [37, 39, 45, 47, 53, 55, 61, 63],  # all of data x expert
        "context": [41, 45],
        "expert": [45, 47],
        "tensor": [44, 45],
    }
    assert (mesh.stage, mesh.batch_rank) == (1, 2)


def test_dense_parameters_are_sharded_over_experts_and_context_too_and_copied_within_a_stage(mesh: LearnerMesh) -> None:
    assert mesh.fsdp.mesh.tolist() == [[33, 35, 37, 39, 41, 43, 45, 47], [49, 51, 53, 55, 57, 59, 61, 63]]
    assert mesh.expert_fsdp.mesh.tolist() == [[33, 37, 41, 45], [49, 53, 57, 61]]
