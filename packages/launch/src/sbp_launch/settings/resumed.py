"""The settings of an earlier run as options that Hydra composes: `trainer=resumed`, and others.

They are plain values: what a text of them says is no interpolation, and nothing of Hydra's own
(`hydra.*`, defaults, packages) is taken from them, because a run folder may come from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigLoadError

from sbp_core.errors import ConfigError
from sbp_launch.settings.config import ComposedConfig

#: A text that Hydra reads as itself, and not as a number, a null or a truth value.
_PLAIN = re.compile(
    r"(?!(?:null|true|false|inf|nan)\Z)(?:[A-Za-z_/]|\.\.?/)[\w./-]*", re.IGNORECASE
)


def literal(value: object) -> object:
    """Return a value whose texts OmegaConf resolves to the texts that are given, as in `${x}`."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [literal(part) for part in value]
    return value


def quote(text: str) -> str:
    r"""Return a text as the value of an override, in quotes if Hydra needs them.

    >>> print(quoted("runs/it's"))
    'runs/it\'s'
    """
    if _PLAIN.fullmatch(text):
        return text
    # A backslash counts where a quote follows it, and at the end, where the closing one does.
    inner = re.sub(r"(\\*)(')", r"\1\1\\\2", str(literal(text)))
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", inner) + "'"


#: The primary config, and the option of each group that the earlier run had.
RESUMED = "resumed"


def offer(earlier: ComposedConfig) -> None:
    """Let Hydra compose the settings of an earlier run: `--config-name resumed`.

    Raises:
        ConfigError: a group has settings of Hydra's own.
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
    # The primary config of every run, and on top of it that of this one.
    store.store(name=RESUMED, node={"defaults": ["config", *options, "_self_"]})


def place_of(group: str, option: str) -> str:
    """Return the file that an option of an earlier run was read from, or `""`."""
    if option != RESUMED:
        return ""
    try:
        return ConfigStore.instance().load(f"{group}/{RESUMED}.yaml").provider or ""
    except ConfigLoadError:
        return ""
