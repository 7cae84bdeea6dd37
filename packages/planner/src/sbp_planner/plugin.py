"""The hooks of sbp-planner: the planners that it provides.

This module holds only names and configs; the planners are made in their own modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, hookimpl
from sbp_planner.configs import FileConfig, ManualConfig, OsdpConfig, PropagateConfig
from sbp_planner.search_configs import (
    AlpaConfig,
    AutoConfig,
    DlplacerConfig,
    ExhaustiveConfig,
    GalvatronConfig,
    GpipeConfig,
    GreedyConfig,
    IlpConfig,
    McmcConfig,
    OptcnnConfig,
    PipedreamConfig,
    StanzaConfig,
    TofuConfig,
)

SBP_API_VERSION = 2


@hookimpl
def sbp_planners() -> Mapping[str, Factory]:
    """Return the planners of this package."""
    return {
        "alpa": Factory(
            build="sbp_planner.alpa:build",
            config=AlpaConfig,
            summary="stages of a pipeline on submeshes, each split inside by the joint search",
        ),
        "auto": Factory(
            build="sbp_planner.auto:build",
            config=AutoConfig,
            summary="other planners, on all meshes of the ranks: the fastest plan that fits",
        ),
        "dlplacer": Factory(
            build="sbp_planner.placers:build_dlplacer",
            config=DlplacerConfig,
            summary="groups of operators on ranks of their own, by an integer program",
        ),
        "exhaustive": Factory(
            build="sbp_planner.exhaustive:build",
            config=ExhaustiveConfig,
            summary="tries every assignment; for steps of a few operators",
        ),
        "galvatron": Factory(
            build="sbp_planner.galvatron:build",
            config=GalvatronConfig,
            summary="pipeline stages, and for each layer split samples, states or matrices",
        ),
        "gpipe": Factory(
            build="sbp_planner.pipelines:build_gpipe",
            config=GpipeConfig,
            summary="a pipeline of single ranks with equal work",
        ),
        "greedy": Factory(
            build="sbp_planner.greedy:build",
            config=GreedyConfig,
            summary="one operator after another, each with the cheapest signature",
        ),
        "ilp": Factory(
            build="sbp_planner.ilp:build",
            config=IlpConfig,
            summary="all operators and mesh axes in one integer program, with a bound",
        ),
        "mcmc": Factory(
            build="sbp_planner.mcmc:build",
            config=McmcConfig,
            summary="a random walk, judged by the simulated step",
        ),
        "optcnn": Factory(
            build="sbp_planner.optcnn:build",
            config=OptcnnConfig,
            summary="exact elimination on all mesh axes at once, without a memory limit",
        ),
        "pipedream": Factory(
            build="sbp_planner.pipelines:build_pipedream",
            config=PipedreamConfig,
            summary="a pipeline whose stages may have several ranks",
        ),
        "stanza": Factory(
            build="sbp_planner.placers:build_stanza",
            config=StanzaConfig,
            summary="two parts of the model on two parts of the ranks",
        ),
        "tofu": Factory(
            build="sbp_planner.tofu:build",
            config=TofuConfig,
            summary="the number of ranks in prime factors, one decision for each",
        ),
        "propagate": Factory(
            build="sbp_planner.propagate:build",
            config=PropagateConfig,
            summary="any model on any mesh: the batch is split, the rest inferred; the default",
            former_names=("infer",),
        ),
        "manual": Factory(
            build="sbp_planner.manual:build",
            config=ManualConfig,
            summary="a few tensors are pinned, the rest is inferred at the least cost",
        ),
        "file": Factory(
            build="sbp_planner.file:build",
            config=FileConfig,
            summary="a strategy from a file that a run left, edited or not",
        ),
        "osdp": Factory(
            build="sbp_planner.osdp:build",
            config=OsdpConfig,
            summary="each parameter replicated or sharded, the fastest within a memory limit",
        ),
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Return the Hydra search paths of this package."""
    return ["pkg://sbp_planner.conf"]
