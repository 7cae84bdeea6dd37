"""The comparisons, and their targets.

A comparison trains one model in one manner: by PyTorch's own ways, and by sbp over each boxing
backend. The target limits the ratio of our step to a step of the first peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch_ways as peers
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

OWN_TABLE = {"tables.*": "S(1)", "use:tables.*.weight": "S(1)"}
OWN_CLASSES = {"batch": "S(0)", "head.weight*": "S(0)", "use:head.weight": "S(0)"}
OWN_VOCABULARY = {"head.weight*": "S(0)", "use:head.weight": "S(0)", "embed.tokens.weight*": "S(0)"}


@dataclass(frozen=True, kw_only=True)
class Ours:
    """One way to run a model by sbp.

    Args:
        preset: One of sbp-planner's configs, such as `manual/zero`.
        pins: Pins in addition to those of the preset.
        settings: Settings of the planner that replace those of the preset.
        axis: The axis of the mesh.
        boxing: The boxing backend: `torch` (gloo), `mpi`, or `local` for one rank.
    """

    preset: str
    boxing: str
    pins: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    axis: str = "data"
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One model in one manner.

    Args:
        model: A key of `programs.MODELS`.
        peers: The ways of PyTorch; the target refers to the first one.
        ours: The ways of sbp, by their distinguishing names.
        target: The largest ratio of our step to a step of the first peer, for our fastest way over
            gloo, or over MPI with `over_mpi`. None for no target.
        own_statistics: Whether losses differ because the peer's batch norm uses the samples of a
            rank, while ours uses all samples.
    """

    model: str
    peers: Mapping[str, Callable[..., peers.Step]]
    ours: Mapping[str, Ours]
    target: float | None = None
    over_mpi: bool = False
    num_ranks: int = peers.NUM_RANKS
    own_statistics: bool = False


def over_both(preset: str, **others: Any) -> dict[str, Ours]:
    return {
        name: Ours(preset=preset, boxing=boxing, **others)
        for name, boxing in (("gloo", "torch"), ("MPI", "mpi"))
    }


def one_rank(model: str) -> Comparison:
    return Comparison(
        model=model,
        peers={"eager": peers.eager},
        ours={"one rank": Ours(preset="manual/data_parallel", boxing="local")},
        target=1.0,
        num_ranks=1,
    )


def data_parallel(model: str, *, own_statistics: bool = False) -> Comparison:
    return Comparison(
        model=model,
        peers={"DDP": peers.ddp},
        ours=over_both("manual/data_parallel"),
        target=1.0,
        own_statistics=own_statistics,
    )


def auto_beside_presets(
    model: str, own_pins: Mapping[str, Any] | None = None, *, own_statistics: bool = False
) -> Comparison:
    """Return the comparison of `auto`'s choice with every preset, and with manual pins."""
    ways = {
        "auto": over_both("auto"),
        "propagate": over_both("propagate"),
        "data parallel": over_both("manual/data_parallel"),
        "ZeRO-1": over_both("manual/zero1"),
        "ZeRO-3": over_both("manual/zero"),
    }
    if model == "gpt":
        ways["tensor parallel"] = over_both("manual/tensor_parallel", axis="tensor")
    if own_pins is not None:
        ways["pinned by hand"] = over_both("manual/custom", pins=own_pins)
    return Comparison(
        model=model,
        peers={"DDP": peers.ddp},
        ours={
            f"{boxing}, {way}": both[boxing]
            for boxing in ("gloo", "MPI")
            for way, both in ways.items()
        },
        own_statistics=own_statistics,
    )


def pinned_or_not(pins: Mapping[str, Any]) -> dict[str, Ours]:
    ours = over_both("manual/custom", pins=pins)
    return {**ours, "MPI, nothing pinned": Ours(preset="propagate", boxing="mpi")}


#: Blocks of each stage for `gpt`, whose head costs two and a half blocks, and for `deep gpt`.
TWO_STAGES = (3, 1)
FOUR_STAGES, EIGHT_STAGES = (2, 2, 2, 2), (1,) * 8


