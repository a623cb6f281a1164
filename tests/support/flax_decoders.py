"""Our decoder as flax users may write it, in nnx and in linen."""

from dataclasses import replace
from functools import cache, partial

from flax import linen, nnx
import jax.numpy as jnp

from jaxrunner.linear import multiply
from jaxrunner.models.from_flax import from_linen, from_nnx, to_nnx_state
from jaxrunner.models.rope import rotation
from jaxrunner.ops.plain import glu, rms_norm, rotate
from jaxrunner.types import Inputs
from tests.support import tiny

# A window for one layer alone: two cache groups, so that a mix-up of layers shows.
CONFIG = replace(tiny.config(), windows=(5, None))
H, K, D, E, F, V = 6, 2, 8, 20, 28, 61
HEADS, EPS, dense = dict(q=H, k=K, v=K), CONFIG.rms_norm_eps, partial(linen.Dense, use_bias=False)


def zeros(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape))


class Product(nnx.Module):
    """A product, of our name."""

    def __init__(self, *shape: int, num_in: int = 1):
        self.weight, self.num_in = zeros(*shape), num_in

    def __call__(self, x):
        return multiply(x, self.weight[...], axes=self.num_in)


class NnxLayer(nnx.Module):
    """A layer of our names, whose queries and keys `attend` turns."""

    def __init__(self):
        self.attn_norm, self.mlp_norm = zeros(E), zeros(E)
        self.qkv, self.o = Product(K, H // K + 2, D, E), Product(E, H, D, num_in=2)
        self.gate_up, self.down = Product(2, F, E), Product(E, F)

    def __call__(self, x, attend):
        qkv = self.qkv(rms_norm(x, self.attn_norm[...], EPS))
        out = attend(qkv[:, :, :-2].reshape(-1, H, D), qkv[:, :, -2], qkv[:, :, -1], rotate=True)
        x = x + self.o(out)
        units = glu(self.gate_up(rms_norm(x, self.mlp_norm[...], EPS)))
        return x + self.down(units)


class NnxDecoder(nnx.Module):
    """Our decoder as a flax user may write it. Has random state too, which serving leaves alone."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.norm, self.head = zeros(V, E), zeros(E), Product(V, E)
        self.layers = nnx.List([NnxLayer() for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, token_ids, positions, attend):
        x = self.embed[...][token_ids]
        for layer in self.layers:
            x = self.dropout(layer(x, attend))
        return rms_norm(x, self.norm[...], EPS)

    def logits(self, hidden):
        return self.head(hidden)


class LinenLayer(linen.Module):
    """A layer of flax's own parts, with rotary positions of its own."""

    @linen.compact
    def __call__(self, x, turn, attend):
        h = linen.RMSNorm(name="attn_norm")(x)
        q, k, v = (dense(n * D, name=name)(h).reshape(-1, n, D) for name, n in HEADS.items())
        out = attend(rotate(q, *turn), rotate(k, *turn), v)
        x = x + dense(E, name="o")(out.reshape(-1, H * D))
        h = linen.RMSNorm(name="mlp_norm")(x)
        units = linen.silu(dense(F, name="gate")(h)) * dense(F, name="up")(h)
        return x + dense(E, name="down")(units)


class LinenDecoder(linen.Module):
    """A decoder of flax's own parts."""

    def setup(self):
        self.embed, self.norm, self.head = linen.Embed(V, E), linen.RMSNorm(), dense(V)
        self.layers = [LinenLayer() for _ in range(2)]

    def __call__(self, token_ids, positions, attend):
        x = self.embed(token_ids)
        turn = rotation(CONFIG.rope, Inputs(token_ids, positions, positions))
        for layer in self.layers:
            x = layer(x, turn, attend)
        return self.norm(x)

    def logits(self, hidden):
        return self.head(hidden)


@cache
def split_nnx():
    """Returns an nnx decoder of tiny's weights, split."""
    decoder = NnxDecoder(nnx.Rngs(0))
    nnx.update(decoder, to_nnx_state(tiny.random_params(CONFIG)))
    return nnx.split(decoder)


def linen_model():
    """Returns a linen decoder of tiny's weights, under flax's names and in flax's layout."""
    ours = tiny.random_params(CONFIG)
    assert ours.head is not None
    named = dict(embed={"embedding": ours.embed}, head={"kernel": ours.head.weight.T})
    named["norm"] = {"scale": ours.norm}
    for i, w in enumerate(ours.layers):
        qkv, gate_up = w.qkv.weight, w.gate_up.weight
        q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
        rows = dict(q=q, k=k, v=v, o=w.o.weight, gate=gate_up[0], up=gate_up[1])
        rows |= dict(down=w.down.weight)
        inputs = dict.fromkeys(rows, E) | dict(o=H * D, down=F)
        layer = {name: {"kernel": rows[name].reshape(-1, inputs[name]).T} for name in rows}
        norms = dict(attn_norm={"scale": w.attn_norm}, mlp_norm={"scale": w.mlp_norm})
        named[f"layers_{i}"] = layer | norms
    return from_linen(LinenDecoder(), {"params": named}, CONFIG), {"params": named}


def nnx_model():
    graphdef, state = split_nnx()
    return from_nnx(graphdef, state, CONFIG), state
