"""Compiles kernels and a step for an H200 where there is none; run by test_aot in its own process.

python tests/support/aot.py FOLDER   # prints what the compiler says, and one line of JSON
"""

import json
from pathlib import Path
import re
import sys
from typing import Any

import jax
from jax.experimental import topologies

from jaxrunner import pytree
from jaxrunner.bench.presets import PRESETS
from jaxrunner.device.program_spec import program_spec
from jaxrunner.hf_config import Settings
from jaxrunner.kernels_pallas.cases.catalog import TESTS
from jaxrunner.kernels_pallas.cases.fp8_case import fp8_products, fp8_units
from jaxrunner.kernels_pallas.cases.quantized_case import fitted_tiles
from jaxrunner.kernels_pallas.sampling.sampler import sample_tokens
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.programs.program_table import Key
from jaxrunner.sampling import RULES
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.eagle import eagle
from jaxrunner.speculators.eagle import read as read_eagle
from tests.support import tiny

DEVICE = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 pcie_bandwidth: 34359738368
  ecc_enabled: true name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.28.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
device_description_str: "NVIDIA H200"
"""
KERNELS = (
    "decode_attention", "prefill_attention", "add_rms_norm", "rope_write", "matmul", "glu",
    "gated_mlp", "grouped_mlp", "quantized_grouped", "quantized_matmul",
    "quantized_mlp", "fp8_blocks", "fp8_gates", "add_norm_fp8", "fp8_pairs", "add_norm_pairs",
    "fp8_blocks_of_pairs", "fp8_gates_of_pairs", "add_norm_bands",
    "latent_decode", "sample_tokens",
    "lora_shrink", "lora_expand", "lora_units", "prefill_units", "add_norm_adapted",
    "state_step", "state_chunks",
)  # fmt: skip
# Whose tiles have more of what registers hold than those of the first cases.
LARGE = (
    fp8_units(8192, 4096, 14336),
    fp8_products(8192, 4096, 6144),
    *(fitted_tiles(64, 4096, 28672, "int4", 1, activation="silu", words=words)
      for words in (False, True)),
)  # fmt: skip
MODEL = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=512, intermediate_size=1024,
    num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    vocab_size=4096, max_position_embeddings=4096, hidden_act="silu", attention_bias=False,
    tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip
ENGINE: dict[str, Any] = dict(
    dtype="bfloat16", kv_dtype="bfloat16", block_size=64, num_blocks=333, max_model_len=4096,
    max_num_batched_tokens=2048,
)  # fmt: skip

# Mamba-2 in all layers but the last, and no experts.
HYBRID = PRESETS["granite4_h_tiny"].config | dict(num_local_experts=0, vocab_size=4096)
PREFILL, PROMPTS = (Key("step", Bucket(tokens, 16)) for tokens in (128, 2048))


def placed(tree):
    """Puts abstract arrays on the device that is not there."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=DEVICE, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def hybrid(num_mixers: int) -> dict[str, Any]:
    """Returns the config of a hybrid with so many mixers."""
    kinds = [*["mamba"] * num_mixers, "attention"]
    return HYBRID | dict(num_hidden_layers=len(kinds), layer_types=kinds)


def compile_program(program: Program, params: Any, key: Key, place: Any = placed) -> Any:
    """Returns a compiled program, and the abstract arguments of its function.

    place: gives these their devices.
    """
    spec = program_spec(program, params, key)
    static = dict(spec.static)
    jitted = jax.jit(spec.function, static_argnames=list(static), donate_argnames=spec.donated)
    return jitted.lower(*place(spec.args), **static).compile(dict(spec.options)), spec.args


def compile_step(
    key: Key, num_drafts: int = 0, model_config: dict[str, Any] = MODEL
) -> tuple[Any, int, str]:
    """Returns a compiled program, the bytes of its KV cache and how HLO writes that shape.

    num_drafts: of an EAGLE head; 0 for none.
    """
    model, config = read_model(Settings(model_config))
    if num_drafts:
        llama = MODEL | dict(architectures=["LlamaForCausalLM"], num_hidden_layers=1)
        head = read_eagle(Settings(llama), config, frozenset())
        model, config = with_drafter(model, config, eagle, head, num_drafts)
    engine = tiny.engine_config(**ENGINE, max_num_seqs=16, num_decode_steps=4)
    program = Program(
        model, config, engine, backends.fused, RULES, num_drafts, sample=sample_tokens
    )
    params = jax.eval_shape(lambda: pytree.zeros(model.params, program.dims))
    compiled, args = compile_program(program, params, key)
    kv = jax.tree.leaves(args[1].kv)
    shape = ",".join(map(str, kv[0].shape))
    return compiled, sum(x.size * x.dtype.itemsize for x in kv), f"bf16[{shape}]"


def kernels_of_conditions(text: str) -> list[int]:
    """Returns how many kernels the condition of each loop of HLO has."""
    names = re.findall(r" while\(.*?condition=(%[\w.\-]+)", text)
    bodies = [text[text.index(f"\n{name} (") :].split("\n}")[0] for name in names]
    return [body.count(" fusion(") for body in bodies]


def main(folder: Path) -> None:
    """Compiles a case of each kernel, then steps; `folder` gets XLA's dumps."""
    firsts = [next(case for case in TESTS if case.kernel == kernel) for kernel in KERNELS]
    several = next(case for case in TESTS if case.options.get("query_len") == 4)
    for case in (*firsts, several, *LARGE):
        jax.jit(case.run).lower(*placed(jax.eval_shape(lambda c=case: c.make(0)))).compile()
    found = []
    for key, num_drafts in (
        (Key("step", Bucket(8, 8, 1)), 0),
        (Key("step", Bucket(1, 1, 1, short=True)), 0),
        (PREFILL, 0),
        (Key("multi_step", MultiStepBucket(4, SampleSize(8))), 0),
        (Key("step", Bucket(32, 8, 4, 3)), 3),
        (Key("multi_step", MultiStepBucket(4, SampleSize(8, num_drafts=3))), 3),
    ):
        compiled, kv_bytes, shape = compile_step(key, num_drafts)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        dumps = sorted(folder.glob("*thunk_sequence*"), key=lambda path: path.stat().st_mtime)
        found.append(
            dict(
                aliased=memory.alias_size_in_bytes, kv_bytes=kv_bytes,
                copies=len(re.findall(re.escape(shape) + r"\S* copy\(", text)),
                loops=text.count(" while("), wanted_loops=int(key.name == "multi_step"),
                conditions=kernels_of_conditions(text),
                graphs=dumps[-1].read_text().count("kCommandBuffer") if dumps else None,
                wanted_graphs=int(key != PREFILL),
            )
        )  # fmt: skip
    prompts = (compile_step(PROMPTS, model_config=hybrid(num))[0] for num in (2, 6))
    temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in prompts]
    print(json.dumps(dict(steps=found, temporaries=temporaries)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
