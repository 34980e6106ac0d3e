"""Assumptions besides the model: network, pauses, start times, prices, checkpoints."""

from __future__ import annotations

from pydantic import Field

from .given import Given


class Terms(Given):
    """Assumptions; options of ``bamboo simulate`` are named after them."""

    network_gb_s: float = Field(1.25, gt=0, description="GB/s of a node's network; 1.25: 10 Gbit/s, a p3.2xlarge's")
    message_ms: float = Field(0.5, ge=0, description="milliseconds of a message besides its bytes")
    detection_s: float = Field(0.109, ge=0, description="from a loss to its notice (docs/benchmarks.md, p95)")
    rebuild_s: float = Field(0.037, ge=0, description="from there to the agreement (the same: 146 ms after the loss)")
    switch_s: float = Field(0.136, ge=0, description="pause of a change of plan at a boundary (soak: healing, median)")
    first_s: float = Field(0.0, ge=0, description="by how much the first iteration of new owners takes longer")
    boundary_s: float = Field(
        0.0, ge=0, description="a copy that takes no longer is complete at the boundary where its state is offered"
    )
    start_s: float = Field(
        45.0, ge=0, description="from a node's coming to its ready worker; 45: as in Oobleck's simulator (SOSP 2023)"
    )
    restart_s: float = Field(45.0, ge=0, description="the same of all workers that start again, without loading")
    storage_gb_s: float = Field(1.0, gt=0, description="GB/s of a node to and from where checkpoints are; assumed")
    host_gb_s: float = Field(6.0, gt=0, description="GB/s from a device to host memory; assumed, half of PCIe 3 x16")
    checkpoint_s: float = Field(
        1800.0, gt=0, description="between checkpoints of a bamboo job; checkpoint-restart goes by Young and Daly"
    )
    on_demand_price: float = Field(3.06, ge=0, description="$ per node and hour on demand (p3.2xlarge, us-east-1)")
    spot_price: float = Field(0.918, ge=0, description="$ per node and hour of a spot instance; as above, 30 %")
