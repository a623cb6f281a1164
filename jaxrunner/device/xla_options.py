"""XLA's options for the programs of steps, by their sizes."""

import jax

from jaxrunner.device.entry_point import Options
from jaxrunner.program.bucket import Bucket, MultiStepBucket
from jaxrunner.program.program import Program

# XLA's default, and loops: the device decides by itself whether another step runs.
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
# From JAX 0.12 on branches and small all-reduces too: for a branch outside of a graph the host
# waits for all work before it, to read which branch to take.
BRANCHES = jax.__version_info__ >= (0, 12)
IN_GRAPHS += ",CONDITIONAL,COLLECTIVES_KERNEL" if BRANCHES else ""
GRAPH = (("xla_gpu_enable_command_buffer", IN_GRAPHS),)
# XLA would combine small all-reduces into one for NCCL, which cannot be in a graph.
GRAPH += (("xla_gpu_all_reduce_combine_threshold_bytes", "0"),) if BRANCHES else ()
# Updating a graph before its launch takes 2 ms of the time to the first token; kernels of a prefill
# are long enough to be launched one by one.
NO_GRAPH = (("xla_gpu_graph_min_graph_size", "1000000"),)
# From so many tokens on cuBLAS is the fastest, so Triton's products are not compiled and timed.
MANY, NO_TRITON = 128, (("xla_gpu_enable_triton_gemm", "False"),)
# XLA would make one product of two that read the same tokens, and copy their weights side by side
# in each step, which takes their memory once more and twice their bytes.
APART = (("xla_gpu_dot_merger_threshold_mb", "0"),)
# The autotuner times products, and does not compare their results, which takes longer.
TIMED = (("xla_gpu_autotune_level", "2"),)
# A graph that is ordered by what its kernels read and write runs side by side what leaves most
# multiprocessors idle: with few tokens first products of adapters beside base products, and small
# kernels of requests and of attention's plan; with some a shared expert beside the choice of
# others, and what states are carried on by. Kernels that count in a buffer (`grid_barrier`) write
# what XLA takes to be only read: those that share one must be ordered by their results, as all
# attention and all MLPs of a step are, but for those of a draft model. Of two that wait for their
# blocks neither may find room for them: a mixture asks for an `mlp` that may run `beside_experts`,
# and models whose MLPs do not wait for attention keep one order, as do kernels that wait for other
# devices.
FEW, SOME = 8, 64
BESIDE = (("xla_gpu_command_buffer_scheduling_mode", "CONCURRENT"),)


def of_step(program: Program, size: Bucket) -> Options:
    """Returns the options for one step."""
    graph = NO_GRAPH if not size.query_len else GRAPH if BRANCHES else ()
    return TIMED + graph + _beside(program, size) + _products(size.num_tokens)


def of_multi_step(program: Program, size: MultiStepBucket) -> Options:
    """Returns the options for several steps in one launch."""
    return TIMED + GRAPH + _beside(program, size.bucket) + _products(size.num_rows)


def _beside(program: Program, size: Bucket) -> Options:
    drafts, wanted = program.model.speculator, getattr(program.config, "concurrent_kernels", None)
    if program.mesh is not None or drafts is not None or not size.query_len or wanted is False:
        return ()
    return BESIDE if size.num_tokens <= (SOME if wanted else FEW) else ()


def _products(num_tokens: int) -> Options:
    return NO_TRITON + APART if num_tokens >= MANY else ()
