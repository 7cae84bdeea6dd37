"""Plugin hooks of sbp-planner: they register its planners by name, and its Hydra config folder.

This module holds only names and configs; the planners are made in their own modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, factories, hookimpl
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
    own = {
        "alpa": (
            AlpaConfig,
            "stages of a pipeline on submeshes, each split inside by the joint search",
        ),
        "auto": (
            AutoConfig,
            "other planners, on all meshes of the ranks: the fastest plan that fits",
        ),
        "exhaustive": (ExhaustiveConfig, "tries every assignment; for steps of a few operators"),
        "galvatron": (
            GalvatronConfig,
            "pipeline stages, and for each layer split samples, states or matrices",
        ),
        "greedy": (GreedyConfig, "one operator after another, each with the cheapest signature"),
        "ilp": (IlpConfig, "all operators and mesh axes in one integer program, with a bound"),
        "mcmc": (McmcConfig, "a random walk, judged by the simulated step"),
        "optcnn": (
            OptcnnConfig,
            "exact elimination on all mesh axes at once, without a memory limit",
        ),
        "tofu": (TofuConfig, "the number of ranks in prime factors, one decision for each"),
        "manual": (
            ManualConfig,
            "a few tensors are pinned, the rest is inferred at the least cost",
        ),
        "file": (FileConfig, "a strategy from a file, such as the one of a run"),
        "osdp": (
            OsdpConfig,
            "each parameter replicated or sharded, the fastest within a memory limit",
        ),
    }
    pipelines = {
        "gpipe": (GpipeConfig, "a pipeline of single ranks with equal work"),
        "pipedream": (PipedreamConfig, "a pipeline whose stages may have several ranks"),
    }
    placers = {
        "dlplacer": (
            DlplacerConfig,
            "groups of operators on ranks of their own, by an integer program",
        ),
        "stanza": (StanzaConfig, "two parts of the model on two parts of the ranks"),
    }
    propagate = Factory(
        build="sbp_planner.propagate:PropagatePlanner",
        config=PropagateConfig,
        summary="any model on any mesh: the batch is split, the rest inferred; the default",
        former_names=("infer",),
    )
    return {
        **factories("sbp_planner.{name}:{Name}Planner", own),
        **factories("sbp_planner.pipelines:{Name}Planner", pipelines),
        **factories("sbp_planner.placers:{Name}Planner", placers),
        "propagate": propagate,
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Return the Hydra search paths of this package."""
    return ["pkg://sbp_planner.conf"]
