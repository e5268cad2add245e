"The whole server with the default model: the stock openai client, curl-like clients, bad input, disconnects, a crowd"
import asyncio, json, socket, time

import httpx
import pytest

from conftest import stream_text
from minisgl_edu.core import SamplingParams

openai = pytest.importorskip("openai")

GREEDY = {"temperature": 0.0}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = [
    "Once upon a time", "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4, 5,", "Es war einmal ein König,", "Il était une fois", "从前有一个国王，", "昔々あるところに",
    "Жил-был царь", "كان يا ما كان", "एक समय की बात है", "옛날 옛적에", "👩‍👩‍👧 🎉 are emoji:", "Q: What is 2+2?\nA:", "SELECT name FROM users WHERE", "The quick brown fox",
    "Dear Sir or Madam,", "Water boils at", "<html>\n<body>", "To be, or not to be,",
]


@pytest.fixture(scope="module")
def server(model_dir):
    from minisgl_edu.launch import start_server
    with start_server(model=str(model_dir), port=0, max_running_requests=64, max_seq_len=1024) as handle: yield handle


@pytest.fixture(scope="module")
def client(server): return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def model(client): return client.models.list().data[0].id


def scheduler_stats(server): return httpx.get(f"{server.url}/health", timeout=10).json()["scheduler"]


def assert_idle(server, within=2.0):
    "Nothing waits, nothing runs, every page is free or could be: within the promised two seconds"
    deadline = time.monotonic() + 5 * within
    while True:
        stats = scheduler_stats(server)
        if not stats or (stats["running"] == 0 and stats["waiting"] == 0 and stats["pages_used"] == 0): return
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)


def test_the_capital_of_france_streamed_whole_and_offline(server, client, model, model_dir):
    whole = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, **GREEDY)
    with client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, stream=True, **GREEDY) as chunks:
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    from minisgl_edu import LLM
    with LLM(str(model_dir), max_running_requests=2, max_seq_len=512) as llm:
        offline = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=24))
    assert "Paris" in streamed
    assert streamed == whole.choices[0].message.content == offline.text
    assert whole.choices[0].finish_reason == offline.finish_reason
    assert whole.usage.completion_tokens == len(offline.token_ids) and whole.usage.prompt_tokens == len(offline.prompt_token_ids)


def test_async_client_and_stream_helper(server, model):
    async def go():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as c:
            stream = await c.chat.completions.create(model=model, messages=QUESTION, max_tokens=5, stream=True, stream_options={"include_usage": True}, **GREEDY)
            return [chunk async for chunk in stream]
    chunks = asyncio.run(go())
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_token_limit_is_met_exactly(client, model, limit):
    r = client.completions.create(model=model, prompt="Once upon a time", max_tokens=limit, extra_body={"ignore_eos": True}, **GREEDY)
    assert r.usage.completion_tokens == limit and r.choices[0].finish_reason == "length"


def test_finish_reasons_and_stop_strings(server, client, model):
    ended = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    assert ended.choices[0].finish_reason == "stop" and "<|im_end|>" not in ended.choices[0].message.content
    full = ended.choices[0].message.content
    stop = full[8:14]
    for stream in (False, True):
        r = client.chat.completions.create(model=model, messages=QUESTION, stop=[stop, "never said"], stream=stream, **GREEDY)
        if stream:
            chunks = list(r)
            text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
        else: text, reason = r.choices[0].message.content, r.choices[0].finish_reason
        assert text == full[:full.index(stop)] and reason == "stop"
    assert_idle(server)


def test_seed_repeats_and_token_id_prompts(server, client, model, tokenizer):
    ids = tokenizer("Once upon a time")["input_ids"]
    draws = [client.completions.create(model=model, prompt=p, max_tokens=12, temperature=0.9, seed=5).choices[0].text for p in ("Once upon a time", ids, ids)]
    assert len(set(draws)) == 1
    r = httpx.post(f"{server.url}/generate", json={"prompt": ids, "max_tokens": 6, "temperature": 0}, timeout=60).json()
    assert tokenizer.decode(r["token_ids"]) == r["text"] and r["usage"]["completion_tokens"] == 6


