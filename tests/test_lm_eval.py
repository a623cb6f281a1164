"""lm-eval with jaxrunner and with its own Hugging Face backend: the same numbers."""

import functools
import importlib
import json
from pathlib import Path
import shutil
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
import pytest

from jaxrunner import embedded
from jaxrunner.lm_eval import JaxRunnerLM, main
from tests.support.harness import MAX_LENGTH, SIZES, generate, requests, score

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("choices", "texts", "prompts")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns the embedded model as it is, and with other ideas of BOS; as it is, that is EOS."""
    folders = {"BOS": embedded.PATH}
    for name in ("BOS not added", "another BOS", "no BOS"):
        folders[name] = folder = tmp_path_factory.mktemp("checkpoint")
        for file in (*embedded.PATH.glob("*.json"), *embedded.PATH.glob("*.safetensors")):
            shutil.copy(file, folder)
        if name != "another BOS":
            edit(folder / "tokenizer.json", post_processor=None)
    edit(folders["another BOS"] / "tokenizer_config.json", bos_token="~")
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


@pytest.fixture
def torch():
    """Skips without what lm-eval's Hugging Face backend needs."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="pip install 'lm-eval[hf]'")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two wait for each other where other tests run beside
    yield torch
    torch.set_num_threads(threads)


def model(folder, **kwargs):
    return JaxRunnerLM(str(folder), max_length=MAX_LENGTH, **SIZES, **kwargs)


def evaluate(lm, tasks, **kwargs):
    run: Any = lm_eval.simple_evaluate  # its decorator hides what it takes
    return run(
        model=lm,
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


@pytest.mark.slow
def test_lm_eval_says_the_same_of_hugging_face(shallow, tmp_path, caplog, torch):
    tasks = write_tasks(tmp_path)
    ours = evaluate(model(shallow), tasks)
    assert caplog.text.count("requests lose tokens") == 2  # of the choices and of the prompts
    args = f"pretrained={shallow},dtype=float32,max_length={MAX_LENGTH}"
    theirs = evaluate("hf", tasks, model_args=args, device="cpu", batch_size=1)
    lines = (tmp_path / "lm_eval_choices.jsonl").read_text().splitlines()
    docs = [json.loads(line) for line in lines]
    assert len(answers(ours, "choices")) == sum(len(doc["choices"]) for doc in docs) >= 40
    assert len(answers(ours, "texts")) == 17 and len(answers(ours, "prompts")) >= 14
    # A logprob is a difference of logits near 20, where float32's steps are 2e-6.
    close: dict[str, Any] = dict(rel=1e-5, abs=1e-5)
    for got, want in zip(answers(ours, "choices"), answers(theirs, "choices"), strict=True):
        assert got == (pytest.approx(want[0], **close), want[1])
    assert answers(ours, "texts") == pytest.approx(answers(theirs, "texts"), **close)
    assert answers(ours, "prompts") == answers(theirs, "prompts")
    for task, metrics in theirs["results"].items():
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        assert len(numbers) >= 2
        assert {k: ours["results"][task][k] for k in numbers} == pytest.approx(numbers, rel=1e-5)


def test_a_likelihood_is_that_of_hugging_face(checkpoints, torch):
    backend = importlib.import_module("lm_eval.models.huggingface")
    theirs = backend.HFLM(pretrained=str(checkpoints["BOS"]), device="cpu", dtype="float32")
    pairs = [("x = ", "1"), ("def f", "(x):\n"), ("", "import os")]
    want = theirs.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for got, (logprob, is_greedy) in zip(
        score(model(checkpoints["BOS"]), *pairs), want, strict=True
    ):
        assert got == (pytest.approx(logprob, rel=1e-5, abs=1e-5), is_greedy)


def test_lm_eval_finds_jaxrunner_by_its_name():
    registry = importlib.import_module("lm_eval.api.registry")
    assert registry.get_model("jaxrunner") is JaxRunnerLM


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("name", ["BOS", "BOS not added", "another BOS", "no BOS"])
def test_texts_become_the_tokens_that_hugging_face_makes(name, add_bos_token, checkpoints, torch):
    backend = importlib.import_module("lm_eval.models.huggingface")
    args = dict(pretrained=str(checkpoints[name]), device="cpu", add_bos_token=add_bos_token)
    theirs = backend.HFLM(**args)
    ours = model(checkpoints[name], add_bos_token=add_bos_token)
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    for special in (None, True, False):
        for text in ("", " ", "x = 1", "<|endoftext|>x", "~x", "é 日本"):
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special), text


def test_a_context_of_spaces_is_the_prefix_token_without_a_bos(checkpoints):
    lm, other = (model(checkpoints[name]) for name in ("BOS", "no BOS"))
    ids = lm.tok_encode("   pass", add_special_tokens=False)
    for token_id, asked in ((0, other), (5, JaxRunnerLM(other.llm, prefix_token_id=5))):
        direct = lm.llm.loglikelihood([([token_id], ids)], use_tqdm=False)
        assert score(asked, ("   ", "pass")) == [(direct.logprob[0], direct.is_greedy[0])]
    assert generate(other, "") == generate(lm, "")


def test_tokenizers_have_names_of_their_own(checkpoints):
    lm, other = (model(checkpoints[name]) for name in ("BOS", "no BOS"))
    assert lm.tokenizer_name == JaxRunnerLM(lm.llm).tokenizer_name != other.tokenizer_name


@pytest.mark.slow
def test_the_command_line_knows_jaxrunner(tmp_path, monkeypatch, capsys):
    tasks = write_tasks(tmp_path, keep=lambda doc: len(str(doc)) < 110)
    for file in embedded.PATH.glob("*.json"):
        shutil.copy(file, tmp_path)
    edit(tmp_path / "config.json", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    args = f"pretrained={tmp_path},load_format=dummy,dtype=float32,max_length=40,warm_up=False"
    command = ["jaxrunner.lm_eval", "run", "--model", "jaxrunner"]
    command += ["--model_args", args + ",max_num_batched_tokens=32,max_num_seqs=2,num_blocks=8"]
    command += ["--tasks", "jaxrunner_choices", "--include_path", tasks, "--limit", "2"]
    command += ["--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    # Without lm-eval's own tasks, 14,000 files, which it reads to find these.
    own = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)
    main()
    shown = capsys.readouterr().out
    assert "jaxrunner_choices" in shown and "acc_norm" in shown
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["n-samples"]["jaxrunner_choices"]["effective"] == 2


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "jaxrunner.lm_eval")
    with pytest.raises(ImportError, match=r"jaxrunner\.lm_eval needs lm-eval .*jaxrunner\[eval\]"):
        importlib.import_module("jaxrunner.lm_eval")
