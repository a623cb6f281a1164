"""The devices that a model is cut over, and how, in vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrunner.caches.interleave import WHOLE, Interleave
from jaxrunner.config import ModelConfig
from jaxrunner.mixtures.balanced import with_balance, with_loads
from jaxrunner.mixtures.eplb_config import EplbConfig
from jaxrunner.mixtures.recorded_routes import routes_group
from jaxrunner.model import Model
from jaxrunner.parallel.mesh import check_one_rank, make_mesh
from jaxrunner.parallel.pipeline import deal, refuse_spread
from jaxrunner.parallel.tensor import shard

# How tokens come to whole experts: all to all devices, or each to the devices of its own.
BACKENDS = REPLICATED, EXCHANGED = "allgather_reducescatter", "ragged_all_to_all"
DEFAULT_THRESHOLD = 1024  # not measured: far above any step of decoding


@dataclass(frozen=True)
class ParallelConfig:
    """Stages of a model, and devices of each."""

    tensor_parallel_size: int = 1  # devices that each have a shard of the model, or of a stage
    pipeline_parallel_size: int = 1  # stages that each have some of the layers
    rank: int | None = None  # the stage that this process has alone; None for all of them
    devices: Sequence[Any] | None = None  # those to take of; None for the first of this process
    interleave: Interleave = WHOLE  # how tokens are dealt out to devices with one KV head
    enable_expert_parallel: bool = False  # whether devices have whole experts, not units of each
    eplb: EplbConfig | None = None  # when whole experts are spread anew; None counts no loads
    num_ranks: int = 1  # ranks with requests of their own, over all of which experts lie
    all2all_backend: str = REPLICATED  # how tokens come to whole experts, one of `BACKENDS`
    all2all_token_threshold: int | None = None  # tokens of a step that go by `EXCHANGED`

    def cut(self, model: Model, config: ModelConfig) -> tuple[Model, ModelConfig]:
        """Returns the model and its config as they run on these devices; raises as what cuts."""
        N, P, whole = (
            self.tensor_parallel_size, self.pipeline_parallel_size, self.enable_expert_parallel
        )  # fmt: skip
        if whole and "experts" not in config.dims:
            raise ValueError(
                f"enable_expert_parallel=True wants a mixture of experts, {config.architecture} is "
                "none: leave it out"
            )
        if routes_group(config) is not None:
            self._refuse_rank("enable_return_routed_experts=True")
        if self.eplb is not None:
            self._refuse_rank("enable_eplb=True")
            model, config = self._balanced(model, config, self.eplb)
        experts: dict[str, Any] = dict(expert_parallel=whole, exchange_from=self._exchange_from())
        if self.num_ranks > 1:
            return self._over_ranks(model, config, experts)
        if P > 1 or self.rank:
            model, made = deal(
                model, config, P, N, self.devices, self.rank, interleave=self.interleave, **experts
            )
            if self.eplb is not None:
                refuse_spread(made, "enable_eplb=True", "leave it out")
            if routes_group(config) is not None:
                refuse_spread(made, "enable_return_routed_experts=True", "leave it out")
            return model, made
        if N > 1 or self.devices is not None or self.interleave != WHOLE:
            return shard(model, config, make_mesh(N, self.devices), self.interleave, **experts)
        return model, config

    def _exchange_from(self) -> int | None:
        """Returns the tokens of a step from which on these go to their experts; None for never."""
        backend, least = self.all2all_backend, self.all2all_token_threshold
        if backend not in BACKENDS:
            raise ValueError(
                f"all2all_backend={backend!r} is none of {', '.join(BACKENDS)}: take one of them"
            )
        if backend == REPLICATED:
            if least is not None:
                raise ValueError(
                    f"all2all_token_threshold={least} is of all2all_backend={EXCHANGED!r}: set it, "
                    "or leave this out"
                )
            return None
        if not self.enable_expert_parallel or self.tensor_parallel_size * self.num_ranks == 1:
            raise ValueError(
                f"all2all_backend={backend!r} wants whole experts on several devices: set "
                "enable_expert_parallel, and tensor_parallel_size or data_parallel_size"
            )
        return DEFAULT_THRESHOLD if least is None else least

    def _refuse_rank(self, asked: str) -> None:
        """Refuses a stage alone, whose scheduler is not ours."""
        if self.rank is not None:
            raise ValueError(
                f"{asked} is of engines that run all stages, rank={self.rank} runs one: leave one "
                "of them out"
            )

    def _over_ranks(
        self, model: Model, config: ModelConfig, experts: dict[str, Any]
    ) -> tuple[Model, ModelConfig]:
        """Returns a mixture whose experts lie over data ranks. experts: keywords of `shard`."""
        mesh = make_mesh(self.tensor_parallel_size, self.devices, self.num_ranks)
        if self.pipeline_parallel_size > 1:
            check_one_rank(mesh, "pipeline_parallel_size", "leave one of them out")
        return shard(model, config, mesh, self.interleave, **experts)

    def _balanced(
        self, model: Model, config: ModelConfig, eplb: EplbConfig
    ) -> tuple[Model, ModelConfig]:
        """Returns a mixture with copies of experts, which all devices have as many of; on one
        device one that counts their loads."""
        N, D, more = self.tensor_parallel_size, self.num_ranks, eplb.num_redundant_experts
        if not any(getattr(config, "sparse", ())):
            raise ValueError(
                f"enable_eplb=True wants a mixture of experts, {config.architecture} is none: "
                "leave it out"
            )
        if N * D == 1:
            if more:
                raise ValueError(
                    f"eplb_config.num_redundant_experts={more} are copies for other devices, "
                    "tensor_parallel_size=1 has none: leave it out"
                )
            return with_loads(model, config), config
        if not self.enable_expert_parallel:
            raise ValueError(
                "enable_eplb=True spreads whole experts over several devices: set "
                "enable_expert_parallel too"
            )
        if any(".experts." in path for path, _ in getattr(config, "schemes", ())):
            raise ValueError(
                "enable_eplb=True moves experts of the dtype that is computed in, these are "
                "quantised: leave it out, or take a checkpoint of float experts"
            )
        X = config.dims["experts"]
        if (X + more) % (N * D):
            ranks = "" if D == 1 else f" with data_parallel_size={D}"
            raise ValueError(
                f"eplb_config.num_redundant_experts={more} makes {X + more} experts, which "
                f"tensor_parallel_size={N}{ranks} does not divide: take {-X % (N * D)}"
            )
        return with_balance(model, config, eplb)