def test_several_choices_echo_and_lists(server, client, model, tokenizer):
    one = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0.9, seed=5)
    four = client.completions.create(model=model, prompt=["Once upon a time", "The sea"], max_tokens=8, temperature=0.9, seed=5, n=2, echo=True)
    texts = [c.text for c in four.choices]
    assert [c.index for c in four.choices] == [0, 1, 2, 3] and texts[0] == "Once upon a time" + one.choices[0].text and texts[1] != texts[0]
    assert all(t.startswith(p) for t, p in zip(texts, ["Once upon a time"] * 2 + ["The sea"] * 2))
    assert four.usage.prompt_tokens == sum(len(tokenizer.encode(p)) for p in ("Once upon a time", "The sea")) and four.usage.completion_tokens == 32
    ids = client.completions.create(model=model, prompt=[tokenizer.encode("Once upon a time"), tokenizer.encode("The sea")], max_tokens=8, temperature=0.9, seed=5)
    assert ["Once upon a time" + ids.choices[0].text, "The sea" + ids.choices[1].text] == [texts[0], texts[2]]
    chat = client.chat.completions.create(model=model, messages=QUESTION, n=3, max_tokens=6, **GREEDY)
    streamed = {i: "" for i in range(3)}
    for chunk in client.chat.completions.create(model=model, messages=QUESTION, n=3, max_tokens=6, stream=True, **GREEDY):
        for c in chunk.choices: streamed[c.index] += c.delta.content or ""
    assert [c.message.content for c in chat.choices] == list(streamed.values()) and len(set(streamed.values())) == 1
    assert_idle(server)


def test_logprobs_bias_and_penalties(client, model, tokenizer):
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY)
    content = chat.choices[0].logprobs.content
    assert b"".join(bytes(c.bytes) for c in content).decode() == "".join(c.token for c in content) == chat.choices[0].message.content
    assert all(len(c.top_logprobs) == 3 and c.top_logprobs[0].token == c.token and c.top_logprobs[0].logprob == c.logprob <= 0 for c in content)  # greedy: the likeliest
    whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=5, logprobs=2, **GREEDY).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text and whole.logprobs.text_offset[0] == 0 and len(whole.logprobs.top_logprobs) == 5
    assert all(whole.text[at:].startswith(token) for at, token in zip(whole.logprobs.text_offset, whole.logprobs.tokens))
    sea, = tokenizer.encode(" sea")
    biased = client.completions.create(model=model, prompt="Once upon a time", max_tokens=3, logit_bias={str(sea): 100}, **GREEDY)
    assert biased.choices[0].text == " sea sea sea"
    varied = client.completions.create(model=model, prompt="Once upon a time", max_tokens=3, logit_bias={str(sea): 10}, presence_penalty=2, frequency_penalty=2, **GREEDY)
    assert varied.choices[0].text != biased.choices[0].text
    with pytest.raises(openai.BadRequestError, match="49152"): client.completions.create(model=model, prompt="x", logit_bias={"49152": 1})


def test_roles_and_content_parts(client, model):
    parts = [{"role": "developer", "content": "Answer in one word."}, {"role": "user", "content": [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]}]
    plain = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What is the capital of France?"}]
    a, b = (client.chat.completions.create(model=model, messages=m, max_completion_tokens=8, **GREEDY) for m in (parts, plain))
    assert a.choices[0].message.content == b.choices[0].message.content and a.usage.prompt_tokens == b.usage.prompt_tokens
    with client.chat.completions.stream(model=model, messages=plain, max_tokens=8, **GREEDY) as stream:  # the client's own streaming helper
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == b.choices[0].message.content


