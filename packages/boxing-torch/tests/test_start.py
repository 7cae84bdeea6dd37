import sys

import pytest

from sbp_boxing_torch.backend import TorchBackend
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.errors import ConfigError
from sbp_core.processes.supervisor import Line, supervise

_PROGRAM = """
import sys
from sbp_boxing_torch.backend import TorchBackend
from sbp_boxing_torch.configs import TorchBoxingConfig
backend = TorchBackend(TorchBoxingConfig(init_method=sys.argv[1]))
from sbp_core.testing.holdings import listening
backend.open([0, 1])
print("listens on", *sorted(listening()))
print("open as", *backend.local_ranks())
backend.close()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("scheme", ["env", "file"])
def test_the_started_processes_find_each_other(scheme, tmp_path):
    init_method = "env://" if scheme == "env" else f"file://{tmp_path / 'store'}"
    backend = TorchBackend(TorchBoxingConfig(init_method=init_method))
    lines: list[Line] = []

    specs = backend.launch_specs(2, [sys.executable, "-c", _PROGRAM, init_method])
    ended = supervise(specs, timeout_s=120, on_line=lines.append)

    assert ended.error() is None
    assert {f"rank {n} | open as {n}" for n in range(2)} <= set(map(str, lines))
    places = {str(line).partition(" listens on ")[2] for line in lines} - {""}
    assert not places & {"0.0.0.0", "::"}
    if scheme == "env" and sys.platform == "linux":
        assert places == {"127.0.0.1"}


def test_every_process_has_a_rank_and_the_same_place_to_meet():
    specs = TorchBackend(TorchBoxingConfig()).launch_specs(3, ["program"])

    assert [spec.ranks for spec in specs] == [(0,), (1,), (2,)]
    assert [spec.environment["RANK"] for spec in specs] == ["0", "1", "2"]
    assert {spec.environment["WORLD_SIZE"] for spec in specs} == {"3"}
    assert len({spec.environment["MASTER_PORT"] for spec in specs}) == 1
    assert all(int(spec.defaults["OMP_NUM_THREADS"]) >= 1 for spec in specs)


def test_a_place_to_meet_of_the_config_is_kept():
    config = TorchBoxingConfig(init_method="tcp://localhost:1234")

    (spec,) = TorchBackend(config).launch_specs(1, ["program"])

    assert "MASTER_ADDR" not in spec.environment


@pytest.mark.parametrize("settings", [{"rank": 0}, {"world_size": 3}])
def test_settings_of_one_process_cannot_start_several(settings):
    with pytest.raises(ConfigError, match="do not fit 2 processes"):
        TorchBackend(TorchBoxingConfig(**settings)).launch_specs(2, ["program"])
