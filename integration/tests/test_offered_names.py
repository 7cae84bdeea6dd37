"""What rooms offer says how it is called, to `inspect.signature` and to `help`."""

from __future__ import annotations

import inspect
import pydoc
from enum import Enum
from importlib import import_module
from types import FunctionType

from api.rooms import ROOT, Packages

#: A sample takes the arguments of any operator; `Tensor` stands for those of any library.
_ANY = {"sbp_torch.testing.signatures.sample", "sbp_core.tensor.Tensor"}


def test_all_that_can_be_called_has_the_signature_of_its_own() -> None:
    unclear = []
    for room, module in Packages.below(ROOT).modules.items():
        for name in module.offers or ():
            found = getattr(import_module(room), name)
            is_protocol = getattr(found, "_is_protocol", False)
            is_other = isinstance(found, type) and issubclass(found, Exception | Enum)
            if not callable(found) or is_protocol or is_other:
                continue
            if not isinstance(found, type | FunctionType) and not inspect.ismodule(found):
                continue  # an alias of a type
            kinds = {entry.kind for entry in inspect.signature(found).parameters.values()}
            says = f"{room}.{name}"
            if kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                unclear.append(says)

    assert set(unclear) == _ANY


def test_help_of_a_module_that_can_be_called_says_so() -> None:
    from sbp_core import check
    from sbp_torch import capture

    assert list(inspect.signature(capture).parameters)[:4] == [
        "model",
        "loss",
        "batch",
        "optimizer",
    ]
    assert "help(capture.capture) explains it" in pydoc.render_doc(capture)
    assert "help(check.check) explains it" in pydoc.render_doc(check)
