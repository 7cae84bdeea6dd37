"""Plugins: how a package offers models, planners, backends and more, and how they are found.

A plugin module says `from sbp_core.plugins import Factory, hookimpl` and states `SBP_API_VERSION`;
an app says `discover().make(kind, name, settings)`. What an object of each kind must do is in
`plugins.kinds`. Nothing here imports torch.
"""

from sbp_core.plugins.discovery import PluginSource, discover
from sbp_core.plugins.hooks import API_VERSION, KINDS, EmptyConfig, Factory, hookimpl
from sbp_core.plugins.kinds import (
    ClusterFactory,
    Dataset,
    GraphPass,
    LanguageModel,
    MetricSink,
    MetricSinkFactory,
    OptimizerFactory,
    Planner,
    PlanRequest,
    TextDataset,
    TrainableModel,
)
from sbp_core.plugins.registry import ConfigFolder, PluginEntry, PluginRegistry, Problem
from sbp_core.plugins.settings import merge_settings, unknown_key

__all__ = [
    "API_VERSION",
    "KINDS",
    "ClusterFactory",
    "ConfigFolder",
    "Dataset",
    "EmptyConfig",
    "Factory",
    "GraphPass",
    "LanguageModel",
    "MetricSink",
    "MetricSinkFactory",
    "OptimizerFactory",
    "PlanRequest",
    "Planner",
    "PluginEntry",
    "PluginRegistry",
    "PluginSource",
    "Problem",
    "TextDataset",
    "TrainableModel",
    "discover",
    "hookimpl",
    "merge_settings",
    "unknown_key",
]
