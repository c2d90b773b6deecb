"""Devices to plan for: what their makers publish, in bytes, bytes a second and FLOPs a second of one device.

Figures are those of data sheets; what of them a training step reaches is a share of its own, printed as an assumption.
Sources: NVIDIA A100, H100 and H200 Tensor Core GPU data sheets (dense bfloat16, SXM); DGX A100, H100 and H200 user
guides (8 GPUs a node, one 200 or 400 Gb/s adapter per GPU, memory of the host). 38 to 43 percent of the peak: Llama 3
on H100 (Grattafiori et al. 2024, arXiv 2407.21783, table 4).
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from mmcp.config import config, load

Share = Annotated[float, Field(gt=0, le=1)]


@config
class Device:
    """One kind of device and the node it stands in."""

    name: str
    memory: PositiveInt
    """Bytes."""
    flops: PositiveFloat
    """Floating-point operations a second at its peak, dense, in bfloat16."""
    memory_rate: PositiveFloat
    """Bytes a second to and from its memory."""
    node_size: PositiveInt = 8
    """Devices of a node."""
    node_rate: PositiveFloat
    """Bytes a second that one device receives from the others of its node."""
    network_rate: PositiveFloat
    """Bytes a second that one device receives from other nodes."""
    host_rate: PositiveFloat
    """Bytes a second between one device and its host, each way."""
    host_memory: PositiveInt
    """Bytes of memory of the host, for the whole node."""
    latency: PositiveFloat = 2e-5
    """Seconds that a collective takes whatever it moves."""
    flops_share: Share = 0.4
    """Of the peak that a step reaches while it computes."""
    rate_share: Share = 0.8
    """Of each link's rate that an exchange reaches."""

    @property
    def reached_flops(self) -> float:
        """FLOPs a second of a step."""
        return self.flops * self.flops_share

    @property
    def reached_node_rate(self) -> float:
        """Bytes a second inside a node."""
        return self.node_rate * self.rate_share

    @property
    def reached_network_rate(self) -> float:
        """Bytes a second between nodes."""
        return self.network_rate * self.rate_share

    @property
    def reached_host_rate(self) -> float:
        """Bytes a second between device and host."""
        return self.host_rate * self.rate_share


def find_device(name: str) -> Device:
    """Return the device of that name, or the one that a YAML file describes.

    Raises ValueError for a name that is neither, ConfigError for what is wrong in the file.
    """
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        return load(Device, name)
    if name.upper() not in FIGURES:
        raise ValueError(f"--gpu {name}: unknown; use one of {', '.join(FIGURES)}, or a YAML file of a Device")
    return Device(name=name.upper(), **FIGURES[name.upper()])


FIGURES: dict[str, dict] = {
    "A100": {
        "memory": 80 * 10**9,
        "flops": 312e12,
        "memory_rate": 2.039e12,
        "node_rate": 300e9,
        "network_rate": 25e9,
        "host_rate": 32e9,
        "host_memory": 2 * 10**12,
    },
    "H100": {
        "memory": 80 * 10**9,
        "flops": 989e12,
        "memory_rate": 3.35e12,
        "node_rate": 450e9,
        "network_rate": 50e9,
        "host_rate": 64e9,
        "host_memory": 2 * 10**12,
    },
    "H200": {
        "memory": 141 * 10**9,
        "flops": 989e12,
        "memory_rate": 4.8e12,
        "node_rate": 450e9,
        "network_rate": 50e9,
        "host_rate": 64e9,
        "host_memory": 2 * 10**12,
    },
}
"""Fields of Device by name."""
