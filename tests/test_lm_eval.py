"""jaxrunner under lm-eval: the numbers of lm-eval's Hugging Face backend, and what it asks for."""

import json
from pathlib import Path
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrunner import LLM, embedded

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'jaxrunner[eval]'")

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from jaxrunner.lm_eval import JaxRunnerLM

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("choices", "texts", "prompts")
MAX_LENGTH = 80
SIZES: dict[str, Any] = dict(
    dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(64,),
    decode_buckets=(4,), block_size=16, num_blocks=64, warm_up=False, use_tqdm=False,
)  # fmt: skip
LONG = "def f(x):\n    return x + 1\n\n" * 20
CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def lm():
    lm = JaxRunnerLM(str(embedded.PATH), max_length=MAX_LENGTH, **SIZES)
    yield lm
    lm.llm.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns the embedded model as it is, with a tokenizer that adds no BOS, and with none."""
    folders = {"BOS": embedded.PATH}
    for name in ("BOS not added", "no BOS"):
        folders[name] = folder = tmp_path_factory.mktemp("checkpoint")
        for file in (*embedded.PATH.glob("*.json"), *embedded.PATH.glob("*.safetensors")):
            shutil.copy(file, folder)
        edit(folder / "tokenizer.json", post_processor=None)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        edit(folders["no BOS"] / file, bos_token=None, bos_token_id=None)
    return folders


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_tasks(folder, *, keep=lambda doc: True):
    """Writes the tasks with paths that hold from everywhere, of the documents to keep."""
    for name in TASKS:
        text = (ROOT / f"tests/lm_eval_tasks/{name}.yaml").read_text()
        docs = (ROOT / f"tests/data/lm_eval_{name}.jsonl").read_text().splitlines()
        data = folder / f"lm_eval_{name}.jsonl"
        data.write_text("\n".join(doc for doc in docs if keep(json.loads(doc))) + "\n")
        text = text.replace(f"tests/data/{data.name}", str(data))
        cache = f"dataset_kwargs:\n  cache_dir: {folder / 'cache'}"
        (folder / f"{name}.yaml").write_text(text.replace("dataset_kwargs:", cache))
    return str(folder)


def evaluate(model, tasks, **kwargs):
    return lm_eval.simple_evaluate(
        model=model,
        tasks=[f"jaxrunner_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **kwargs,
    )


def answers(results, name):
    """Returns the answers to all requests of a task, in the order of its documents."""
    samples = sorted(results["samples"][f"jaxrunner_{name}"], key=lambda s: s["doc_id"])
    return [answer for sample in samples for (answer,) in sample["resps"]]


def requests(kind, *arguments):
    return [Instance(kind, {}, a if isinstance(a, tuple) else (a,), 0) for a in arguments]


def score(lm, *pairs):
    return lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


def roll(lm, *texts):
    return lm.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)


def generate(lm, *prompts, **kwargs):
    kwargs = dict(until=[], max_gen_toks=12) | kwargs
    return lm.generate_until(
        requests("generate_until", *((p, kwargs) for p in prompts)), disable_tqdm=True
    )


@pytest.mark.parametrize("name", ["BOS", "no BOS"])
def test_lm_eval_says_the_same_of_hugging_face(name, checkpoints, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="pip install 'lm-eval[hf]'")
    pytest.importorskip("lm_eval.models")  # which registers "hf"
    folder = str(checkpoints[name])

    def keep(doc):
        # Of these, that have no token before the first, its Hugging Face backend can make nothing.
        return name == "BOS" or doc.get("question", doc.get("prompt", "x")).strip() != ""

    tasks = write_tasks(tmp_path, keep=keep)
    ours = evaluate(JaxRunnerLM(folder, max_length=MAX_LENGTH, **SIZES), tasks)
    args = f"pretrained={folder},dtype=float32,max_length={MAX_LENGTH}"
    theirs = evaluate("hf", tasks, model_args=args, device="cpu", batch_size=1)
    lines = (tmp_path / "lm_eval_choices.jsonl").read_text().splitlines()
    docs = [json.loads(line) for line in lines]
    assert len(answers(ours, "choices")) == sum(len(doc["choices"]) for doc in docs) >= 40
    assert len(answers(ours, "texts")) == 17 and len(answers(ours, "prompts")) >= 14
    # A logprob is a difference of logits near 20, where float32's steps are 2e-6.
    close = dict(rel=1e-5, abs=1e-5)
    for got, want in zip(answers(ours, "choices"), answers(theirs, "choices"), strict=True):
        assert got == (pytest.approx(want[0], **close), want[1])
    assert answers(ours, "texts") == pytest.approx(answers(theirs, "texts"), **close)
    assert answers(ours, "prompts") == answers(theirs, "prompts")
    for task, metrics in theirs["results"].items():
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        assert len(numbers) >= 2
        assert {k: ours["results"][task][k] for k in numbers} == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("name", ["BOS", "BOS not added", "no BOS"])
def test_texts_become_the_tokens_that_hugging_face_makes(name, add_bos_token, checkpoints):
    pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="pip install 'lm-eval[hf]'")
    transformers = pytest.importorskip("transformers")
    backend = pytest.importorskip("lm_eval.models.huggingface")
    folder, texts = str(checkpoints[name]), ["", " ", "x = 1", "<|endoftext|>x", "é 日本"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = backend.HFLM(model, tokenizer=folder, add_bos_token=add_bos_token)
    ours = JaxRunnerLM(folder, add_bos_token=add_bos_token, max_length=MAX_LENGTH, **SIZES)
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    for special in (None, False):
        for text in texts:
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special), text


def test_an_empty_context_is_the_prefix_token(lm):
    ids = lm.tok_encode("import os\n", add_special_tokens=False)
    direct = lm.llm.loglikelihood([([0], ids)], use_tqdm=False)
    assert score(lm, ("", "import os\n")) == [(direct.logprob[0], direct.is_greedy[0])]
    other = JaxRunnerLM(lm.llm, prefix_token_id=5)
    assert other.prefix_token_id == 5 and other.eot_token_id == 0
    assert score(other, ("", "import os\n")) != score(lm, ("", "import os\n"))


def test_a_context_of_spaces_is_the_prefix_token_without_a_bos(lm, checkpoints):
    other = JaxRunnerLM(str(checkpoints["no BOS"]), max_length=MAX_LENGTH, **SIZES)
    ids = lm.tok_encode("   pass", add_special_tokens=False)
    direct = lm.llm.loglikelihood([([0], ids)], use_tqdm=False)
    assert score(other, ("   ", "pass")) == [(direct.logprob[0], direct.is_greedy[0])]
    assert generate(other, "") == generate(lm, "")


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

    def spied(*args, **kwargs):
        states.extend(new := add(*args, **kwargs))
        return new

    monkeypatch.setattr(lm.llm.completions, "add", spied)
    context = "class Cache:\n" + "    x = 1\n" * 10
    first = score(lm, (context, "y"))
    second = score(lm, (context, "y"), (context, "    z = 2\n"))
    assert second[0] == pytest.approx(first[0], rel=1e-5)
    cached = [state.request.num_cached_tokens for state in states]
    assert cached[0] == 0 and min(cached[1:]) >= 32
    scored = [sum(len(at) for at, _ in state.request.prompt_logprobs) for state in states]
    assert scored == [
        1,
        1,
        len(lm.tok_encode(context + "    z = 2\n")) - len(lm.tok_encode(context)),
    ]


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
    told = []
    hook = SimpleNamespace(add_partial=lambda *args: told.append(args))
    monkeypatch.setattr(lm, "cache_hook", hook)
    pairs, texts, kwargs = [("a = ", "1"), ("", "b")], ["x\n", LONG], dict(max_gen_toks=2)
    want = [("loglikelihood", *pair) for pair in zip(pairs, score(lm, *pairs), strict=True)]
    totals = roll(lm, *texts)
    want += [("loglikelihood_rolling", (t,), s) for t, s in zip(texts, totals, strict=True)]
    want.append(
        ("generate_until", ("def", kwargs | {"until": []}), generate(lm, "def", **kwargs)[0])
    )
    assert told == want


def test_progress_is_shown_unless_lm_eval_says_not_to(lm, capsys):
    score(lm, ("a", "b"))
    roll(lm, "a")
    generate(lm, "a")
    assert capsys.readouterr().err == ""
    lm.loglikelihood(requests("loglikelihood", ("a", "b")))
    assert "Processed prompts" in capsys.readouterr().err


@pytest.mark.parametrize("until", ["\n", ["\n"], ["never", "\n", ""]])
def test_a_text_ends_before_its_stop_string(lm, until):
    prompts = ["def fibonacci(n):\n    return", "import os"]
    whole = generate(lm, *prompts)
    assert all("\n" in text for text in whole)
    assert generate(lm, *prompts, until=until) == [text.split("\n")[0] for text in whole]


def test_special_tokens_stop_and_are_not_told(lm, monkeypatch):
    params = lm._sampling_params({"until": ["<|endoftext|>", "\n"]})
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


def test_tokenizers_have_names_of_their_own(lm, checkpoints):
    other = JaxRunnerLM(str(checkpoints["no BOS"]), max_length=MAX_LENGTH, **SIZES)
    assert other.tokenizer_name != lm.tokenizer_name
    assert lm.tokenizer_name == JaxRunnerLM(lm.llm).tokenizer_name


def test_the_command_line_knows_jaxrunner(tmp_path):
    tasks = write_tasks(tmp_path, keep=lambda doc: len(str(doc)) < 60)
    args = f"pretrained={embedded.PATH},dtype=float32,max_length=40,max_num_seqs=2,warm_up=False"
    command = [sys.executable, "-m", "jaxrunner.lm_eval", "run", "--model", "jaxrunner"]
    command += ["--model_args", args + ",max_num_batched_tokens=32,num_blocks=8"]
    command += ["--tasks", "jaxrunner_choices", "--include_path", tasks, "--limit", "2"]
    command += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "jaxrunner_choices" in done.stdout and "acc_norm" in done.stdout
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["n-samples"]["jaxrunner_choices"]["effective"] == 2


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "jaxrunner.lm_eval")
    with pytest.raises(ImportError, match=r"jaxrunner\.lm_eval needs lm-eval .*jaxrunner\[eval\]"):
        __import__("jaxrunner.lm_eval")
