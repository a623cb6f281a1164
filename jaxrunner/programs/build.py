"""The parts of an engine's programs, chosen from the model, the sizes and the device."""

from dataclasses import replace
import functools
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrunner.caches.cache_group import reads_whole, rewinds
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.device.buckets import step_buckets
from jaxrunner.device.lowering import lowering_task
from jaxrunner.device.program_spec import abstract, usual_spec
from jaxrunner.lora.pooled_layers import find_layers
from jaxrunner.lora.product import Product
from jaxrunner.lora.products import find_products, find_saved
from jaxrunner.lora.saved_layers import LayerWeight
from jaxrunner.lora.table import ADAPTERS
from jaxrunner.mixtures.wrapped import WrappedConfig
from jaxrunner.model import MakeOps, Model
from jaxrunner.ops.adapters.adapted import adapted
from jaxrunner.ops.attention import gains_short
from jaxrunner.ops.backends import Choice, choose_ops
from jaxrunner.parallel.context import deal_out
from jaxrunner.parallel.custom_all_reduce import num_rows
from jaxrunner.parallel.mesh import check_one_rank, mesh_of, num_ranks
from jaxrunner.parallel.pipeline import check_drafts, refuse
from jaxrunner.parallel.placement import declared
from jaxrunner.parallel.processes import check_own
from jaxrunner.parallel.tensor import ShardedConfig, all_reduced
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.programs.batch_invariance import check_batch_invariant
from jaxrunner.programs.program_cache import ProgramCache, is_ours, jax_keeps_its_own
from jaxrunner.quantization.quantized_config import plain_config
from jaxrunner.rule import Rule
from jaxrunner.sampling import RULES
from jaxrunner.slot_table import check_names, partition
from jaxrunner.speculators.draft_model import DraftModelConfig
from jaxrunner.speculators.drafter import DraftedConfig


