"""`LLM(eplb_config=...)`: when experts are balanced over devices, in vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxrunner.api.arguments import Elsewhere, check_same
from jaxrunner.api.validation import Bound, shown, validate

BOUNDS = {
    "window_size": Bound(int, 1, 2**30),
    "step_interval": Bound(int, 1, 2**30),
    "num_redundant_experts": Bound(int, 0, 2**15),
    "log_balancedness": Bound(bool),
}
ELSEWHERE = {
    "log_balancedness_interval": Elsewhere(
        "log_balancedness logs each placement, report tells loads at any time: leave it out",
        (1, None),
    ),
    "policy": Elsewhere("DeepSeek's is the one that there is: leave it out", ("default", None)),
    "use_async": Elsewhere("experts move between two steps: leave it out", (False, None)),
    "communicator": Elsewhere("a compiled program moves experts: leave it out"),
}


@dataclass(frozen=True)
class EplbConfig:
    """When and how experts are rebalanced over devices."""

    window_size: int = 1000  # steps, the last ones, whose loads count
    step_interval: int = 3000  # steps from one placement to the next
    num_redundant_experts: int = 0  # copies beside one of each expert, in each layer
    log_balancedness: bool = False  # whether each placement is logged

    def __post_init__(self):
        for name, bound in BOUNDS.items():
            validate(f"eplb_config.{name}", getattr(self, name), bound)
        if self.window_size > self.step_interval:
            raise ValueError(
                f"eplb_config.window_size={self.window_size} is over step_interval="
                f"{self.step_interval}: lower it"
            )

    @classmethod
    def read(
        cls, given: Mapping[str, Any] | None, *, enable_eplb: bool = True
    ) -> "EplbConfig | None":
        """Returns the config that a user's dict says; None where it is not enabled.

        Raises:
          TypeError, ValueError: an unknown key, or a value that cannot be; names it, and what is
            here in its place. Or a dict where it is not enabled.
        """
        if not enable_eplb:
            if given is not None:
                raise ValueError("eplb_config is of enable_eplb=True: set it, or leave this out")
            return None
        own = dict(given or {})
        for key in [key for key in own if key in ELSEWHERE]:
            check_same("eplb_config", key, own.pop(key), ELSEWHERE[key])
        known = {field.name for field in fields(cls)}
        if unknown := sorted(map(str, own.keys() - known)):
            raise ValueError(f"eplb_config may have {sorted(known)}, got {shown(unknown)}")
        return cls(**own)
