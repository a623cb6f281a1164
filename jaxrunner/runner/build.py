"""What an engine's programs are made of: chosen from the model, the sizes and the device."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.device.lowering import lowering_task
from jaxrunner.device.program_spec import abstract, usual_spec
from jaxrunner.model import Model
from jaxrunner.ops.backends import Choice, choose_ops
from jaxrunner.program import Program
from jaxrunner.rule import Rule
from jaxrunner.runner.program_cache import ProgramCache, is_ours, jax_keeps_its_own
from jaxrunner.sampling import RULES
from jaxrunner.slot_table import check_names


class Built(NamedTuple):
    """What is compiled into an engine's programs, where these are kept and how they are lowered."""

    choice: Choice
    program: Program
    cache: ProgramCache | None
    task: bytes | None = None  # for processes that lower them


def build(
    model: Model,
    model_config: ModelConfig,
    config: EngineConfig,
    params: Any,
    *,
    rules: tuple[Rule, ...] = RULES,
    cache_dir: Path | None = None,
) -> Built:
    """Chooses what computes an engine's steps. Of `params` the shapes and dtypes count."""
    choice = choose_ops(model_config, config)
    check_names((*(rule.table for rule in rules), *model.tables))
    # A rule of the user's own belongs to every draw; the kernel knows the usual ones alone.
    sample = choice.sample if rules == RULES else None
    program = Program(model, model_config, config, choice.ops, rules, sample=sample)
    code = model.embed, model.layers, model.logits
    # What the code of others does is not known.
    ours = rules == RULES and is_ours(*code)
    task = None
    if ours and choice.sample is not None:  # what else there is takes Python little time
        task = lowering_task(usual_spec, program._replace(rules=()), abstract(params))
    if cache_dir is None or not ours or jax_keeps_its_own():
        return Built(choice, program, None, task)
    names = [(function.__module__, function.__qualname__) for function in code]
    context = names, model_config, config, choice.name, abstract(params)
    return Built(choice, program, ProgramCache(cache_dir, context), task)
