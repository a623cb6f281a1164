"""The tensors that ranks of a pipeline hand each other, in vLLM's names."""

from typing import Any, NamedTuple

import jax

from jaxrunner.parallel.stages import rank_of, stages_of
from jaxrunner.scheduling.request import SchedulerOutput


class IntermediateTensors(NamedTuple):
    """The tensors that a rank computed in a step, for the next rank."""

    tensors: dict[str, jax.Array]  # "hidden_states": [T, E], T of the step's bucket


def given(
    config: Any, output: SchedulerOutput, tensors: IntermediateTensors | None
) -> tuple[Any, ...]:
    """Returns the hidden states that the layers of a rank begin with, none on the first.

    Raises:
      ValueError: there are some where there should be none, or the other way round.
    """
    rank = rank_of(stages_of(config)[0]) if stages_of(config) else 0
    wanted = rank > 0 and bool(output.num_scheduled_tokens)
    if wanted != (tensors is not None):
        asks = f"wants what rank {rank - 1} returned" if wanted else "wants none of this step"
        raise ValueError(
            f"intermediate_tensors: rank={rank} {asks}, got "
            f"{'none' if tensors is None else 'some'}: hand each step's from rank to rank"
        )
    return () if tensors is None else (tensors.tensors["hidden_states"],)
