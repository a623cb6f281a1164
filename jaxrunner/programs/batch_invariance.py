"""What a request's bits must not depend on: the other requests of its steps.

Kernels and programs that go by what others ask for are left out (`ops.backends`, `ModelRunner`);
here is what cannot be.
"""

from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.model import Model
from jaxrunner.parallel.mesh import mesh_of


def check_batch_invariant(model: Model, config: ModelConfig, engine: EngineConfig) -> None:
    """Checks that nothing of an engine with `batch_invariant` goes by all requests of a step.

    Raises:
      ValueError: devices whose sums are in an order of their own, or drafts, whose number decides
        how a request's tokens are computed.
    """
    if not engine.batch_invariant:
        return
    if (mesh := mesh_of(config)) is not None and mesh.size > 1:
        raise ValueError(
            f"batch_invariant=True wants sums on one device, got {mesh.size} devices that sum "
            "together, in an order that goes by a step's tokens: leave it out, or set "
            "tensor_parallel_size=1"
        )
    if model.speculator is not None:
        raise ValueError(
            "batch_invariant=True wants one token of a request a step, speculative_config drafts "
            "more where there is room for them: leave one of them out"
        )
