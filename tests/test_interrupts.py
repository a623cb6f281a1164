"""Ctrl-C at any moment: no state is lost, no output either, and the next request is answered."""

import random
import signal
import threading
import time
import traceback

import jax
import pytest

from jaxrunner import Interrupted, RequestOutputs, SamplingParams
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.interrupts import Deferred, deferred
from jaxrunner.text.prompts import ParsedPrompt
from tests.support import tiny
from tests.support.tiny_engine import KINDS, PROMPTS, engine


@pytest.fixture
def interrupt():
    """Returns a function that runs another, and interrupts it after some seconds if it runs."""
    armed = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def handle(*_):
        if armed.is_set():
            raise KeyboardInterrupt

    def send(delay_s: float) -> None:
        time.sleep(delay_s)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def during(function, delay_s: float) -> KeyboardInterrupt | None:
        thread = threading.Thread(target=send, args=(delay_s,))
        try:
            armed.set()
            thread.start()
            function()
            return None
        except KeyboardInterrupt as error:
            return error
        finally:
            armed.clear()
            thread.join()

    signal.signal(signal.SIGINT, handle)
    yield during
    signal.signal(signal.SIGINT, before)


def test_no_interrupt_loses_a_state_or_an_output(interrupt):
    e, rng, num = engine(), random.Random(0), 100
    completions = Completions(e, None, ())
    asked = [(ParsedPrompt(token_ids=prompt), KINDS["greedy"], {}) for prompt in PROMPTS[:2]]

    def work() -> RequestOutputs:
        return completions.answer(asked, on_error="raise", use_tqdm=False)

    want = tokens_of(work())
    start = time.perf_counter()
    assert tokens_of(work()) == want
    usual_s, count, num_cut = time.perf_counter() - start, 0, 0
    deadline = time.monotonic() + 120
    while count < num and time.monotonic() < deadline:
        error = interrupt(work, rng.random() * usual_s)
        assert not completions._states and not e.has_unfinished
        assert not any(x.is_deleted() for x in jax.tree.leaves(e.runner.state))
        if isinstance(error, Interrupted):
            count += 1
            for output, whole in zip(error.outputs, want, strict=True):
                (completion,), n = output.outputs, len(output.outputs[0].token_ids)
                assert completion.token_ids == whole[:n] and output.finished
                assert completion.finish_reason == ("length" if n == len(whole) else "abort")
                num_cut += 0 < n < len(whole)
        elif error is not None:  # before or after, not within
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            assert "answer" not in names
        while e.step():
            pass
        assert [pool.num_free for pool in e.pools] == [e.config.num_blocks] * len(e.pools)
    assert count >= num / 4 and num_cut > count / 4
    assert tokens_of(work()) == want


def tokens_of(outputs: RequestOutputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def usual_handler():
    """A process in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_prompts_that_were_not_queued_have_outputs_too(monkeypatch, usual_handler):
    tokenizer = tiny.tokenizer()
    completions, encode = Completions(engine(), tokenizer, ()), tokenizer.encode

    def interrupted(text: str, **kwargs) -> list[int]:
        if text == "c":
            signal.raise_signal(signal.SIGINT)
        return encode(text, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", interrupted)
    asked = [(ParsedPrompt(text=text), SamplingParams(n=2), {}) for text in "abcd"]
    with pytest.raises(Interrupted, match="0 of 4 prompts were answered; the `outputs`") as caught:
        completions.answer(asked, on_error="raise", use_tqdm=False)
    assert [output.prompt for output in caught.value.outputs] == list("abcd")
    reasons = [c.finish_reason for output in caught.value.outputs for c in output.outputs]
    assert reasons == ["abort"] * 8
    assert not completions._states and not completions.engine.has_unfinished


def test_an_interrupt_waits_and_is_not_forgotten(interrupt):
    done = []

    @deferred
    def inner():
        time.sleep(0.05)
        done.append("inner")

    @deferred
    def outer():
        inner()
        done.append("outer")

    assert interrupt(outer, 0.02) and done == ["inner", "outer"]
    assert interrupt(lambda: time.sleep(1.0), 0.02)  # and outside it comes at once

    def fails():
        with Deferred():
            time.sleep(0.05)
            raise ValueError("its own")

    assert interrupt(fails, 0.02)


def test_other_threads_have_no_interrupts():
    seen = []
    thread = threading.Thread(target=deferred(lambda: seen.append(1)))
    thread.start()
    thread.join()
    assert seen == [1]