def test_metrics_and_stats(server, client, model):
    def numbers(): return dict(line.rsplit(" ", 1) for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines() if line[0] != "#")
    before = numbers()
    client.completions.create(model=model, prompt="Once upon a time in a land", max_tokens=4)
    assert_idle(server)
    after = numbers()
    def gained(name): return float(after[name]) - float(before[name])
    assert gained("minisgl_requests_total{finish_reason=\"length\"}") == 1 and gained("minisgl_tokens_total{kind=\"generated\"}") == 4
    assert gained("minisgl_time_to_first_token_seconds_count") == 1 and gained("minisgl_request_seconds_count") == 1
    deadline = time.monotonic() + 20
    while "pages" not in (stats := httpx.get(f"{server.url}/stats", timeout=30).json())["scheduler"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    scheduler = stats["scheduler"]
    assert set(scheduler["pages"]) <= set(".csu") and stats["totals"]["prompt_tokens"] > 0
    if scheduler["pages_total"] <= 2048: assert scheduler["pages"].count(".") == scheduler["pages_free"]


BAD = [
    ("/v1/completions", {"prompt": ""}, 400, "prompt"), ("/v1/completions", {"prompt": []}, 400, "prompt"), ("/v1/completions", {"prompt": [10**6]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"), ("/v1/completions", {"prompt": "x " * 3000}, 400, "1024"), ("/v1/completions", {"prompt": "x " * 3000, "stream": True}, 400, "1024"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 5000}, 400, "max_tokens"), ("/v1/completions", {"prompt": "x", "max_tokens": 10**300}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"), ("/v1/completions", {"prompt": "x", "temperature": -0.5}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p"), ("/v1/completions", {"prompt": "x", "model": "gpt-9"}, 404, "gpt-9"), ("/v1/completions", {"prompt": "\ud800"}, 400, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"), ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": "x"}, 400, "messages"), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 1000}, 400, "n"),
]


@pytest.mark.parametrize("path, body, status, word", BAD, ids=lambda x: str(x)[:32])
def test_bad_input_is_answered_and_harms_nobody(server, path, body, status, word):
    raw = json.dumps(body).encode()  # keeps a lone surrogate as an escape
    r = httpx.post(f"{server.url}{path}", content=raw, headers={"content-type": "application/json"}, timeout=60)
    error = r.json()["error"]
    assert r.status_code == status and error["type"] == "invalid_request_error" and word in error["message"], r.text
    ok = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=60)
    assert ok.status_code == 200
    assert_idle(server)


def test_too_long_a_prompt_names_both_numbers_and_its_code(server):
    ids = [5] * 1025
    for stream in (True, False):
        error = httpx.post(f"{server.url}/generate", json={"prompt": ids, "stream": stream}, timeout=60).json()["error"]
        assert error["code"] == "context_length_exceeded" and "1025" in error["message"] and "1024" in error["message"]


def test_a_client_that_hangs_up_frees_everything_soon(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection((host, int(port)), timeout=30) as s:
        s.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        got = b""
        while got.count(b"data: ") < 5: got += s.recv(4096)
    assert_idle(server)
    with pytest.raises(httpx.ReadTimeout):  # the same for a client that waits for a whole answer and gives up
        httpx.post(f"{server.url}/generate", json={"prompt": "Once", "max_tokens": 1000, "ignore_eos": True}, timeout=0.5)
    assert_idle(server)


def test_two_hundred_at_once_each_answered_as_if_alone(server, tokenizer):
    async def one(client, prompt, stream=True):
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": stream}
        if not stream: return (await client.post("/generate", json=body)).json()["text"]
        return await stream_text(client, body)
    async def go():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            alone = [await one(client, p, stream=False) for p in PROMPTS]
            crowd = await asyncio.gather(*(one(client, PROMPTS[i % 20]) for i in range(200)))
        return alone, crowd
    alone, crowd = asyncio.run(go())
    wrong = [(i, alone[i % 20], text) for i, text in enumerate(crowd) if text != alone[i % 20]]
    assert not wrong, wrong[:3]
    assert_idle(server)
    stats = scheduler_stats(server)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
