"""Compute model flop utilization (MFU): the share of the ranks' compute rate that a step uses.

    MFU = flop of the model in a step / (seconds of the step * flop/s of all ranks)

The flop of the model are those of forward and backward of the one-device program: a multiplication
with an addition counts 2, an elementwise operator counts 1 for each element. Recomputed operators
count once, and the update does not count. The rate of a rank is the cluster's rate of matrix
products in the dtype of each operator: measured (`cluster=measured`) or declared.

Source: Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sbp_core.cluster import Cluster, Device
from sbp_core.errors import SignatureError
from sbp_core.graph import InputKind, LogicalGraph, Phase
from sbp_core.passes import REMATERIALIZED
from sbp_core.signatures import OpCall, work_flop
from sbp_core.units import format_flop

#: The phases that count, and the operator in them that sbp adds: sums over micro-batches.
_COUNTED, _OURS = (Phase.FORWARD, Phase.BACKWARD), "sbp.accumulate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The work of the model in a step.

    Args:
        flop: Flop of forward and backward of all micro-batches.
        rank_s: Seconds that one rank at its full rate would need for all of it.
        num_ranks: Number of ranks that share it, >= 1.
    """

    flop: float
    rank_s: float
    num_ranks: int

    @classmethod
    def of(cls, graph: LogicalGraph, device: Device, num_ranks: int) -> ModelWork:
        """Return the work of a training step.

        Args:
            graph: The step, with accumulation made explicit.
            device: The device of each rank.
            num_ranks: Number of ranks of the run.
        """
        slowest = min(device.flop_per_s.values())
        flop = rank_s = 0.0
        for node in graph.nodes:
            if node.is_host or node.phase not in _COUNTED or node.op == _OURS:
                continue
            if REMATERIALIZED in node.tags:
                continue
            try:
                call = OpCall.of(graph, node)
                work = work_flop(call)
            except SignatureError:  # an operator without a rule, which every rank runs whole
                continue
            work *= graph.repetitions[node.rate]
            dtypes = [tensor.dtype for tensor in (*call.outputs, *call.inputs)]
            rate = next((device.flop_per_s[one] for one in dtypes if one in device.flop_per_s), 0.0)
            flop += work
            rank_s += work / (rate or slowest)
        return cls(flop=flop, rank_s=rank_s, num_ranks=num_ranks)

    def mfu(self, step_s: float) -> float:
        """Return the utilization of a step that took `step_s` seconds."""
        return self.rank_s / (step_s * self.num_ranks)

    def line(self, step_s: float, cluster: str) -> str:
        """Return the report line for a run or a plan.

        Args:
            step_s: Time of a typical step, in seconds.
            cluster: The name of the cluster whose rates were used, such as `local`.
        """
        flop = format_flop(self.flop)
        return (
            f"MFU {self.mfu(step_s):.1%} of the rates of cluster={cluster} (forward and backward: "
            f"{flop} a step)"
        )


def num_parameters(graph: LogicalGraph) -> int:
    """Return the number of elements of all parameters of the model; shared ones count once.

    Args:
        graph: The step. Parameters that it does not train, or does not use, count, too.
    """
    names = (entry.name for entry in graph.inputs if entry.kind is InputKind.PARAMETER)
    return sum(prod(graph.tensor(name).shape) for name in names)


def samples_of_step(graph: LogicalGraph) -> int:
    """Return the number of samples of a step, from dim 0 of batch tensors; 0 if none has dims.

    Args:
        graph: The step.
    """
    batch = (entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH)
    shapes = (graph.tensor(name).shape for name in batch if graph.is_tensor(name))
    return graph.num_micro_batches * min((shape[0] for shape in shapes if shape), default=0)


def speed_line(graph: LogicalGraph, cluster: Cluster, num_ranks: int, step_s: float) -> str:
    """Return the speed of a plan, in samples per second and as model flop utilization.

    Args:
        graph: The step.
        cluster: The cluster whose rates are used.
        num_ranks: Number of ranks of the plan.
        step_s: Predicted time of a step, in seconds, above 0.
    """
    work = ModelWork.of(graph, cluster.device, num_ranks)
    parts = [work.line(step_s, cluster.name)] if work.flop else []
    if samples := samples_of_step(graph):
        rate = samples / step_s
        parts.insert(0, f"{f'{rate:,.0f}' if rate >= 1000 else f'{rate:.4g}'} samples/s")
    return ", ".join(parts)
