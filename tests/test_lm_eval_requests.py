"""What lm-eval asks of a model, and how it is asked: `JaxRunnerLM` without a task."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrunner import LLM, embedded
from jaxrunner.lm_eval import JaxRunnerLM
from tests.support.harness import MAX_LENGTH, SIZES, generate, requests, roll, score

LONG = "def f(x):\n    return x + 1\n\n" * 20
CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def lm(shallow):
    lm = JaxRunnerLM(shallow, max_length=MAX_LENGTH, **SIZES)
    yield lm
    lm.llm.close()


def test_an_empty_context_is_the_prefix_token(lm):
    ids = lm.tok_encode("import os\n", add_special_tokens=False)
    direct = lm.llm.loglikelihood([([0], ids)], use_tqdm=False)
    assert score(lm, ("", "import os\n")) == [(direct.logprob[0], direct.is_greedy[0])]
    other = JaxRunnerLM(lm.llm, prefix_token_id=5)
    assert other.prefix_token_id == 5 and other.eot_token_id == 0
    assert score(other, ("", "import os\n")) != score(lm, ("", "import os\n"))


@pytest.mark.parametrize("context_len", [MAX_LENGTH - 5, MAX_LENGTH - 4, 2 * MAX_LENGTH])
def test_a_context_loses_its_beginning_where_it_is_too_long(lm, context_len, caplog):
    ids = lm.tok_encode(LONG)
    context, rest = ids[:context_len], ids[context_len : context_len + 5]
    got = lm._loglikelihood_tokens([(None, context, rest)], disable_tqdm=True)
    kept = context[-(MAX_LENGTH + 1 - len(rest)) :]
    want = lm.llm.loglikelihood([(kept, rest)], use_tqdm=False)
    assert got == [(want.logprob[0], want.is_greedy[0])]
    assert ("1 requests lose tokens" in caplog.text) == (context_len > MAX_LENGTH - 4)
    whole = lm._loglikelihood_tokens([(None, context, ids[:MAX_LENGTH])], disable_tqdm=True)
    assert whole[0][0] < 0


@pytest.mark.parametrize("length", [0, MAX_LENGTH + 1])
def test_a_continuation_must_fit(lm, length):
    with pytest.raises(ValueError, match=f"continuation of .* has {length} tokens, it must have"):
        lm._loglikelihood_tokens([(("a", "b"), [0], [5] * length)])


def test_only_the_continuation_is_scored_and_the_context_is_cached(lm, monkeypatch):
    states, add = [], lm.llm.completions.add

    def spied(*args, into, **kwargs):
        add(*args, into=into, **kwargs)
        states.append(into[-1])

    monkeypatch.setattr(lm.llm.completions, "add", spied)
    context = "class Cache:" + "\n    x = 1" * 10
    first = score(lm, (context, " y"))
    second = score(lm, (context, " y"), (context, "\n    z = 2"))
    assert second[0] == pytest.approx(first[0], rel=1e-5)
    cached = [state.request.num_cached_tokens for state in states]
    assert cached[0] < 16 and min(cached[1:]) >= 32
    scored = [sum(len(at) for at, _ in state.request.prompt_logprobs) for state in states]
    assert scored == [1, 1, len(lm.tok_encode("\n    z = 2", False))]


def test_answers_come_in_the_order_of_their_requests(lm):
    pairs = [(LONG[: 7 * i], f"x = {i}\n") for i in range(1, 14)]
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    alone = [score(lm, pair)[0] for pair in pairs]
    for i, got in zip(order, score(lm, *(pairs[i] for i in order)), strict=True):
        assert got == (pytest.approx(alone[i][0], rel=1e-5), alone[i][1])
    texts = [a + b for a, b in pairs]
    totals = roll(lm, *(texts[i] for i in order))
    assert totals == pytest.approx([roll(lm, texts[i])[0] for i in order], rel=1e-5)
    assert generate(lm, *(texts[i] for i in order)) == [generate(lm, texts[i])[0] for i in order]


def test_the_cache_hears_of_every_answer(lm, monkeypatch):
    told: list[Any] = []
    hook = SimpleNamespace(add_partial=lambda *args: told.append(args))
    monkeypatch.setattr(lm, "cache_hook", hook)
    pairs, texts, kwargs = [("a = ", "1"), ("", "b")], ["x\n", LONG], dict(max_gen_toks=2)
    want: list[Any] = [
        ("loglikelihood", *pair) for pair in zip(pairs, score(lm, *pairs), strict=True)
    ]
    totals = roll(lm, *texts)
    want += [("loglikelihood_rolling", (t,), s) for t, s in zip(texts, totals, strict=True)]
    want.append(
        ("generate_until", ("def", kwargs | {"until": []}), generate(lm, "def", **kwargs)[0])
    )
    assert told == want


def test_progress_is_shown_unless_lm_eval_says_not_to(lm, capsys):
    score(lm, ("a", " b"))
    roll(lm, "a")
    generate(lm, "a")
    assert capsys.readouterr().err == ""
    lm.loglikelihood(requests("loglikelihood", ("a", " b")))
    assert "Processed prompts" in capsys.readouterr().err


@pytest.mark.parametrize("until", ["\n", ["\n"], ["never", "\n", ""]])
def test_a_text_ends_before_its_stop_string(lm, until):
    prompts = ["def fibonacci(n):\n", "with open("]
    whole = generate(lm, *prompts)
    assert all("\n" in text for text in whole)
    assert generate(lm, *prompts, until=until) == [text.split("\n")[0] for text in whole]


def test_special_tokens_stop_and_are_not_told(lm, monkeypatch):
    params = lm._sampling_params({"until": ["<|endoftext|>", "\n"], "max_gen_toks": 9})
    assert params.stop == ("<|endoftext|>", "\n") and not params.skip_special_tokens
    ids = [*lm.tok_encode("x = 1", False), 0, *lm.tok_encode("y", False)]
    output = SimpleNamespace(error=None, outputs=[SimpleNamespace(token_ids=ids)])
    monkeypatch.setattr(lm.llm, "generate", lambda *_, **__: [output])
    assert generate(lm, "a") == ["x = 1y"]


@pytest.mark.parametrize(
    ("kwargs", "want"),
    [
        ({}, dict(temperature=0, max_tokens=256)),
        (dict(temperature=0.5, max_gen_toks=3), dict(temperature=0.5, max_tokens=3)),
        (dict(temperature=0.5, do_sample=False), dict(temperature=0)),
        (dict(do_sample=True, max_tokens=9), dict(temperature=1, max_tokens=9, top_p=1)),
        (dict(do_sample=True, temperature=0.7, top_p=0.9, top_k=5, seed=3, min_p=0.1,
              repetition_penalty=1.1, max_new_tokens=4, max_tokens=5),
         dict(temperature=0.7, top_p=0.9, top_k=5, seed=3, min_p=0.1, repetition_penalty=1.1,
              max_tokens=4)),
        (dict(until=None, do_sample=None, temperature=None), dict(temperature=0)),
    ],
)  # fmt: skip
def test_generation_arguments_mean_what_lm_eval_says(lm, kwargs, want, monkeypatch):
    monkeypatch.setattr(lm, "max_length", 300)
    params = lm._sampling_params(kwargs)
    assert {name: getattr(params, name) for name in want} == want


def test_a_seed_repeats_a_sample(lm):
    first, again, other = (
        generate(lm, "class A", do_sample=True, temperature=1.5, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_unknown_generation_arguments_are_refused(lm):
    with pytest.raises(ValueError, match="no generation argument is called 'num_beams': use max"):
        generate(lm, "a", num_beams=4)


@pytest.mark.parametrize("count", [0, MAX_LENGTH])
def test_what_is_generated_must_leave_room(lm, count):
    with pytest.raises(ValueError, match=f"max_gen_toks={count} must be at least 1 and leave room"):
        generate(lm, "a", max_gen_toks=count)


def test_a_request_that_fails_is_no_empty_answer(lm, monkeypatch):
    failed = [SimpleNamespace(error="the logits are NaN")]
    monkeypatch.setattr(lm.llm, "generate", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="a request could not be answered: the logits are NaN"):
        generate(lm, "a")


def test_arguments_come_as_lm_eval_writes_them():
    text = f"pretrained={embedded.PATH},dtype=float32,max_length=50,max_gen_toks=7,warm_up=False"
    lm = JaxRunnerLM.create_from_arg_string(
        text + ",max_num_seqs=4,use_tqdm=False", dict(batch_size=1, device="cuda:0")
    )
    assert (lm.max_length, lm.max_gen_toks, lm.rank, lm.world_size) == (50, 7, 0, 1)
    config = lm.llm.engine.config
    assert (config.max_model_len, config.dtype, config.max_num_seqs) == (52, "float32", 4)
    args = dict(model=str(embedded.PATH), use_tqdm=False, warm_up=False)
    assert JaxRunnerLM.create_from_arg_obj(args).max_length == 2046


def test_bad_arguments_are_named(lm):
    with pytest.raises(TypeError, match="jaxrunner needs one model: give pretrained=DIR"):
        JaxRunnerLM()
    with pytest.raises(TypeError, match="dtype cannot change an LLM: give them where it is made"):
        JaxRunnerLM(lm.llm, dtype="float32")
    for length in (0, MAX_LENGTH + 1):
        with pytest.raises(ValueError, match=f"max_length={length} must be at least 1 and at most"):
            JaxRunnerLM(lm.llm, max_length=length)
    with pytest.raises(ValueError, match="max_model_len=2049 is over the model's 2048") as raised:
        JaxRunnerLM(str(embedded.PATH), max_length=2047, use_tqdm=False)
    assert raised.value.__notes__ == ["max_length of lm-eval is at most max_model_len - 2"]


def test_a_tokenizer_without_bos_and_eos_needs_a_prefix_token(lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "eos_token_id", None)
    assert lm.prefix_token_id == 0
    monkeypatch.setattr(lm.tokenizer, "bos_token_id", None)
    with pytest.raises(ValueError, match="the tokenizer has neither BOS nor EOS: pass prefix"):
        score(lm, ("", "a"))


def test_chat_templates_are_applied(lm):
    assert lm.chat_template(True) is None and lm.chat_template() is None
    chat = JaxRunnerLM(lm.llm, chat_template=CHAT)
    assert chat.chat_template(True) == CHAT and chat.chat_template(False) is None
    user, answer = dict(role="user", content="1+1"), dict(role="assistant", content="It is")
    assert chat.apply_chat_template([user]) == "<user>1+1<assistant>"
    system = dict(role="system", content="Be brief.")
    assert chat.apply_chat_template([system, user]) == "<user>1+1<assistant>"
    left_open = chat.apply_chat_template([user, answer], add_generation_prompt=False)
    assert left_open == "<user>1+1<assistant>It is"
    with pytest.raises(ValueError, match="no system"):
        chat.apply_chat_template([system])


def test_the_template_of_an_llm_and_its_variables_count(lm):
    with LLM(str(embedded.PATH), max_model_len=34, chat_template="{{ name }}", **SIZES) as llm:
        chat = JaxRunnerLM(llm, chat_template_args=dict(name="a"))
        assert chat.apply_chat_template([dict(role="user", content="x")]) == "a"
        assert chat.max_length == 32 and chat.tokenizer_name == lm.tokenizer_name
