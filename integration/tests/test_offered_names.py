"""What rooms offer says how it is called, and what documents name is there."""

from __future__ import annotations

import contextlib
import inspect
import re
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

    assert not [name for name in sorted(names) if not _exists(name)]
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
