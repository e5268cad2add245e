"Requests, batches and what is refused"
import math, pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from minisgl_edu.core import (EXAMPLES, Batch, Default, ForwardContext, PolicyView, Req, RequestError, SamplingParams, check_number,
                              random_workload)

NAN, INF = float("nan"), math.inf


@pytest.mark.parametrize("field, bad", [
    ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", "hot"), ("temperature", True), pytest.param("temperature", 10**400, id="temperature-huge"),
    ("top_p", 0), ("top_p", 0.0), ("top_p", 1.01), ("top_p", -1), ("top_p", NAN), ("top_p", None),
    ("min_p", -0.01), ("min_p", 1.5), ("min_p", NAN),
    ("top_k", 0), ("top_k", -2), ("top_k", 1.5), ("top_k", True), ("top_k", None),
    ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", 2.0), ("max_tokens", True), ("max_tokens", "8"),
    ("seed", 1.0), ("seed", 2**64), ("seed", "x"), ("ignore_eos", 1), ("skip_special_tokens", None),
    ("presence_penalty", 2.1), ("presence_penalty", NAN), ("frequency_penalty", -2.01), ("frequency_penalty", "1"), ("repetition_penalty", 0), ("repetition_penalty", 1e-7), ("repetition_penalty", -1),
    ("repetition_penalty", INF), ("repetition_penalty", 101), ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("logprobs", 1.0),
    ("logit_bias", 3), ("logit_bias", [1]), ("logit_bias", "7"), ("logit_bias", {"7": 1}), ("logit_bias", {-1: 1}), ("logit_bias", {True: 1}), ("logit_bias", {7: 100.5}),
    ("logit_bias", {7: NAN}), ("logit_bias", {7: None}), pytest.param("logit_bias", {i: 1 for i in range(301)}, id="logit_bias-long"), ("logit_bias", {7.0: 1}),
    ("stop", [""]), ("stop", ["a", 3]), ("stop", 3), ("stop", False), ("stop", {"a": 1}), ("stop", [None])])
def test_bad_parameters_are_refused_by_name(field, bad):
    with pytest.raises(RequestError) as e: SamplingParams(**{field: bad})
    assert e.value.param == field and field in str(e.value)
    assert isinstance(e.value, ValueError)


@pytest.mark.parametrize("params", [
    dict(temperature=0), dict(temperature=0.0, top_k=1), dict(top_p=1), dict(top_p=1e-9), dict(min_p=0), dict(min_p=1), dict(top_k=-1),
    dict(max_tokens=None), dict(max_tokens=1), dict(seed=0), dict(seed=-1), dict(seed=2**64 - 1), dict(stop="end"), dict(stop=["a", "b"]),
    dict(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.5), dict(logit_bias={7: -100, 0: 100}), dict(logit_bias=None), dict(logit_bias={i: 1 for i in range(300)}),
    dict(logprobs=0), dict(logprobs=20), dict(logprobs=None)])
def test_good_parameters_pass(params):
    p = SamplingParams(**params)
    assert p.is_greedy == (params.get("temperature") == 0)


def test_stop_is_always_a_tuple():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == SamplingParams().stop == ()


def test_params_are_values():
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"]) and len({SamplingParams(), SamplingParams()}) == 1
    with pytest.raises(AttributeError): SamplingParams().temperature = 2
    bias = {7: 1.5, 3: -2}
    params = SamplingParams(logit_bias=bias)
    bias[9] = 1
    assert params.logit_bias == ((7, 1.5), (3, -2)) and params == SamplingParams(**vars(params)) and hash(params) == hash(SamplingParams(logit_bias={7: 1.5, 3: -2}))
    for p in (params, SamplingParams(stop="x", logprobs=2)): assert pickle.loads(pickle.dumps(p)) == p


def test_a_default_knows_that_nobody_asked_for_it():
    ours, theirs = SamplingParams(temperature=0), SamplingParams(temperature=0, max_tokens=16)
    assert ours == theirs and type(theirs.max_tokens) is int
    for p in (ours, pickle.loads(pickle.dumps(ours)), replace(ours, seed=3), SamplingParams(**vars(ours))): assert isinstance(p.max_tokens, Default)


