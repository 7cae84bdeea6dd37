"""Plugins: packages that offer models, planners, backends and more, and their discovery.

A plugin module imports `Factory, hookimpl` from here and states `SBP_API_VERSION`; an app calls
`discover().make(kind, name, settings)`. The interface of each kind is in `plugins.kinds`, and for
kinds that use PyTorch in `sbp_torch.kinds`.
"""

from sbp_core.exports import moved_names
from sbp_core.plugins.callbacks import Callback, TrainerControl, TrainerState, TrainingContext
from sbp_core.plugins.discovery import PluginSource, discover
from sbp_core.plugins.hooks import API_VERSION, KINDS, EmptyConfig, Factory, factories, hookimpl
from sbp_core.plugins.kinds import (
    CheckpointStorage,
    ChecksCombination,
    ClusterFactory,
    GraphPass,
    MetricSink,
    MetricSinkFactory,
    StagedFolder,
    StorageFactory,
    combination_check,
)
from sbp_core.plugins.registry import ConfigFolder, PluginEntry, PluginRegistry, Problem, blame
from sbp_core.plugins.settings import (
    INSTEAD,
    describe_type,
    former_fields,
    merge_settings,
    type_hints,
    unknown_key,
    warn_renamed,
)

__all__ = [
    "API_VERSION",
    "INSTEAD",
    "KINDS",
    "Callback",
    "CheckpointStorage",
    "ChecksCombination",
    "ClusterFactory",
    "ConfigFolder",
    "EmptyConfig",
    "Factory",
    "GraphPass",
    "MetricSink",
    "MetricSinkFactory",
    "PluginEntry",
    "PluginRegistry",
    "PluginSource",
    "Problem",
    "StagedFolder",
    "StorageFactory",
    "TrainerControl",
    "TrainerState",
    "TrainingContext",
    "blame",
    "combination_check",
    "describe_type",
    "discover",
    "factories",
    "former_fields",
    "hookimpl",
    "merge_settings",
    "type_hints",
    "unknown_key",
    "warn_renamed",
]


__getattr__ = moved_names(
    __name__,
    {
        "ChecksOthers": "sbp_core.plugins.ChecksCombination",
        "LaunchRequest": "sbp_core.processes.LaunchRequest",
        "Launcher": "sbp_core.processes.Launcher",
        "PlanRequest": "sbp_core.PlanRequest",
        "Planner": "sbp_core.planning.Planner",
        "Storage": "sbp_core.plugins.CheckpointStorage",
    },
)
