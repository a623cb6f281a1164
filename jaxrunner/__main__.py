"""Shows what jaxrunner does: completes Python with the embedded model, several prompts at once.

python -m jaxrunner
python -m jaxrunner "def fib(n):"
python -m jaxrunner --drafts 3
python -m jaxrunner --model path/to/checkpoint "Once upon a time"
"""

import argparse
import json
import platform
import sys
import time
from typing import Any

import jax

import jaxrunner
from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.validation import shown

PROMPTS: tuple[str, ...] = (
    "def fibonacci(n):\n",
    "class Stack:\n",
    "import os\n\ndef walk(",
    "def read_lines(path):\n    with open(",
)
COMMANDS = ("serve", "chat", "complete", "bench", "run-batch", "collect-env", "launch")  # vLLM's
CLEAR = "\r\033[K"  # the terminal's line
NEXT = """\
Next:
  python -m jaxrunner "def fib(n):"      completes your own text
  python -m jaxrunner --model DIR        uses a Hugging Face checkpoint folder
  python -m jaxrunner.bench tiny         measures speed
  README.md                              twenty lines of Python to start from"""


def main() -> None:
    """Reads the command line and streams completions."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrunner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", help="texts to complete; Python ones by default")
    parser.add_argument("--model", help="checkpoint folder or hub name")
    parser.add_argument(
        "--hf-overrides", type=json_object, help="JSON of config.json's keys; null removes one"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--drafts", type=int, metavar="K",
        help="of a step: the embedded model once more, with its EAGLE-3 head; 3 on a GPU, else 0",
    )  # fmt: skip
    args = parser.parse_args()
    if args.drafts and args.model:
        parser.error("--drafts needs the embedded model, which has a head that drafts for it")
    if args.prompts and args.prompts[0] in COMMANDS:
        parser.error(
            f"there is no command {args.prompts[0]!r}, and no server: this completes prompts; "
            "Python has jaxrunner.LLM, and python -m jaxrunner.bench measures"
        )
    device = jax.devices()[0]
    print(f"jaxrunner {jaxrunner.__version__}, Python {platform.python_version()}")
    print(f"JAX {jax.__version__} on {len(jax.devices())} x {device.device_kind}")
    print(f"model {args.model or 'tiny-pystdlib-7m, embedded'}")
    prompts: list[str] = args.prompts or list(PROMPTS)
    start = time.perf_counter()
    # Few sizes, few programs to wait for.
    rows, tokens = min(len(prompts), 64), 64 if args.model is None else 512
    sizes: dict[str, Any] = dict(max_num_seqs=rows, decode_buckets=(rows,), token_buckets=(tokens,))
    model = args.model or str(embedded.PATH)
    sizes |= dict(max_num_batched_tokens=tokens, hf_overrides=args.hf_overrides)
    with LLM(model, **sizes) as llm:
        print(f"ready after {time.perf_counter() - start:.1f} s\n")
        params = SamplingParams(
            temperature=args.temperature, top_p=0.95, max_tokens=args.max_tokens, seed=args.seed
        )
        print(speed(*stream(llm, prompts, params)))
    usual = 3 if device.platform == "gpu" and not args.model else 0
    if num_drafts := usual if args.drafts is None else args.drafts:
        print(speed(*draft(model, sizes, prompts, params, num_drafts)))
    print(f"\n{NEXT}")


def speed(num_tokens: int, seconds: float, with_what: str = "") -> str:
    """Returns a line of figures."""
    return f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s{with_what}"


def draft(
    model: str, sizes: dict[str, Any], prompts: list[str], params: SamplingParams, num_drafts: int
) -> tuple[int, float, str]:
    """Writes the same with drafts of the embedded head. Returns tokens, seconds, and a remark."""
    head = dict(method="eagle3", model=str(embedded.EAGLE3_PATH), num_speculative_tokens=num_drafts)
    with LLM(model, speculative_config=head, **sizes) as llm:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    lengths = [x.metrics.mean_acceptance_length or 1 for x in outputs if x.metrics]
    remark = f" with {num_drafts} drafts a step, {sum(lengths) / len(lengths):.1f} tokens of each"
    return sum(len(x.outputs[0].token_ids) for x in outputs), seconds, remark


def json_object(text: str) -> dict[str, Any]:
    """Reads an argument.

    Raises:
      argparse.ArgumentTypeError: it is no JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object in braces, got {shown(value)}")
    return value


def stream(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[int, float]:
    """Prints one completion as it grows, or several as they end. Returns tokens and seconds."""
    start, num_tokens, texts = time.perf_counter(), 0, dict[str, str]()
    for output in llm.stream(prompts, params):
        completion, first = output.outputs[0], output.request_id not in texts
        num_tokens += len(completion.token_ids)
        new = (output.prompt or "") * first + completion.text
        text = texts[output.request_id] = texts.get(output.request_id, "") + new
        end = f"--- {output.error or completion.finish_reason} {'-' * 60}"
        if len(prompts) == 1:
            print(new, end=f"\n{end}\n" if output.finished else "", flush=True)
        elif output.finished:
            print(f"{CLEAR * sys.stdout.isatty()}{text}\n{end}", flush=True)
        elif sys.stdout.isatty():
            tail = text.rsplit("\n", 1)[-1][-60:]
            print(f"{CLEAR}{num_tokens:5d} tokens  {tail}", end="", flush=True)
    return num_tokens, time.perf_counter() - start


if __name__ == "__main__":
    main()
