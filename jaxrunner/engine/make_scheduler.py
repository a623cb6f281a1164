"""Makes the scheduler and block pools for an engine's sizes."""

from typing import cast

import jax

from jaxrunner.caches.cache_group import reads_whole
from jaxrunner.device.buckets import CPU_STEP_COST, step_buckets
from jaxrunner.parallel.stages import num_stages
from jaxrunner.program.program import Program
from jaxrunner.scheduling.adapter_turns import AdapterTurns
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.ranks import RankedScheduler
from jaxrunner.scheduling.router import Router
from jaxrunner.scheduling.scheduler import Scheduler
from jaxrunner.scheduling.state_pool import make_pools


def make_scheduler(
    program: Program, pinned: set[int] | None = None
) -> tuple[list[BlockPool], Scheduler]:
    """Returns new block pools, one for each cache group of each data rank, and a scheduler of all.

    pinned: adapters that keep their places; None where the engine has none.
    """
    engine, D = program.engine, program.num_ranks
    made = [scheduler_of_rank(program) for _ in range(D)]
    if pinned is not None:
        adapters = AdapterTurns(engine.max_loras, pinned)  # on all ranks the same ones
        for _, scheduler in made:
            scheduler.admission.adapters = adapters
    if D == 1:
        return made[0]
    router = Router(
        D, block_size=engine.block_size, margin=engine.max_num_batched_tokens,
        by_prefix=engine.enable_prefix_caching,
    )  # fmt: skip
    ranked = RankedScheduler([scheduler for _, scheduler in made], router)
    # It has the interface of a scheduler.
    return [pool for pools, _ in made for pool in pools], cast(Scheduler, ranked)


def scheduler_of_rank(program: Program) -> tuple[list[BlockPool], Scheduler]:
    """Returns new block pools, one for each cache group, and a scheduler over them."""
    config, groups = program.engine, program.cache_groups
    speculator, buckets = program.model.speculator, step_buckets(config)
    whole = reads_whole(group.kind for group in groups)
    pools = make_pools(groups, enable_caching=config.enable_prefix_caching)
    scheduler = Scheduler(
        groups, pools,
        max_num_seqs=program.dims["R"],
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        num_drafts=program.num_drafts,
        adaptive=speculator is not None and speculator.adaptive,
        lookahead=0 if speculator is None else speculator.lookahead,
        num_stages=num_stages(program.config),
        step_sizes=() if whole else [b.num_tokens for b in buckets if not b.query_len],
        step_cost=CPU_STEP_COST if jax.default_backend() == "cpu" else 0,
    )  # fmt: skip
    return pools, scheduler
