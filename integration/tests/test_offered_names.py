"""What rooms offer says how it is called, and what documents name is there."""

from __future__ import annotations

import contextlib
import inspect
import re
import shlex
from enum import Enum
from importlib import import_module
from types import FunctionType

import pytest

from api.rooms import ROOT, Packages
from documents.pages import documents
from sbp_core.plugins import KINDS

#: A sample takes the arguments of any operator; `Tensor` stands for those of any library.
_ANY = {"sbp_torch.testing.signatures.sample", "sbp_core.tensor.Tensor"}


@pytest.mark.slow
def test_all_that_can_be_called_has_the_signature_of_its_own() -> None:
    unclear = []
    for room, module in Packages.below(ROOT).modules.items():
        for name in module.offers or ():
            found = getattr(import_module(room), name)
            is_protocol = getattr(found, "_is_protocol", False)
            is_other = isinstance(found, type) and issubclass(found, Exception | Enum)
            if not callable(found) or is_protocol or is_other:
                continue
            if not isinstance(found, type | FunctionType):
                continue  # an alias of a type
            kinds = {entry.kind for entry in inspect.signature(found).parameters.values()}
            says = f"{room}.{name}"
            if kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                unclear.append(says)

    assert set(unclear) == _ANY


@pytest.mark.slow
def test_no_room_offers_a_name_that_importing_a_module_replaces() -> None:
    packages = Packages.below(ROOT)
    for module in packages.modules:
        with contextlib.suppress(ImportError):  # of what is not installed
            import_module(module)

    replaced = [
        f"{room}.{name}"
        for room, module in packages.rooms.items()
        for name in module.offers or ()
        if inspect.ismodule(getattr(import_module(room), name))
    ]

    assert replaced == ["sbp_core.boxing"]  # is meant


def _exists(dotted: str) -> bool:
    """Whether a name of a document is a module, an attribute of one, or a field of a class."""
    if dotted in {*KINDS.values(), "sbp_config_folders"}:
        return True
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if part in getattr(found, "__dataclass_fields__", {}):
                return True
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


# A changelog names what was there when it was written.
@pytest.mark.parametrize("page", [name for name in documents() if "CHANGELOG" not in name])
def test_what_a_document_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    names = set(re.findall(r"`(sbp_\w+(?:\.\w+)*)", text))
    paths = set(re.findall(r"`((?:packages|integration|docs)/[\w./-]+)`", text))
    tests = set(re.findall(r"[` ](tests/test_\w+\.py)", text))
    here = (ROOT / page).parent

    assert not [name for name in sorted(names) if not _exists(name)]
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
    folders = [here, ROOT / "integration", *(ROOT / "packages").iterdir()]
    assert not [name for name in sorted(tests) if not any((at / name).exists() for at in folders)]


#: A command of the settings page, in a block or in a line; and a setting or option by itself.
_COMMAND = re.compile(r"sbp-(?:train|plan|calibrate) (?:[^`\n]|(?<=\\)\n)*")
_ALONE = re.compile(r"`([a-z]+(?:\.[a-z_]+)*=[\w./]+)`")
_SETTINGS = (ROOT / "docs/reference/settings.md").read_text("utf-8")
_KEYS = set(re.findall(r"^\| `([\w.]+)` \|", _SETTINGS, re.M))
#: Names that are no settings of a group: Hydra's, of `sbp-train` alone, and of plugins of examples.
_OTHER_KEYS = {"hydra", "resume", "experiment"}
_OTHER_OPTIONS = {"mine", "my_planner", "example", "planner.min_bytes"}
_OPTIONS = {
    group: set(re.findall(r"`([^`]+)`", options))
    for group, options in re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (.*) \|", _SETTINGS, re.M)
}


def _unknown_settings(text: str) -> list[str]:
    """Return the settings and options of a document that are not on the page of all settings."""
    words = [found for found in _ALONE.findall(text) if re.split("[.=]", found)[0] in _OPTIONS]
    for command in _COMMAND.findall(text):
        if "pipeline=" in command.split("planner.")[0]:
            continue  # the schedules of `sbp-plan pipeline=` have settings of their own
        with contextlib.suppress(ValueError):  # a quote that ends in a later line
            parts = shlex.split(command.replace("\\\n", " "), comments=True)
            words += [word for word in parts if re.match(r"[+~]{0,2}[a-z][a-z\d_./]*=", word)]
    unknown = []
    for word in dict.fromkeys(words):
        key, _, value = word.lstrip("+~").partition("=")
        if key in _OPTIONS:
            # The options of a sweep; not a word in capitals for any option.
            names = {name for name in value.split(",") if re.fullmatch(r"[a-z0-9_/]+", name)}
            unknown += [word] * bool(names - _OPTIONS[key] - _OTHER_OPTIONS)
        elif key.partition(".")[0] not in _OTHER_KEYS and key not in _OTHER_OPTIONS:
            known = any(key == each or key.startswith(f"{each}.") for each in _KEYS)
            unknown += [word] * (not known)
    return unknown


#: A changelog and a decision name what was there when they were written, or was rejected.
_LASTING = [name for name in documents() if not re.search("CHANGELOG|docs/decisions", name)]


@pytest.mark.parametrize("page", _LASTING)
def test_settings_that_a_document_names_are_there(page: str) -> None:
    assert not _unknown_settings((ROOT / page).read_text("utf-8"))


def test_a_setting_that_is_gone_is_found() -> None:
    text = (
        "`compile=cudagraph`, `trainer.stepz=5`\n$ sbp-plan outt=x trainer.steps=1 \\\n    data=no"
    )

    assert _unknown_settings(text) == ["compile=cudagraph", "trainer.stepz=5", "outt=x", "data=no"]
