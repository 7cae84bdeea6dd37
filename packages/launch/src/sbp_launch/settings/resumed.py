"""Offer the settings of an earlier run to Hydra as options named `resumed`, to resume that run.

A run folder may come from anywhere, so the settings are plain values: texts are not interpolated,
and settings of Hydra itself (`hydra.*`, defaults, packages) are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigLoadError

from sbp_core.errors import ConfigError
from sbp_launch.settings.config import ComposedConfig

#: A text that Hydra reads as text, not as a number, null or a boolean.
_PLAIN = re.compile(
    r"(?!(?:null|true|false|inf|nan)\Z)(?:[A-Za-z_/]|\.\.?/)[\w./-]*", re.IGNORECASE
)


def literal(value: object) -> object:
    """Return a value with escaped texts, which OmegaConf resolves to the given texts, as `${x}`."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [literal(part) for part in value]
    return value


def quote(text: str) -> str:
    r"""Return a text as the value of an override, in quotes if Hydra needs them.

    >>> print(quote("runs/it's"))
    'runs/it\'s'
    """
    if _PLAIN.fullmatch(text):
        return text
    # A backslash is special only before a quote, also before the closing quote at the end.
    inner = re.sub(r"(\\*)(')", r"\1\1\\\2", str(literal(text)))
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", inner) + "'"


#: The primary config, and the option of each group that the earlier run had.
RESUMED = "resumed"


def offer(earlier: ComposedConfig) -> None:
    """Make Hydra compose the settings of an earlier run: `--config-name resumed`.

    Raises:
        ConfigError: a group has settings of Hydra itself.
    """
    store = ConfigStore.instance()
    for group, value in earlier.values.items():
        place = earlier.files[group]
        if isinstance(value, Mapping) and "defaults" in value:
            raise ConfigError(
                f"{group}.defaults is no setting of a run",
                where=place,
                accepted="settings as sbp-train writes them",
            )
        store.store(group=group, name=RESUMED, node=literal(value), provider=place)
    options = [{f"override {group}": RESUMED} for group in earlier.values]
    # The usual primary config, and on top of it the options of this run.
    store.store(name=RESUMED, node={"defaults": ["config", *options, "_self_"]})


def place_of(group: str, option: str) -> str:
    """Return the file from which an option of an earlier run was read, or `""`."""
    if option != RESUMED:
        return ""
    try:
        return ConfigStore.instance().load(f"{group}/{RESUMED}.yaml").provider or ""
    except ConfigLoadError:
        return ""
