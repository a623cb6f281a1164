"""What holds for every test: strict JAX, eight fake devices, no network."""

import ctypes
import gc
from importlib.metadata import version
from importlib.util import find_spec
import ipaddress
import json
import os
from pathlib import Path
import re
import shutil
import socket

# Read at import by huggingface_hub and transformers, so before anything that imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# More threads of PyTorch than idle cores spin: ten times the CPU time for small models.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Most of the time is XLA's, and programs that run once or twice need no good code. Before JAX.
if not Path("/dev/nvidiactl").exists():
    quick = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if version("jax") < "0.11":
        quick += " --xla_cpu_use_fusion_emitters=false"  # unknown to others
    os.environ.setdefault("XLA_FLAGS", quick)

import jax
import pytest
from safetensors.flax import load_file, save_file

from jaxrunner import embedded
from jaxrunner.device import lowering
from jaxrunner.device.parts import cutting
from tests.support import executables

# Splits the CPU alone: on a machine with a GPU the tests see its devices as they are.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Where each operation stands in Python: a twentieth of lowering, and nothing reads it here.
jax.config.update("jax_traceback_in_locations_limit", 0)
# What XLA gives back between two programs stays with the process, which asks for it again.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
if hasattr(libc := ctypes.CDLL(None), "mallopt"):
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    libc.mallopt(M_TOP_PAD, 1 << 26)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)

# Equal layers are compiled once, and sampling once for programs of as many requests.
cutting.LEAST_CALLS, cutting.MOST_REST = 2, 20

# `jaxrunner.lm_eval` cannot be imported without lm-eval, so neither can its tests.
collect_ignore_glob = [] if find_spec("lm_eval") else ["test_lm_eval*.py"]

try:
    import hypothesis
except ImportError:
    pass  # the tests that use it skip themselves
else:
    # The first example compiles, and a loaded machine is no bug: no deadline.
    hypothesis.settings.register_profile("jaxrunner", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("jaxrunner")


def pytest_addoption(parser, pluginmanager):
    parser.addoption("--drive-steps", type=int, default=0, help="least steps of a random driver")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; without pytest-timeout, no limit")


@pytest.fixture
def drive_steps(request):
    """Returns the steps that each random driver is to make, 0 where its own number will do."""
    return request.config.getoption("--drive-steps")


def pytest_configure(config):
    # A program that two tests compile is compiled once, in the processes that they start too.
    if hasattr(config, "cache"):
        settings = dict(
            jax_compilation_cache_dir=str(config.cache.mkdir("jax")),
            jax_persistent_cache_min_compile_time_secs=0,
            jax_persistent_cache_min_entry_size_bytes=-1,
        )
        for name, value in settings.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)


@pytest.fixture(autouse=True, scope="module")
def few_executables():
    """Forgets executables where they are too many; until then modules share what they lower."""
    yield
    if executables.are_many():
        executables.forget()


def pytest_collection_finish():
    # Modules live until the end: a twentieth of the time went to looking through them for garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, and JAX runs on {jax.default_backend()} here")
    for mark in item.iter_markers("devices"):
        (needed,) = mark.args
        if isinstance(needed, str):
            needed = item.callspec.params[needed]
        if needed > len(jax.devices()):
            pytest.skip(f"needs {needed} devices, there are {len(jax.devices())}")


@pytest.fixture
def whole(monkeypatch):
    """Leaves programs whole, as a GPU runs them."""
    monkeypatch.setattr(cutting, "LEAST_CALLS", 12)
    lowering._lower.cache_clear()
    yield
    lowering._lower.cache_clear()


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """Returns the folder of a model of three of the embedded one's eight layers.

    For tests of how an engine answers, not of what a trained model says.
    """
    folder = tmp_path_factory.mktemp("shallow")
    shutil.copytree(embedded.PATH, folder, dirs_exist_ok=True, ignore=lambda *_: ["eagle3"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    arrays = load_file(folder / "model.safetensors")
    for new, old in enumerate((0, 3, 7)):
        for name in [name for name in arrays if f".layers.{old}." in name]:
            arrays[name.replace(f".{old}.", f".{new}.", 1)] = arrays[name]
    kept = {name: x for name, x in arrays.items() if not re.search(r"layers\.[3-7]", name)}
    save_file(kept, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fails a test that looks up or connects to another machine, even where it caught the error."""
    refused = []

    def refuse_others(function, host_of):
        def guarded(*args, **kwargs):
            host = host_of(*args, **kwargs)
            if not is_local(host):
                refused.append(host)
                raise ConnectionRefusedError(f"tests may not reach {host!r}")
            return function(*args, **kwargs)

        return guarded

    def address_host(sock, address):
        return address[0] if isinstance(address, tuple) else None  # a path names no machine

    for name in ("connect", "connect_ex"):
        real = getattr(socket.socket, name)
        monkeypatch.setattr(socket.socket, name, refuse_others(real, address_host))
    lookup = refuse_others(socket.getaddrinfo, lambda host, *args, **kwargs: host)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield
    assert not refused, f"the test reached for {refused}: use a stub on 127.0.0.1"


def is_local(host):
    """Returns whether `host`, a name or an address, is this machine; None is."""
    name = host.decode() if isinstance(host, bytes) else host
    try:
        return name in (None, "", "localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
