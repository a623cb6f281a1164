"""Which of several engines a request goes to. Knows no JAX."""

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.scheduling import router as routing
from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.router import Router


def request(name: str, prompt: list[int], max_len: int = 40, salt: bytes = b"") -> Request:
    return Request(name, prompt, SamplingParams(), 0, max_len, cache_salt=salt)


def test_requests_go_where_their_prefix_is_unless_it_is_too_busy():
    router, prompt = Router(2, block_size=4, margin=50), [*range(12)]
    assert router.choose(request("a", prompt), [0, 1]) == 0
    assert router.choose(request("b", [9, *prompt]), [0, 1]) == 1  # another prompt
    assert router.choose(request("c", [*prompt, 5]), [0, 1]) == 0
    assert router.work == [40 + 40 - 12, 40]
    assert router.choose(request("d", prompt, salt=b"tenant"), [0, 1]) == 1
    assert router.choose(request("e", prompt), [0, 1]) == 0
    assert router.work == [96, 80]
    router.drop("b")
    router.drop("unknown")
    assert router.choose(request("f", prompt), [0, 1]) == 1  # 56 apart; now both have it
    router.drop("a")
    router.drop("c")
    assert router.choose(request("g", prompt), [0, 1]) == 0
    assert router.choose(request("h", prompt), [1]) == 1  # the other has ended
    router.forget()
    least = router.work.index(min(router.work))
    assert router.choose(request("i", prompt), [0, 1]) == least


def test_work_is_what_is_left_of_a_request():
    router = Router(1, block_size=4, margin=0, by_prefix=False)
    a, b = request("a", [1, 2, 3]), request("b", [1, 2, 3])
    router.choose(a, [0])
    router.follow(b, 0)  # the one whose prefix it shares computes the prompt
    assert router.work == [40 + 37]
    a.num_tokens, b.finish_reason = 5, "stop"
    router.observe(a)
    router.observe(b)
    assert router.work == [35]


def test_the_blocks_that_are_remembered_have_a_bound(monkeypatch):
    monkeypatch.setattr(routing, "MOST_KNOWN", 8)
    router = Router(2, block_size=4, margin=1000)
    for i in range(50):
        router.choose(request(f"{i}", [i] * 13), [0, 1])
    assert len(router._known) == 8
    far = request("far", [49] * 12 + [1] * 10000)
    near = router._left["49"][0]
    assert router.choose(far, [0, 1]) == near and router._left["far"] == (near, 40 - 12)
    assert len(router._known) == 8
