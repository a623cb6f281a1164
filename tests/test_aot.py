"""What the compiler says of kernels and steps, where the CUDA plugin is there; needs no GPU."""

import re

import pytest

from jaxrunner.device import xla_options
from tests.support.lowering import compiled_by, compiles


@pytest.mark.slow
@compiles
def test_decode_steps_are_one_graph_in_place_and_nothing_spills(tmp_path):
    told = dict(XLA_FLAGS=f"--xla_dump_to={tmp_path}", MOSAIC_GPU_DUMP_PTXAS="1")
    found, said = compiled_by("aot.py", str(tmp_path), **told)
    pattern = r"properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores"
    spills = [(name, int(size)) for name, size in re.findall(pattern, said)]
    assert len(spills) > 10
    # `state_chunks` holds a matrix, what it gains and what is read of it: more than registers.
    # `fp8_gates` holds two sums, and without a cluster one number more than registers.
    limits = dict(state_chunks=204, fp8_gates=4)
    # libnvJitLink, which JAX 0.12 prefers to ptxas, leaves each warpgroup as many registers.
    if "'setmaxnreg' ignored" in said:
        limits = dict(state_chunks=636, latent_decode=2264)
        limits |= dict(fp8_gates=76, fp8_gates_of_pairs=16)
    assert all(size <= limits.get(name, 0) for name, size in spills), spills
    few, many = found["temporaries"]  # of 2 mixers and of 6: nothing is held of all at once
    assert many - few < 2048 * 3072 * 4  # bytes of what a mixer makes
    for step in found["steps"]:
        assert step["aliased"] >= step["kv_bytes"]  # the cache is written in place
        assert (step["copies"], step["loops"]) == (0, step["wanted_loops"])
        # A graph reads a condition that has no kernel of its own beside the step that finds it.
        assert len(step["conditions"]) == step["loops"] and all(step["conditions"])
        assert step["graphs"] == step["wanted_graphs"]  # none for a prefill


@pytest.mark.slow
@compiles
@pytest.mark.skipif(not xla_options.BRANCHES, reason="JAX before 0.12 leaves all sums to NCCL")
@pytest.mark.parametrize(
    ("num_devices", "num_rows", "num_steps", "sums", "num_graphs"),
    [
        (2, 1, 1, "peers", 1),
        (4, 8, 4, "peers", 1),
        (2, 8, 1, "psum", 1),
        (2, 64, 1, "peers", 2),
        (4, 256, 1, "psum", 2),
    ],
)
def test_steps_on_several_gpus_are_a_graph_or_two_around_an_exchange(
    num_devices, num_rows, num_steps, sums, num_graphs, tmp_path
):
    """All sums over devices are kernels in graphs; an all-to-all of many logits is not."""
    args = str(num_devices), str(num_rows), str(num_steps), sums, str(tmp_path)
    found, _ = compiled_by("aot_tensor.py", *args, XLA_FLAGS=f"--xla_dump_to={tmp_path}")
    launched = [kind for kind in found["launched"] if not kind.startswith("Async")]
    assert launched[0] == launched[-1] == "CommandBuffer"
    assert len(launched) == 2 * num_graphs - 1
    # XLA's own: of embeddings, of layers, of few logits, of what was sampled.
    of_layers = 2 * 3 if sums == "psum" else 0
    assert found["sums"] == 1 + of_layers + (2 - num_graphs) + 1