class Built(NamedTuple):
    """The parts of an engine's programs, where these are kept and how they are lowered."""

    choice: Choice
    program: Program
    params: Any  # shapes and dtypes of the weights
    cache_dir: Path | None  # where executables are kept, None for nowhere
    is_ours: bool  # whether no code of others is compiled in

    def resized(self, config: EngineConfig) -> "Built":
        """Returns the same for other sizes of the KV cache, of which the choice knows nothing."""
        return self._replace(program=replace(self.program, engine=config))

    def on(self, model: Model, config: ModelConfig, params: Any) -> "Built":
        """Returns the same for the same model on other devices."""
        model = model._replace(tables=self.program.model.tables)
        program = replace(self.program, model=model, config=config)
        return self._replace(program=program, params=abstract(params))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The sizes of steps."""
        program, has_kernels = self.program, self.choice.name == "mosaic_gpu"
        return step_buckets(
            program.engine, program.model.speculator,
            lambda bucket: has_kernels and gains_short(program, bucket),
        )  # fmt: skip

    @property
    def cache(self) -> ProgramCache | None:
        """The executables of earlier processes."""
        if self.cache_dir is None or not self.is_ours or jax_keeps_its_own():
            return None
        if self.program.is_shared:  # compiling may want all processes, and some would load
            return None
        program = self.program
        code = _code(program, self.params)
        names = [(function.__module__, function.__qualname__) for function in code]
        model, speculator = program.model, program.model.speculator
        tables = [(table.name, table.dims) for table in model.tables]
        drafts = speculator and speculator._replace(propose=_given(speculator.propose), tables=())
        context = names, tables, drafts, program.config, program.engine
        context += self.choice.name, self.params, program.peer_rows
        devices = None if program.mesh is None else program.mesh.devices.flat
        return ProgramCache(self.cache_dir, context, devices)

    @property
    def task(self) -> bytes | None:
        """The task of lowering processes; None where these gain nothing."""
        if not self.is_ours or self.choice.sample is None:  # the rest takes Python little time
            return None
        return lowering_task(usual_spec, replace(self.program, rules=()), self.params)


def build(
    model: Model,
    model_config: ModelConfig,
    config: EngineConfig,
    params: Any,
    *,
    rules: tuple[Rule, ...] = RULES,
    ops: MakeOps | None = None,
    cache_dir: Path | None = None,
) -> Built:
    """Chooses what computes an engine's steps. Of `params` the shapes and dtypes count.

    ops: the operations of layers, None for those that serve the model and the device.
    cache_dir: where executables are kept from one process to the next, None for nowhere.
    """
    choice = choose_ops(model_config, config)
    if ops is not None:
        choice = choice._replace(name="given", ops=ops, reason="its operations were given")
    _check_together(model, model_config, config)
    choice = deal_out(choice, model_config, config)
    products: tuple[Product, ...] = ()
    saved: tuple[tuple[str, str], ...] = ()
    layers: tuple[LayerWeight, ...] = ()
    if config.enable_lora:
        products = find_products(model, model_config)
        saved = find_saved(model, model_config, config.lora_modules_to_save)
        layers = find_layers(model_config)
        model = model._replace(tables=(*model.tables, ADAPTERS))
        choice = choice._replace(ops=adapted(choice.ops))
    if (mesh := mesh_of(model_config)) is not None:
        whole_experts = getattr(model_config, "expert_parallel", False)
        data_ranks = num_ranks(mesh) > 1
        exchange_from = getattr(model_config, "exchange_from", None)
        reduced = all_reduced(choice.ops, whole_experts, data_ranks, exchange_from)
        choice = choice._replace(ops=reduced)
    speculator = model.speculator
    # A rule of the user's own belongs to every draw; the kernel knows the usual ones alone.
    sample = choice.sample if rules == RULES and model.samples else None
    num_drafts = 0 if speculator is None else speculator.num_drafts
    program = Program(
        model, model_config, config, choice.ops, rules, num_drafts, sample, products, saved, layers,
        peer_rows=num_rows(model_config, config, choice.name),
    )  # fmt: skip
    check_names(program.tables)
    # Nothing is known of code that is not ours.
    ours = rules == RULES and ops is None and is_ours(*_code(program, params))
    spec = abstract(params)
    if mesh is not None and not program.stages:
        spec = declared(params, model.params, model_config.dims, mesh)
    return Built(choice, program, spec, cache_dir, ours)


def _check_together(model: Model, model_config: ModelConfig, config: EngineConfig) -> None:
    """Checks that model, devices and sizes of an engine go together; raises as `build`."""
    mesh, speculator = mesh_of(model_config), model.speculator
    check_batch_invariant(model, model_config, config)
    if reads_whole(model_config.cache_kinds):
        _check_whole(config)
    if mesh is not None:
        _check_ranks(model, mesh)
    if mesh is not None and config.enforce_eager:
        raise ValueError(
            "enforce_eager=True runs each operation by itself, which shards cannot: leave it out, "
            "or take one device"
        )
    if config.num_decode_steps > 1:
        refuse(model_config, f"num_decode_steps={config.num_decode_steps}", "set it to 1")
    if speculator is not None:
        by_layers = bool(speculator.extras or speculator.lookahead)
        check_drafts(model_config, by_layers=by_layers, adaptive=speculator.adaptive)
    if speculator is not None and speculator.adaptive:
        asked = "speculative_config.num_speculative_tokens='auto'"
        check_own(mesh, asked, "say a number, as 'auto' goes by measured times")
    if speculator is not None and not model.samples:
        raise ValueError("runner='pooling' drafts no tokens: leave out speculative_config")
    if config.num_decode_steps > 1 and model.heads:
        raise ValueError(
            f"num_decode_steps={config.num_decode_steps} needs a model without heads, "
            f"{model_config.architecture} has some: set num_decode_steps=1"
        )
    if speculator is not None and (lost := _not_rewound(model_config)):
        raise ValueError(
            f"a speculator needs caches in which a rejected token is written over, "
            f"{model_config.architecture} has {lost}: leave out speculative_config"
        )


def _check_ranks(model: Model, mesh: Mesh) -> None:
    """Checks what steps of data ranks have in common; raises as `build`."""
    read, _ = partition(model.tables)
    if model.heads or read:
        check_one_rank(mesh, "a model with heads or slot tables", "leave one of them out")


def _check_whole(config: EngineConfig) -> None:
    """Checks that a step holds the longest prompt; raises as `build`."""
    longest, most = config.max_model_len - 1, config.max_num_batched_tokens
    if longest > most or config.long_prefill_token_threshold:
        raise ValueError(
            f"an encoder reads a text in one step: max_num_batched_tokens={most} must be at least "
            f"its {longest} tokens and long_prefill_token_threshold 0, got "
            f"{config.long_prefill_token_threshold}: raise the first or lower max_model_len"
        )


def _code(program: Program, params: Any) -> tuple[Any, ...]:
    """Returns the functions and classes that a model brings along, with those of its weights."""
    model, config, speculator = program.model, program.config, program.model.speculator
    own = () if speculator is None else speculator.tables
    tables = (table.params for table in (*model.tables, *own))
    heads = (head.run for head in model.heads)
    written = (_function(table.observe) for table in model.tables if table.observe is not None)
    drafts = () if speculator is None else (_function(speculator.propose), *_code_of_parts(config))
    kinds = ((type(kind), kind.leaves) for kind in dict.fromkeys(config.cache_kinds))
    weights = _classes(params)
    return (
        model.embed, model.layers, model.logits, type(plain_config(config)), *tables, *heads,
        *written, *drafts, *chain(*kinds), *weights, *_code_on_shards(config),
        *getattr(config, "code", ()),
    )  # fmt: skip


def _code_on_shards(config: Any) -> tuple[Any, ...]:
    """Returns the functions and classes of models and drafters that others run, as on shards."""
    drafter = getattr(config, "drafter", None)
    parts = config, getattr(config, "target", None), drafter, getattr(drafter, "config", None)
    found = [one for part in parts for one in _wrappers(part)]
    of = [(one.family.embed, one.family.layers, one.family.logits) for one in found]
    return *chain(*of), *(type(plain_config(_inner(one))) for one in found)


def _wrappers(config: Any) -> list[Any]:
    """Returns the configs of models that run another one, from the outside."""
    inner = _inner(config)
    return [] if inner is None else [config, *_wrappers(inner)]


def _inner(config: Any) -> Any:
    if isinstance(config, ShardedConfig):
        return config.whole
    return config.plain if isinstance(config, WrappedConfig) else None


def _code_of_parts(config: Any) -> tuple[Any, ...]:
    """Returns the functions and classes of a model and of the drafter with layers that it has."""
    if not isinstance(config, DraftedConfig):
        return ()
    model, family = config.model, config.family
    own = family.embed, family.feature, family.layers, family.logits, type(config.drafter)
    if isinstance(config.drafter, DraftModelConfig):
        smaller = config.drafter.model
        own += smaller.embed, smaller.layers, smaller.logits, type(config.drafter.config)
    return model.embed, model.layers, model.logits, type(config.target), *own


def _function(called: Any) -> Any:
    return called.func if isinstance(called, functools.partial) else called


def _given(called: Any) -> Any:
    """Returns what a function is given beforehand."""
    return (called.args, called.keywords) if isinstance(called, functools.partial) else None


def _not_rewound(config: ModelConfig) -> str | None:
    """Returns the name of a kind of cache that keeps no tokens apart, None where there is none."""
    own = getattr(config, "own_kinds", ())  # of a drafter, whose passes keep no state of each token
    kinds = (
        type(kind).__name__
        for kind in config.cache_kinds
        if not (rewinds(kind) and (kind.has_prefixes or kind not in own))
    )
    return next(kinds, None)


def _classes(tree: Any) -> list[type]:
    """Returns the classes of a tree's nodes, each once; a product runs the code of its weights."""
    found: dict[type, None] = {}
    left = [tree]
    while left:
        node = left.pop()
        children = jax.tree.leaves(node, is_leaf=lambda x, node=node: x is not node)
        if [*map(id, children)] != [id(node)]:  # no leaf
            found[type(node)] = None
            left += children
    return [kind for kind in found if kind.__module__ != "builtins"]
