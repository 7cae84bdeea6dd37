"""The conformance suite of cluster profiles: subclass `ClusterConformance`, supply one method.

In a test module:

    class TestMyCluster(ClusterConformance):
        def make_factory(self):
            return build(MyConfig())
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from sbp_core.cluster import Cluster
from sbp_core.plugins.kinds import ClusterFactory

__all__ = ["ClusterConformance"]


class ClusterConformance(ABC):
    """Tests that every cluster profile must pass. See the module's docstring for how to use it."""

    #: Numbers of ranks to test.
    sizes: tuple[int, ...] = (1, 2, 4)

    #: Dtypes whose rate a planner needs.
    dtypes: tuple[str, ...] = ("float32",)

    @abstractmethod
    def make_factory(self) -> ClusterFactory:
        """Return the result of `build(config)`."""

    def test_the_cluster_has_as_many_devices_as_asked_for(self) -> None:
        """The cluster also has a name."""
        for size in self.sizes:
            cluster = self.make_factory()(size)
            assert isinstance(cluster, Cluster), f"a {type(cluster).__name__}"
            assert cluster.num_devices == size, f"{cluster.num_devices} devices, not {size}"
            assert cluster.name, "the cluster has no name"

    def test_the_profile_is_the_same_every_time(self) -> None:
        """It is declared or was measured before; the factory measures nothing."""
        for size in self.sizes:
            assert self.make_factory()(size) == self.make_factory()(size), f"{size} devices"

    def test_devices_have_a_rate_for_every_dtype(self) -> None:
        """Rates are in flop/s."""
        device = self.make_factory()(self.sizes[0]).device
        missing = [dtype for dtype in self.dtypes if dtype not in device.flop_per_s]
        assert not missing, f"no rate for {missing}"

    def test_every_pair_of_ranks_has_a_link(self) -> None:
        """It has at most the bandwidth of the innermost level, and at least its latency."""
        for size in self.sizes:
            cluster = self.make_factory()(size)
            nearest = cluster.levels[0].link
            for other in range(1, size):
                link = cluster.link([0, other])
                assert link.bytes_per_s <= nearest.bytes_per_s, f"0 to {other}"
                assert link.latency_s >= nearest.latency_s, f"0 to {other}"
