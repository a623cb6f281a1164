"""Makes the program table of a runner, and orders programs for compilation beside steps."""

from collections.abc import Sequence
import functools
from typing import cast

from jaxrunner.device.entry_points import ENTRY_POINTS
from jaxrunner.device.program_spec import program_spec, step_key
from jaxrunner.device.stage_entry_points import BEFORE
from jaxrunner.parallel.pipeline import refuse_spread, to_stages
from jaxrunner.parallel.processes import check_own
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.programs.build import Built
from jaxrunner.programs.pipeline_programs import PipelinePrograms
from jaxrunner.programs.program_table import Key, ProgramTable


def make_programs(built: Built) -> ProgramTable:
    """Returns the program table of an engine; of a pipeline, its stages' tables as one."""
    program, eager = built.program, built.program.engine.enforce_eager
    if not program.stages:
        spec = functools.partial(program_spec, program, built.params)
        return ProgramTable(spec, built.cache, task=built.task, eager=eager)
    params = to_stages(program.config, built.params)
    specs = map(functools.partial(functools.partial, program_spec), program.stages, params)
    # It has the interface of a table, and programs that take the weights of all stages.
    return cast(ProgramTable, PipelinePrograms(program, [ProgramTable(spec) for spec in specs]))


def in_order(
    program: Program, buckets: Sequence[Bucket], keys: list[Key]
) -> tuple[list[Key], list[Key]]:
    """Returns programs in the order to compile them beside steps, and those that steps need first.

    Raises:
      ValueError: several processes run them, in which programs would be ready at other times.
    """
    check_own(program.mesh, "warm_up='background'", "take warm_up=True")
    refuse_spread(program.config, "warm_up='background'", "take warm_up=True")
    kinds = [[b for b in buckets if b.lora == lora] for lora in sorted({b.lora for b in buckets})]
    ragged = [[b for b in own if not b.query_len][-1] for own in kinds]
    uniform = [[b for b in own if b.query_len and not b.short] for own in kinds]
    decodes = [max(own, key=lambda b: b.num_rows) for own in uniform]
    needed = [step_key(bucket, 1) for bucket in ragged]  # these can run any step
    if (several := program.engine.num_decode_steps) > 1:
        needed += [step_key(bucket, several) for bucket in decodes]
    entries = ENTRY_POINTS | BEFORE
    first = [key for key in keys if entries[key.name].is_small or key in needed]
    # Of the others the one that can run any decode step comes next.
    return [*needed, *(step_key(bucket, 1) for bucket in decodes), *keys], first
