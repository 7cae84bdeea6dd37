from __future__ import annotations

import subprocess
import sys

import pytest

import sbp_core


@pytest.mark.parametrize("name", sbp_core.__all__)
def test_every_public_name_can_be_reached(name: str) -> None:
    assert getattr(sbp_core, name) is not None
    assert name in dir(sbp_core)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        _ = sbp_core.chekc


_SCRIPT = """
import sys
import sbp_core
from sbp_core import Placement, S, Strategy, boxing, check, compile_plan, infer_strategy
from sbp_aten import prepare_step
from sbp_core import signatures
import sbp_core.check
assert callable(sbp_core.check) and callable(check) and check.CheckReport, check
assert callable(signatures) and signatures.derive, signatures
sys.exit('torch' in sys.modules)
"""


@pytest.mark.slow
def test_planning_and_checking_import_no_torch_and_modules_can_be_called() -> None:
    assert subprocess.run([sys.executable, "-c", _SCRIPT], check=False).returncode == 0


def test_capture_is_a_module_that_can_be_called() -> None:
    import sbp_torch.capture
    from sbp_torch import capture

    assert capture is sbp_torch.capture
    with pytest.raises(TypeError, match="missing 3 required positional arguments"):
        capture()
