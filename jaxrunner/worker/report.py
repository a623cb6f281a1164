"""The report of a runner: devices, what runs and why, drafts, adapters, programs."""

from collections.abc import Sequence

from jaxrunner.lora.device_adapters import DeviceAdapters
from jaxrunner.parallel.custom_all_reduce import report as report_sums
from jaxrunner.parallel.requirements import report as report_devices
from jaxrunner.program.program import Program
from jaxrunner.quantization.quantized_config import describe as describe_weights
from jaxrunner.runner.model_runner import ModelRunner


def describe_runner(
    runner: ModelRunner, num_steps: int, drafts: Sequence[int], replicas: str = "",
    balances: str = "",
) -> str:  # fmt: skip
    """Returns a line for each.

    num_steps: of a launch that decodes. drafts: steps that verified some, of requests that have
        ended, and how many accepted each. replicas: lines that follow the devices.
    balances: lines on experts.
    """
    n = num_steps
    alone = "; 1 while a request has a grammar or wants the logprobs of all tokens" * (n > 1)
    return (
        f"{report_devices(runner.program.mesh)}\n{replicas}"
        f"{report_sums(runner.program, runner.choice.name)}"
        f"{describe_weights(runner.program.config)}"
        f"layers and sampling: {runner.choice.name}, because {runner.choice.reason}"
        "; operations() lists them\n"
        f"decode steps of a launch: {n}{alone}\n{balances}"
        f"{_drafts(runner.program, drafts)}{_adapters(runner.adapters)}"
        f"programs: {runner.programs.report()}\n"
    )


def _drafts(program: Program, counts: Sequence[int]) -> str:
    """Returns a line about accepted drafts of ended requests; "" without drafts."""
    if (speculator := program.model.speculator) is None:
        return ""
    num, _, *accepted = counts or (0, 0)
    said = "none verified yet"
    if num:
        by_position = " ".join(f"{count / num:.2f}" for count in accepted)
        length = 1 + sum(accepted) / num
        said = f"{length:.2f} tokens a step, accepted by position: {by_position}"
    num = f"0 or {speculator.num_drafts}" if speculator.adaptive else speculator.num_drafts
    return f"drafts: {num} by {speculator.name}, {said}\n"


def _adapters(adapters: DeviceAdapters | None) -> str:
    """Returns a line of the adapters there are; none where an engine has none."""
    if adapters is None:
        return ""
    here = [adapters.known[i].name for i in adapters.places if i]
    return (
        f"adapters: {len(adapters.known)}, of these on the device {len(here)} of at most "
        f"{len(adapters.places)}: {', '.join(here) or 'none'}\n"
    )
