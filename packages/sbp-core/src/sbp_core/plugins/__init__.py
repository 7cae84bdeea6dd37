"""Plugins: how a package offers models, planners, backends and more, and how they are found.

A plugin module says `from sbp_core.plugins import Factory, hookimpl` and states `SBP_API_VERSION`;
an app says `discover().make(kind, name, settings)`. What an object of each kind must do is in
`plugins.kinds`. Nothing here imports torch.
"""

from sbp_core.errors import nearest
from sbp_core.plugins.discovery import PluginSource, discover
from sbp_core.plugins.hooks import API_VERSION, KINDS, Factory, hookimpl
from sbp_core.plugins.registry import ConfigFolder, PluginEntry, PluginRegistry, Problem
from sbp_core.plugins.settings import merge_settings, unknown_key

__all__ = [
    "API_VERSION",
    "KINDS",
    "ConfigFolder",
    "Factory",
    "PluginEntry",
    "PluginRegistry",
    "PluginSource",
    "Problem",
    "discover",
    "hookimpl",
    "merge_settings",
    "nearest",
    "unknown_key",
]
