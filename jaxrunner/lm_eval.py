"""jaxrunner as a model of lm-eval, EleutherAI's evaluation harness. `pip install jaxrunner[eval]`

    lm_eval.simple_evaluate(model=JaxRunnerLM(llm), tasks=["arc_easy"])

or, with one more model than the command `lm-eval` has,

    python -m jaxrunner.lm_eval run --model jaxrunner \\
        --model_args pretrained=DIR,dtype=float32 --tasks arc_easy

It gives the numbers of lm-eval's Hugging Face backend at batch size 1: tests/test_lm_eval.py.
"""

from collections.abc import Sequence
import functools
import hashlib
import importlib
import logging
from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.llm import LLM

try:
    # Registers lm-eval's own models, which it leaves out where there is one already.
    importlib.import_module("lm_eval.models")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ImportError(
        f"jaxrunner.lm_eval needs lm-eval ({error}): pip install 'jaxrunner[eval]'"
    ) from error

logger = logging.getLogger(__name__)

ROOM = 2  # of `max_model_len` beyond `max_length`: the last token scored, and one sampled after it
MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
KNOWN = (*MAX_TOKENS, "until", "do_sample", *SAMPLING)


class JaxRunnerLM(TemplateLM):
    """Scores and generates with an `LLM`, all requests of a kind in one batch.

    model: an `LLM`, or a folder or hub name to build one from; `pretrained` is lm-eval's name.
    max_length: tokens the model sees at once. A sequence that is scored may have one more, its
        last, and the engine wants room for another behind it: `max_length` is at most, and by
        default, `max_model_len - 2`. With a folder or name, it sets `max_model_len`.
    max_gen_toks: tokens to generate where a task does not say.
    add_bos_token: whether a text's one special token is BOS, or it has none; None leaves special
        tokens to the tokenizer.
    prefix_token_id: what an empty context is, and what comes before a text whose every token is
        scored; None takes BOS, or EOS of a tokenizer that has no BOS.
    chat_template, chat_template_args: in place of the checkpoint's template, and its variables.
    batch_size, max_batch_size, device: lm-eval's command line passes them; the engine makes its
        own batches, on JAX's default device.
    The others go to `LLM`.

    Raises:
      ValueError: `max_length` is too long; see also `LLM`.
      TypeError: there is no model, or two, or arguments to build an `LLM` that is there.
    """

    def __init__(
        self,
        model: str | LLM | None = None,
        *,
        pretrained: str | LLM | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **llm_args: Any,
    ):
        super().__init__()
        if (model is None) == (pretrained is None):
            raise TypeError("jaxrunner needs one model: give pretrained=DIR, or an LLM")
        self.llm = _llm(pretrained if model is None else model, max_length, llm_args)
        room = self.llm.engine.config.max_model_len - ROOM
        self.max_length = room if max_length is None else max_length
        if not 1 <= self.max_length <= room:
            raise ValueError(
                f"max_length={self.max_length} must be at least 1 and at most {room}, {ROOM} less "
                "than the LLM's max_model_len: change one of them"
            )
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token
        self.tokenizer = self.llm.get_tokenizer()
        self._prefix_token_id = prefix_token_id
        self._template = chat_template or self.llm._chat_template or self.tokenizer.chat_template
        self._template_args = chat_template_args or {}

    @property
    def eot_token_id(self) -> int:
        """The id of EOS; raises ValueError where the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has neither BOS nor EOS: pass prefix_token_id")
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id before an empty context: as given, else BOS, else EOS."""
        for token_id in (self._prefix_token_id, self.tokenizer.bos_token_id):
            if token_id is not None:
                return token_id
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """A fingerprint: lm-eval keys its cache of requests by it."""
        return f"jaxrunner-{hashlib.sha256(self.tokenizer.inner.to_str().encode()).hexdigest()}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the ids of a text; one that begins with BOS gets no second."""
        encode, bos = self.tokenizer.encode, self.tokenizer.bos_token_id
        if special := add_special_tokens is not False:
            prefix = self.tokenizer.token_text(self.prefix_token_id)
            special = add_special_tokens or not string.startswith(prefix)
        if self.add_bos_token is None:
            return encode(string, add_special_tokens=special)
        first = [bos] if special and self.add_bos_token and bos is not None else []
        return first + encode(string, add_special_tokens=False)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the logprob of each text: its windows are full, each token is scored once."""
        windows: list[Any] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            new = [(None, *make_disjoint_window(window)) for window in found]
            windows += new
            owners += [i] * len(new)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for i, (logprob, _) in zip(owners, scores, strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs, num_cut = [], 0
        for text, context, rest in requests:
            if not 1 <= len(rest) <= self.max_length:
                raise ValueError(
                    f"the continuation of {text!r:.80} has {len(rest)} tokens, it must have at "
                    f"least 1 and at most max_length={self.max_length}"
                )
            room = self.max_length + 1 - len(rest)
            # Without a BOS, a context of spaces is empty: they went to the continuation.
            pairs.append((context[-room:] or [self.prefix_token_id], rest))
            num_cut += len(context) > room
        self._warn(num_cut)
        scores = self.llm.loglikelihood(pairs, use_tqdm=not disable_tqdm)
        answers = list(zip(scores.logprob.tolist(), scores.is_greedy.tolist(), strict=True))
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:  # None is a window of a longer text
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns what follows each context, up to a stop string.

        An empty context is what the tokenizer makes of it, or the prefix token if that is nothing.

        Raises:
          ValueError: a generation argument that there is not, or no room for a context.
        """
        prompts, params, num_cut = [], [], 0
        for context, kwargs in (request.arguments for request in requests):
            params.append(self._sampling_params(kwargs))
            ids = self.tok_encode(context) or [self.prefix_token_id]
            room = self.max_length - (params[-1].max_tokens or 0)
            prompts.append({"prompt_token_ids": ids[-room:]})
            num_cut += len(ids) > room
        self._warn(num_cut)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm, on_error="raise")
        texts = []
        for request, param, output in zip(requests, params, outputs, strict=True):
            if output.error is not None:
                raise ValueError(f"a request could not be answered: {output.error}")
            # Stop strings may be special tokens, what comes before them is told without any.
            text = self.tokenizer.decode(output.outputs[0].token_ids)
            for stop in param.stop or ():
                text = text.split(stop)[0]
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation; of one that the template refuses, less its system
        messages. Without `add_generation_prompt` the last message is left open."""
        options: dict[str, Any] = self._template_args | dict(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        render = functools.partial(
            self.tokenizer.render_chat, options=options, chat_template=self._template
        )
        rest = [message for message in chat_history if message.get("role") != "system"]
        try:
            return render(chat_history)
        except ValueError as error:
            if not 0 < len(rest) < len(chat_history):
                raise
            logger.warning("The chat template failed (%s): trying without system messages", error)
            return render(rest)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template in use, None where none is wanted; there are no named ones."""
        return self._template if chat_template else None

    def _sampling_params(self, kwargs: dict[str, Any]) -> SamplingParams:
        """Reads a task's arguments. Nothing is sampled unless `do_sample` or a temperature says.

        Only those that are given have an effect: the checkpoint's own defaults do not.
        """
        if unknown := sorted(kwargs.keys() - set(KNOWN)):
            raise ValueError(
                f"no generation argument is called {unknown[0]!r}: use {', '.join(KNOWN)}"
            )
        given = {name: value for name, value in kwargs.items() if value is not None}
        max_tokens = int(next((given[n] for n in MAX_TOKENS if n in given), self.max_gen_toks))
        if not 1 <= max_tokens < self.max_length:
            raise ValueError(
                f"max_gen_toks={max_tokens} must be at least 1 and leave room for a context in "
                f"max_length={self.max_length}: lower it, or raise max_length"
            )
        sampling = {name: given[name] for name in SAMPLING if name in given}
        sampling.setdefault("temperature", 1.0 if given.get("do_sample") else 0.0)
        if given.get("do_sample") is False:
            sampling["temperature"] = 0.0
        until = given.get("until", [])
        stops = [*([until] if isinstance(until, str) else until), self.tokenizer.eos_token]
        return SamplingParams(
            max_tokens=max_tokens,
            stop=[stop for stop in stops if stop],
            skip_special_tokens=False,
            **sampling,
        )

    def _warn(self, num_cut: int) -> None:
        if num_cut:
            logger.warning(
                "%d requests lose tokens at their beginning: max_length=%d holds no more",
                num_cut,
                self.max_length,
            )


register_model("jaxrunner")(JaxRunnerLM)  # as a decorator it would hide the class's type


def _llm(model: str | LLM | None, max_length: int | None, llm_args: dict[str, Any]) -> LLM:
    """Returns a model that is there, or builds it."""
    if isinstance(model, LLM):
        if llm_args:
            raise TypeError(
                f"{', '.join(llm_args)} cannot change an LLM: give them where it is made"
            )
        return model
    if max_length is not None:
        llm_args = dict(max_model_len=max_length + ROOM) | llm_args
    try:
        return LLM(str(model), **llm_args)
    except ValueError as error:
        error.add_note(f"max_length of lm-eval is at most max_model_len - {ROOM}")
        raise


def main() -> None:
    """Runs lm-eval's command line."""
    cli_evaluate()


if __name__ == "__main__":
    main()
