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
import sbp_core, sbp_core.plan_check, sbp_core.signatures
from sbp_core import Placement, S, Strategy, boxing, check, compile_plan, infer_strategy
from sbp_aten import prepare_step
assert isinstance(check, type(compile_plan)), check
sys.exit('torch' in sys.modules)
"""


@pytest.mark.slow
def test_planning_and_checking_import_no_torch() -> None:
    assert subprocess.run([sys.executable, "-c", _SCRIPT], check=False).returncode == 0


def test_capture_is_a_function_and_its_old_module_still_has_its_names() -> None:
    from sbp_torch import capture

    with pytest.warns(DeprecationWarning, match=r"capture\.capture is sbp_torch\.graph_capture\."):
        from sbp_torch.capture import capture as old

    import sbp_torch.capture

    import sbp_torch.graph_capture

    assert old is capture is sbp_torch.capture is sbp_torch.graph_capture.capture
    with pytest.raises(TypeError, match="missing 3 required positional arguments"):
        capture()
