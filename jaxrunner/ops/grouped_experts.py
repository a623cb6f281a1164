"""The kernels of a mixture of experts: they choose experts, and run their MLPs."""

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.mixtures import group_tokens, grouped_mlp, router, router_scores
from jaxrunner.kernels_pallas.mixtures.grouped_mlp import POWERS, TILES, TuningConfig
from jaxrunner.kernels_pallas.quantized import quantized_grouped
from jaxrunner.kernels_pallas.quantized.quantized_grouped import Few
from jaxrunner.mixtures.experts import Experts, ExpertWeights, Routes
from jaxrunner.operation import Operation
from jaxrunner.ops.routing import Router, RouterConfig
from jaxrunner.quantization.quantized_experts import QuantizedExperts
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

# Tiles hold twice the tokens of an expert that has its share: few have more, and what a tile has
# too much is read along. Larger ones are for prefills, where two warpgroups compute; a quarter more
# than the share is enough then, as what is read along has become as much as weights are.
LARGE, CONSUMERS, SPARE = TILES[-1], 2, 1.25
SMALL = 32  # rows of tiles that four warpgroups have registers for, where they widen weights


def _route(config: RouterConfig, w: Router, logits: Array, real: Array) -> Routes:
    renormalise = config.norm_topk_prob or config.scoring == "softmax_of_chosen"
    return Routes(
        *router.route(
            logits, real, top_k=config.num_experts_per_tok, renormalise=renormalise,
            scale=config.routed_scaling_factor,
        )
    )  # fmt: skip


def _refuses_route(config: RouterConfig, w: Router, logits: Array, real: Array) -> str | None:
    if config.scoring not in ("softmax", "softmax_of_chosen"):
        return f"wants scoring by softmax, got {config.scoring}"
    if w.replayed is not None:
        return "chooses experts, and does not replay them"
    if w.choice_bias is not None or config.n_group > 1:
        return "wants experts chosen by their logits alone, without bias or groups"
    return router.refuses(logits, config.num_experts_per_tok)


def _by_scores(config: RouterConfig, w: Router, logits: Array, real: Array) -> Routes:
    return Routes(*router_scores.route(logits, real, w.choice_bias, _how(config)))


def _refuses_by_scores(config: RouterConfig, w: Router, logits: Array, real: Array) -> str | None:
    if w.replayed is not None:
        return "chooses experts, and does not replay them"
    return router_scores.refuses(logits, _how(config))


def _how(c: RouterConfig) -> router_scores.How:
    return router_scores.How(
        c.num_experts_per_tok, c.scoring, c.norm_topk_prob, c.n_group, c.topk_group,
        c.ranking_experts, c.routed_scaling_factor,
    )  # fmt: skip


def _experts(x: Array, routes: Routes, w: Experts) -> Array:
    (T, k), (tile, config) = routes.experts.shape, _sizes(x, routes, w)
    if T == 1:
        groups = group_tokens.of_one(x, *routes)
    else:
        groups = group_tokens.group_tokens(x, *routes, w.num_experts, tile=tile)
    biases = w.gate_up_bias, w.down_bias
    both = None if biases[0] is None or biases[1] is None else (biases[0], biases[1])
    return grouped_mlp.grouped_mlp(
        groups, w.gate_up, w.down, (T, k), both, activation=w.activation, config=config
    )


def _refuses_experts(x: Array, routes: Routes, w: ExpertWeights) -> str | None:
    if not isinstance(w, Experts):
        return f"wants weights that are Experts, got {type(w).__name__}"
    if (w.gate_up_bias is None) != (w.down_bias is None):
        return "wants a bias of both products, or of none"
    if reason := group_tokens.refuses(x, routes.experts, w.num_experts):
        return reason
    return grouped_mlp.refuses(x, w.gate_up, w.down, *_sizes(x, routes, w), w.activation)


