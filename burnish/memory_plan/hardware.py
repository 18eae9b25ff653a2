"""GPUs and clusters by name, with the rates that estimates of time are made from.

Vendors' figures are peaks. The shares of them that burnish reaches were measured on one H200 (`bench/plan_accuracy.py`), and are assumed for
the other GPUs. No collective operation between GPUs was measured: those of a cluster are bandwidths of its links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from burnish.config.errors import UserError, did_you_mean
from burnish.training.meter import peak_half_flops

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU. Bandwidths are bytes per second in one direction."""

    name: str
    memory: int
    """Bytes that a process can allocate."""
    bandwidth: float
    """Of its memory."""
    link: float
    """To the other GPUs of its machine (NVLink)."""
    network: float
    """To other machines: its own adapter."""

    @property
    def half_flops(self) -> float:
        """Peak operations per second in bfloat16."""
        found = peak_half_flops(self.name)
        assert found is not None, "every GPU of the table has a peak"
        return found


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", int(79.1 * GIB), 2.04e12, 300e9, 25e9),
        Gpu("H100", int(79.1 * GIB), 3.35e12, 450e9, 50e9),
        Gpu("H200", int(139.8 * GIB), 4.8e12, 450e9, 50e9),
        Gpu("B200", int(178.3 * GIB), 8.0e12, 900e9, 50e9),
    )
}
"""SXM versions of 80 GB (A100, H100), 141 GB and 180 GB, with adapters of 200 (A100) and 400 Gb/s."""


@dataclass(frozen=True)
class Cluster:
    """Equal machines with equal GPUs."""

    machines: int
    gpus_per_machine: int
    gpu: Gpu

    @property
    def num_gpus(self) -> int:
        return self.machines * self.gpus_per_machine

    @property
    def text(self) -> str:
        return f"{self.machines} x {self.gpus_per_machine} x {self.gpu.name}"

    def ring_bandwidth(self, size: int, stride: int) -> float:
        """Bytes per second of a ring (all-gather, reduce-scatter) of `size` GPUs, every `stride`-th one.

        A ring over several machines uses the adapters of all its GPUs of a machine at once.
        """
        if size == 1 or size * stride <= self.gpus_per_machine:
            return self.gpu.link
        beside = max(1, self.gpus_per_machine // stride)
        return min(self.gpu.link, self.gpu.network * beside)

    def exchange_bandwidth(self, size: int, stride: int) -> float:
        """Bytes per second of a GPU in an all-to-all of `size` GPUs: the part for other machines takes its own adapter."""
        if size == 1 or size * stride <= self.gpus_per_machine:
            return self.gpu.link
        beside = max(1, self.gpus_per_machine // stride)
        return self.gpu.network / (1 - beside / size)


def parse_cluster(text: str) -> Cluster:
    """`64x8xH200` (64 machines of 8 GPUs), `8xH100` (one machine) or `H200` (one GPU)."""
    found = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z]\w*)", text.strip())
    counts = [int(number) for number in (found.groups()[:2] if found else ()) if number is not None]
    if found is None or 0 in counts:
        raise UserError(f"--cluster {text}: expected MACHINESxGPUSxNAME, such as 64x8xH200, 8xH100 or H200")
    name = found[3].upper()
    if name not in GPUS:
        raise UserError(
            f"--cluster {text}: unknown GPU {found[3]}{did_you_mean(name, GPUS)} (known: {', '.join(GPUS)})"
        )
    machines, gpus = [*[1] * (2 - len(counts)), *counts]
    return Cluster(machines, gpus, GPUS[name])