def test_which_params_penalise():
    assert not SamplingParams(logit_bias={1: 1}, repetition_penalty=1.0, presence_penalty=0).penalises
    assert all(SamplingParams(**{name: 0.5}).penalises for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"))


def test_check_number_says_value_and_limit():
    with pytest.raises(RequestError, match=r"page_size must be >= 1 and <= 64, got 65"): check_number("page_size", 65, 1, 64, whole=True)
    with pytest.raises(RequestError, match=r"top_p must be > 0 and <= 1, got 0"): check_number("top_p", 0, 0, 1, open_low=True)
    assert check_number("n", 3, 1, whole=True) == 3


def run_alone(req, chunks):
    "Drive `req` through prefill in the given chunks and then decode, as a scheduler would; returns its spans"
    spans = []
    def step(n):
        before = req.cached_len
        req.schedule(n)
        assert 0 <= req.cached_len < req.device_len <= req.max_device_len
        span = Batch([req], "prefill").spans[0]
        assert (span.cached_len, span.device_len) == (before, before + n) and req.extend_len == n
        req.complete_one()
        spans.append(span)
        if not span.is_chunk: req.append_host(7)
    for n in chunks:
        left = req.prompt_len - req.cached_len
        if left: step(min(n, left))
    if req.cached_len < req.prompt_len: step(req.prompt_len - req.cached_len)
    while req.can_decode: step(1)
    return spans


@settings(derandomize=True, max_examples=200)
@given(st.integers(1, 40), st.integers(1, 12), st.lists(st.integers(1, 9), max_size=8))
def test_a_life_computes_every_position_once(prompt_len, max_tokens, chunks):
    req = Req(1, range(prompt_len), SamplingParams(max_tokens=max_tokens))
    spans = run_alone(req, chunks)
    computed = [p for s in spans for p in range(s.cached_len, s.device_len)]
    # the last token is sampled and never goes through the model
    assert computed == list(range(prompt_len + max_tokens - 1))
    assert req.output_len == max_tokens and req.output_ids == [7] * max_tokens
    assert sum(not s.is_chunk for s in spans) == max_tokens
    assert not req.can_decode and req.device_len == req.max_device_len


@settings(derandomize=True, max_examples=100)
@given(st.integers(2, 40), st.data())
def test_a_cached_prefix_is_not_computed_again(prompt_len, data):
    cached = data.draw(st.integers(0, prompt_len - 1))
    req = Req(1, range(prompt_len), SamplingParams(max_tokens=3))
    req.cached_len = cached
    spans = run_alone(req, [])
    assert spans[0].cached_len == cached and sum(s.device_len - s.cached_len for s in spans) == prompt_len - cached + 2


def test_under_overlap_the_device_is_one_token_ahead_of_the_host():
    req = Req(1, [1, 2, 3], SamplingParams(max_tokens=4))
    req.schedule(3)
    req.complete_one()
    assert (req.cached_len, req.device_len, len(req.input_ids)) == (3, 4, 3) # sampled on the device, unknown to the host
    ahead = Batch([req], "decode").spans[0]
    assert (ahead.cached_len, ahead.device_len, ahead.is_chunk) == (3, 4, False)
    req.complete_one()
    req.append_host(9)
    assert (req.cached_len, req.device_len, req.output_ids) == (4, 5, [9])


def test_schedule_refuses_nothing_and_too_much():
    req = Req(1, [1, 2, 3], SamplingParams(max_tokens=4))
    for n in (0, -1, 4):
        with pytest.raises(AssertionError): req.schedule(n)


def test_a_batch_keeps_its_spans_while_requests_move_on():
    reqs = [Req(1, range(5), SamplingParams(max_tokens=2)), Req(2, range(8), SamplingParams(max_tokens=2))]
    reqs[0].schedule(5)
    reqs[1].schedule(3)
    batch = Batch(reqs, "prefill")
    for r in reqs: r.complete_one()
    assert [s[1:] for s in batch.spans] == [(0, 5, False), (0, 3, True)]
    assert batch.num_tokens == 8 and len(batch) == 2
    assert "prefill" in repr(batch) and "[1, 2]" in repr(batch)


def test_a_request_owns_its_tokens():
    prompt = [1, 2, 3]
    req = Req(1, prompt, SamplingParams(max_tokens=2))
    req.append_host(4)
    assert prompt == [1, 2, 3] and req.output_ids == [4] and req.prompt_len == 3


def test_forward_context_extend_lens():
    ctx = ForwardContext("mixed", [0, 4], [3, 5], *[None] * 5)
    assert ctx.extend_lens == [3, 1]


def test_random_workload_is_seeded_and_in_range():
    a, b = random_workload(50, 16, 32, 1000, seed=3), random_workload(50, 16, 32, 1000, seed=3)
    assert a == b and a != random_workload(50, 16, 32, 1000, seed=4)
    assert all(16 <= len(p) <= 32 and 16 <= s.max_tokens <= 32 and s.is_greedy and s.ignore_eos for p, s in a)
    assert all(0 <= t < 1000 for p, _ in a for t in p)
    assert {len(p) for p, _ in random_workload(300, 1, 2, 10)} == {1, 2}


def test_the_examples_differ_and_name_themselves():
    assert len({e.name for e in EXAMPLES}) == len(EXAMPLES) >= 3 and {e.chat for e in EXAMPLES} == {True, False}
    assert PolicyView(1, 2, 3, 4).num_waiting == 1


def test_stop_strings_are_bounded():
    from minisgl_edu.core import RequestError, SamplingParams
    SamplingParams(stop=["x"] * 16)
    for stops in (["x"] * 17, ["y" * 1001]):
        with pytest.raises(RequestError, match="16 strings of 1000"): SamplingParams(stop=stops)