def _few_bits(x: Array, routes: Routes, w: QuantizedExperts) -> Array:
    (gate_up, down), (T, k) = _products(w), routes.experts.shape
    tile = _tile(routes, w)
    config = quantized_grouped.TuningConfig(
        turns=2 if tile <= SMALL else 1, dtype=str(x.dtype) if tile == LARGE else "float32"
    )
    numbers, scale = gate_up.inputs(x)
    groups = group_tokens.group_tokens(numbers, *routes, w.num_experts, tile=tile)
    if scale is not None:  # of tokens, as routes have them; rows of no token have anything
        scale = scale[jnp.clip(groups.route // k, 0, T - 1), 0]
    made = quantized_grouped.units(
        groups, _matrices(gate_up, w.gate_up_bias), w.num_experts, scale,
        code=gate_up.scheme.code, activation=w.activation, config=config,
    )  # fmt: skip
    numbers, scale = down.inputs(made)
    return quantized_grouped.outputs(
        groups._replace(x=numbers), _matrices(down, w.down_bias), w.num_experts, (T, k),
        None if scale is None else scale[:, 0], code=down.scheme.code, config=config,
    )  # fmt: skip


def _refuses_few_bits(x: Array, routes: Routes, w: ExpertWeights) -> str | None:
    if not isinstance(w, QuantizedExperts):
        return f"wants weights that are QuantizedExperts, got {type(w).__name__}"
    products, biases = (w.gate_up, w.down), (w.gate_up_bias, w.down_bias)
    for product in products:
        if not isinstance(product, QuantizedLinear):
            return "wants both products of few bits"
        if product.permutation is not None:
            return "wants groups that are runs of inputs"
        if product.input_scale is not None:
            return "wants inputs that are rounded by token, not by an expert's scale"
    if reason := group_tokens.refuses(x, routes.experts, w.num_experts):
        return reason
    tile, rows = _tile(routes, w), jax.ShapeDtypeStruct((1, w.down.num_inputs), x.dtype)
    for inputs, product, bias, activation in zip(
        (x, rows), products, biases, (w.activation, None), strict=True
    ):
        assert isinstance(product, QuantizedLinear)
        shapes = jax.eval_shape(_matrices, product, bias)
        code = product.scheme.code
        if reason := quantized_grouped.refuses(
            inputs, shapes, w.num_experts, code, tile, activation
        ):
            return reason
    return None


def _products(w: QuantizedExperts) -> tuple[QuantizedLinear, QuantizedLinear]:
    assert isinstance(w.gate_up, QuantizedLinear) and isinstance(w.down, QuantizedLinear)
    return w.gate_up, w.down


def _matrices(w: QuantizedLinear, bias: Array | None) -> Few:
    """Returns the weights of all experts as matrices."""
    weight, scale, *zero = w.matrices()
    column = None if bias is None else bias.reshape(-1, 1)
    return Few(weight, scale, zero[0] if zero else None, column)


def _sizes(x: Array, routes: Routes, w: Experts) -> tuple[int, TuningConfig]:
    """Returns the rows of a tile, and what else the kernel takes."""
    tile = _tile(routes, w)
    if tile < LARGE:
        return tile, TuningConfig()
    spare = SPARE * routes.experts.size / w.num_experts
    tile = next((rows for rows in TILES if rows >= spare), LARGE)
    # Of many tokens, what each expert gives is as many bytes as the step has to spare.
    large = TuningConfig(consumers=CONSUMERS, dtype=str(x.dtype))
    if grouped_mlp.refuses(x, w.gate_up, w.down, tile, large) is None:
        return tile, large
    return tile, TuningConfig()


def _tile(routes: Routes, w: ExpertWeights) -> int:
    """Returns the rows of a tile."""
    share = 2 * routes.experts.size / w.num_experts
    return next((rows for rows in POWERS if rows >= share), LARGE)


# (config, router, logits [T, X], real [T]) -> Routes
BY_LOGITS = Operation("route", _route, _refuses_route)
BY_SCORES = Operation("route by scores", _by_scores, _refuses_by_scores)
ROUTE = BY_LOGITS, BY_SCORES
# (x [T, E], routes, w) -> parts whose sum is what the experts add, [k, T, E]
OF_FLOATS = Operation("grouped_mlp", _experts, _refuses_experts)
OF_FEW_BITS = Operation("quantized_grouped", _few_bits, _refuses_few_bits)
GROUPED = OF_FLOATS, OF_FEW_BITS
