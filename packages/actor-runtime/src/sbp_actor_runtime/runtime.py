"""`ActorRuntime`: the runtime `actor`, which starts an `ActorSession` that runs a compiled plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.session import ActorSession
from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import SbpValueError
from sbp_core.runtime import Runtime, Session
from sbp_torch.boxing.processes import Fingerprinted
from sbp_torch.segments import SegmentMaker, segment_maker


class ActorRuntime(Runtime):
    """Runs the local ranks of a plan on threads of this process.

    Raises:
        ConfigError: this machine lacks something that the setting `compile` needs.
    """

    traces = has_forms = True

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.make_segment: SegmentMaker | None = None
        # In a compiled segment, the boundaries between operators are unknown.
        self.traces_operators = config.compile == "eager"
        if config.compile != "eager":
            self.make_segment = segment_maker(config.compile, fallback=config.compile_fallback)

    def start(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor] | Session,
        backend: BoxingBackend | None = None,
        ranks: Sequence[int] | None = None,
        *,
        keeps: bool = False,
    ) -> Session:
        """See `Runtime.start`."""
        if backend is None:
            return self._start_beside(plan, states, ranks, keeps)
        backend = Fingerprinted(backend) if self.config.debug_fingerprints else backend
        backend.open([part.rank for part in plan.ranks])
        try:
            local_ranks = tuple(ranks) if ranks is not None else backend.local_ranks()
            return ActorSession(plan, states, backend, local_ranks, self.config, self.make_segment)
        except BaseException:
            backend.close()
            raise

    def _start_beside(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor] | Session,
        ranks: Sequence[int] | None,
        keeps: bool,
    ) -> Session:
        """Start a plan on the states and the backend of another session, which stays the owner."""
        if not isinstance(states, ActorSession):
            raise SbpValueError(
                "there is no backend",
                accepted="a backend, or states of a session that has one",
                todo="pass a backend that is not yet open",
            )
        local_ranks = tuple(ranks) if ranks is not None else states.local_ranks
        return ActorSession(
            plan,
            states,
            states.backend,
            local_ranks,
            self.config,
            self.make_segment,
            owns_backend=False,
            keeps=keeps,
        )
