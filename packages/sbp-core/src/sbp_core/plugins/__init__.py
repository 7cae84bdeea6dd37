"""Plugins: how a package offers models, planners, backends and more, and how they are found.

A plugin module says `from sbp_core.plugins import Factory, hookimpl` and states `SBP_API_VERSION`;
an app says `discover().make(kind, name, settings)`. What an object of each kind must do is in
`plugins.kinds`, and for those that speak PyTorch in `sbp_torch.kinds`.

Stability: stable.
"""

import importlib
import warnings

from sbp_core.plugins.callbacks import Callback, TrainerControl, TrainerState, TrainingContext
from sbp_core.plugins.discovery import PluginSource, discover
from sbp_core.plugins.hooks import API_VERSION, KINDS, EmptyConfig, Factory, hookimpl
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
    "former_fields",
    "hookimpl",
    "merge_settings",
    "type_hints",
    "unknown_key",
    "warn_renamed",
]


#: Names that were offered here, and what replaces them.
_MOVED = {
    "ChecksOthers": "sbp_core.plugins.ChecksCombination",
    "LaunchRequest": "sbp_core.processes.LaunchRequest",
    "Launcher": "sbp_core.processes.Launcher",
    "PlanRequest": "sbp_core.planning.PlanRequest",
    "Planner": "sbp_core.planning.Planner",
    "Storage": "sbp_core.plugins.CheckpointStorage",
}


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Loaded by its name, as it is above this room.
    home, _, now = _MOVED[name].rpartition(".")
    said = f"sbp_core.plugins.{name} is {home}.{now} now"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(home), now)
