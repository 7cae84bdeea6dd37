from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_torch.testing.runtime import RuntimeConformance


class TestActorRuntime(RuntimeConformance):
    def make_runtime(self) -> ActorRuntime:
        return ActorRuntime(ActorConfig(first_deadline_s=30.0, deadline_s=30.0))
