"""The paged engine on a device that only keeps time (bench/simulated_device.py), which benches of the host use."""

import sys
from pathlib import Path

import pytest

from burnish.core.engine import Request, SamplingOptions
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise

ALPHABET = "ab\n"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[1] / "bench")])
    import simulated_device

    monkeypatch.setattr(simulated_device, "STEP_S", 1e-6)  # the host is what is tested
    return simulated_device


def test_rows_write_sentences_until_a_stop_string_or_the_end_token(simulated) -> None:
    small = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_size": 8}
    model = Decoder(Architecture(family="llama", vocab_size=128, max_positions=4096, tied=True, **small))
    initialise(model, seed=0)
    engine = simulated.SimulatedEngine(model, 8, lambda tokens: "".join(ALPHABET[t] for t in tokens), cache_bytes=2**20)
    engine.sentences, engine.end = [[0, 1, 1, 2, 2]], 3
    until_step = SamplingOptions(max_tokens=400, stop_tokens=(3,), stop=("\n\n",))
    to_the_end = SamplingOptions(max_tokens=400, stop_tokens=(3,))
    engine.submit(
        [Request("step", (0,), until_step, 5), *(Request(f"whole {k}", (0,), to_the_end, k) for k in range(12))]
    )
    found = {completion.id: completion for completion in engine.stream()}
    assert found.pop("step").tokens.tolist() == [0, 1, 1, 2, 2]
    assert len(found) == 12
    for one in found.values():
        assert one.finish == "stop"
        assert one.tokens.tolist() == [*([0, 1, 1, 2, 2] * (len(one.tokens) // 5)), 3]
