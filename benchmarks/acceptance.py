"""Tokens that a step gives with drafts, by method, verification and temperature.

The embedded model goes on from the beginnings of 32 of this package's own files, which neither it
nor its EAGLE-3 head has read, and where drafts are looked up, does so again: the second time the
same is asked and answered. Prints a table of the methods that are named, or of all.

python benchmarks/acceptance.py [ngram suffix ...]
"""

from pathlib import Path
import sys
from typing import Any

from jaxrunner import LLM, SamplingParams, embedded, llm

TEMPERATURES = (0.0, 0.7, 1.0)
EAGLE3 = dict(method="eagle3", model=str(embedded.EAGLE3_PATH))
VERIFIED = {
    f'`"eagle3"`, `"{name}"`': EAGLE3 | dict(rejection_sample_method=name)
    for name in ("exact", "standard", "block")
}
GREEDY = {
    f'{name}, `"greedy"` drafts': config | dict(draft_sample_method="greedy")
    for name, config in VERIFIED.items()
}
KINDS: dict[str, dict[str, Any]] = {
    **VERIFIED,
    **GREEDY,
    '`"ngram"`, 2 to 4 tokens, `"exact"`': dict(
        method="ngram", prompt_lookup_min=2, prompt_lookup_max=4
    ),
    '`"suffix"`, `"exact"`': dict(method="suffix"),
}
LOOKED_UP = "ngram", "suffix"
SIZES: dict[str, Any] = dict(
    max_num_seqs=8, max_num_batched_tokens=128, token_buckets=(128,), decode_buckets=(8,),
    max_model_len=256, dtype="float32", warm_up=False, use_tqdm=False, generation_config="vllm",
)  # fmt: skip
NUM_DRAFTS, NUM_PROMPTS, PROMPT_LEN, NUM_TOKENS = 3, 32, 100, 80


def texts() -> list[str]:
    """Returns the beginnings of as many files of the package."""
    files = sorted(Path(llm.__file__).parent.glob("*/*.py"))
    long = [text for file in files if len(text := file.read_text(encoding="utf-8")) > 1000]
    return long[:: len(long) // NUM_PROMPTS][:NUM_PROMPTS]


def tokens_per_step(llm: LLM, temperature: float) -> float:
    """Returns the tokens of a step that verified drafts, the model's own included."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(text)[:PROMPT_LEN] for text in texts()]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    accepted = sum(sum(m.num_accepted_tokens_per_pos) for m in metrics)
    return 1 + accepted / sum(m.num_drafts for m in metrics)


def main() -> None:
    """Prints a row for each kind of drafts, and one of the same prompts again."""
    print("| method, verification |", *(f"temperature {t} |" for t in TEMPERATURES))
    print("|---" * (1 + len(TEMPERATURES)) + "|")
    for name, config in KINDS.items():
        if len(sys.argv) > 1 and config["method"] not in sys.argv:
            continue
        drafts = config | dict(num_speculative_tokens=NUM_DRAFTS)
        times = 1 + (config["method"] in LOOKED_UP)
        rows: list[list[float]] = [[] for _ in range(times)]
        for temperature in TEMPERATURES:  # each begins without outputs to look up
            with LLM(str(embedded.PATH), speculative_config=drafts, **SIZES) as llm:
                for row in rows:
                    row.append(tokens_per_step(llm, temperature))
        for label, row in zip((name, "…, the same prompts again"), rows, strict=False):
            print(f"| {label} |", *(f"{x:.2f} |" for x in row), flush=True)


if __name__ == "__main__":
    main()