def pipeline(
    schedule: Any, name: str, blocks: Sequence[int] = TWO_STAGES, num_ranks: int = peers.NUM_RANKS
) -> Comparison:
    """Return the comparison of a schedule, with the same `blocks` in each stage on both sides."""
    begins = [0, *accumulate(blocks)]
    stages = [[f"blocks.{index}" for index in range(begin, end)] for begin, end in pairwise(begins)]
    stages[0].insert(0, "embed")
    stages[-1] += ["norm", "head"]
    settings = {"pipeline": name, "stage_patterns": stages}
    if len(blocks) > num_ranks:
        settings["chunks"] = len(blocks) // num_ranks
    micro = peers.MICRO_BATCHES
    return Comparison(
        model="gpt" if blocks is TWO_STAGES else "deep gpt",
        peers={"torch": peers.gpt_pipeline(schedule, blocks)},
        ours=over_both("manual/pipeline", settings=settings, axis="pipe", micro_batches=micro),
        target=0.90,
        num_ranks=num_ranks,
    )


COMPARISONS: Mapping[str, Comparison] = {
    "gpt, one rank": one_rank("gpt"),
    "dlrm, one rank": one_rank("dlrm"),
    "face, one rank": one_rank("face"),
    "gpt, data parallel": data_parallel("gpt"),
    "gpt, ZeRO-1": Comparison(
        model="gpt",
        peers={"ZeroRedundancyOptimizer": peers.zero_redundancy},
        ours=over_both("manual/zero1"),
        target=1.0,
    ),
    "gpt, ZeRO-3": Comparison(
        model="gpt",
        peers={"FSDP2": peers.fsdp2},
        ours=over_both("manual/zero"),
        target=0.75,
    ),
    "gpt, tensor parallel": Comparison(
        model="gpt",
        peers={"DTensor": peers.gpt_tensor_parallel},
        ours={
            **over_both("manual/tensor_parallel", axis="tensor"),
            "MPI, vocabulary split": Ours(
                preset="manual/tensor_parallel", boxing="mpi", axis="tensor", pins=OWN_VOCABULARY
            ),
        },
        target=0.75,
    ),
    "gpt, GPipe": pipeline(ScheduleGPipe, "gpipe"),
    "gpt, 1F1B": pipeline(Schedule1F1B, "1f1b"),
    "deep gpt, interleaved": pipeline(ScheduleInterleaved1F1B, "interleaved", FOUR_STAGES),
    "deep gpt, zero bubble": pipeline(ScheduleInterleavedZeroBubble, "zero_bubble", FOUR_STAGES),
    "deep gpt, GPipe, 4 ranks": pipeline(ScheduleGPipe, "gpipe", FOUR_STAGES, 4),
    "deep gpt, 1F1B, 4 ranks": pipeline(Schedule1F1B, "1f1b", FOUR_STAGES, 4),
    "deep gpt, interleaved, 4 ranks": pipeline(
        ScheduleInterleaved1F1B, "interleaved", EIGHT_STAGES, 4
    ),
    "dlrm, data parallel": data_parallel("dlrm"),
    "dlrm, table split": Comparison(
        model="dlrm",
        peers={"DTensor": peers.dlrm_tensor_parallel, "hybrid by hand": peers.dlrm_hybrid},
        ours=pinned_or_not(OWN_TABLE),
        target=1.0,
        over_mpi=True,
    ),
    "face, data parallel": data_parallel("face"),
    "face, classes split": Comparison(
        model="face",
        peers={"DTensor": peers.face_tensor_parallel, "DDP and DTensor by hand": peers.face_hybrid},
        ours=pinned_or_not(OWN_CLASSES),
        target=0.75,
    ),
    "cnn, data parallel": data_parallel("cnn", own_statistics=True),
    "gpt, auto": auto_beside_presets("gpt"),
    "dlrm, auto": auto_beside_presets("dlrm", OWN_TABLE),
    "face, auto": auto_beside_presets("face", OWN_CLASSES),
    "cnn, auto": auto_beside_presets("cnn", own_statistics=True),
}
