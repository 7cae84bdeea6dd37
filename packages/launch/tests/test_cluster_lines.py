"""The machine that a plan was priced for, in words."""

from dataclasses import replace

from sbp_core.cluster import Cluster
from sbp_core.testing.files import measured_cluster
from sbp_launch.clusters.nvidia import GpuConfig, build_h100
from sbp_launch.explaining.cluster_lines import machine_lines


def test_devices_memory_and_the_links_that_matter_are_told() -> None:
    settings = GpuConfig(nodes=4, nodes_per_rack=2, rack_oversubscription=4.0, link_efficiency=1.0)
    make = build_h100(settings)

    assert machine_lines(make(32)) == [
        "priced for cluster h100: 32 cuda devices with 72.0 GB each",
        "  host memory of each: 250.0 GB, at 64.0 GB/s",
        "  in a node of 8: 450.0 GB/s after 3.4 µs",
        "  in a rack of 16: 50.0 GB/s after 14 µs",
        "  in a cluster of 32: 200.0 GB/s shared after 14 µs",
    ]
    assert machine_lines(make(8))[2:] == ["  in a node of 8: 450.0 GB/s after 3.4 µs"]


def test_one_device_has_no_links() -> None:
    [line] = machine_lines(Cluster.nominal(1))

    assert line == "priced for cluster nominal: 1 cpu device with 1.1 TB each"


def test_measured_boxing_is_told() -> None:
    lines = machine_lines(measured_cluster())

    assert lines[-1] == "  boxing as it was measured through 'torch'"
    assert len(machine_lines(replace(measured_cluster(), calibrations={}))) == len(lines) - 1
