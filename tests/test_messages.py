"Channels: what goes in comes out, in order, nobody blocks, and an event loop sleeps until something is there"
import asyncio, multiprocessing, os, pickle, signal, threading, time

import pytest

from minisgl_edu.core import RequestError, SamplingParams, TokenLogprobs
from minisgl_edu.messages import (AbortMsg, AsyncReceiver, Channel, ErrorInfo, FailMsg, ReadyMsg, ReplyMsg, ShutdownMsg, StatsMsg,
    StopMsg, SubmitMsg, TokenizeMsg, TokenMsg, TokenText)

SPAWN = multiprocessing.get_context("spawn")
EVERY = [TokenizeMsg(1, [{"role": "user", "content": "héé 🎉"}], SamplingParams(stop=["a"])), SubmitMsg(1, [1, 2], SamplingParams()), AbortMsg(1), StopMsg(1),
         TokenMsg(1, 7, "stop", SamplingParams(), 3, 2, ErrorInfo("m", "p", "c"), TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5)))),
         ReplyMsg(1, "x", [7], "stop", 3, 1, 2, ErrorInfo("m"), [TokenText("x", (120,), -0.5, (TokenText("x", (120,), -0.5),))]), SubmitMsg(2, [1], SamplingParams(logit_bias={5: 1}, logprobs=3)),
         StatsMsg({"running": 1}), ReadyMsg("scheduler", 3, {"a": 1}), FailMsg("scheduler", "why"), ShutdownMsg()]


def echo(inbox, outbox):
    "Send everything back, until an empty hand-shake: a list that holds None"
    while True:
        msgs = inbox.recv()
        if None in msgs: return
        outbox.send(msgs)


def burst(channel, start, n):
    for i in range(start, start + n): channel.send([AbortMsg(i)])
    channel.close()
    if channel._thread: channel._thread.join()


def put_and_leave(channel):
    "Much more than a pipe holds, to a reader that does not read"
    for _ in range(64): channel.send([ReplyMsg(0, "x" * 65536)])


@pytest.fixture
def echo_process():
    there, back = Channel(), Channel()
    p = SPAWN.Process(target=echo, args=(there, back), daemon=True)
    p.start()
    yield there, back
    there.send([None])
    p.join(20)
    assert p.exitcode == 0


@pytest.mark.parametrize("msg", EVERY, ids=lambda m: type(m).__name__)
def test_a_message_is_plain_data(msg):
    assert pickle.loads(pickle.dumps(msg)) == msg and b"torch" not in pickle.dumps(msg)
    for name in vars(msg):
        with pytest.raises(AttributeError): setattr(msg, name, None)
        break


def test_another_process_gets_every_message_unchanged_and_in_order(echo_process):
    there, back = echo_process
    for m in EVERY: there.send([m])
    got = []
    while len(got) < len(EVERY): got += back.recv(timeout=30) or pytest.fail("nothing came")
    assert got == EVERY


def test_what_is_ready_together_is_received_together():
    c = Channel()
    c.send([AbortMsg(0), AbortMsg(1)]); c.send([]); c.send([AbortMsg(2)])
    deadline = time.monotonic() + 10
    got = c.recv(timeout=10)
    while len(got) < 3 and time.monotonic() < deadline: got += c.recv(timeout=1)
    assert [m.uid for m in got] == [0, 1, 2]
    for i in range(3, 6): c.send([AbortMsg(i)])
    time.sleep(0.3)  # the sender's thread has written all three
    assert [m.uid for m in c.recv(block=False)] == [3, 4, 5]


def test_a_list_is_in_the_pipe_when_send_returns_and_late_ones_are_not_overtaken():
    "Into an empty pipe without a thread; behind something long, in order, whether the pipe has room by then or not"
    c = Channel()
    for i in range(20):
        c.send([AbortMsg(i)])
        assert [m.uid for m in c.recv(block=False)] == [i] and c._thread is None
    sent, got = [], []
    for i in range(300):
        c.send([AbortMsg(i) if i % 7 else ReplyMsg(i, "x" * 50_000)]); sent.append(i)
        if i % 3 == 0: got += [m.uid for m in c.recv(block=False)]
    while len(got) < len(sent): got += [m.uid for m in c.recv(timeout=10)] or pytest.fail("nothing came")
    assert got == sent
    c.close(); c._thread.join(10)
    assert not c._thread.is_alive()


def test_recv_gives_up_after_its_timeout_and_does_not_wait_when_told_so():
    c = Channel()
    start = time.monotonic()
    assert c.recv(block=False) == [] and c.recv(timeout=0.05) == []
    assert time.monotonic() - start >= 0.05


def test_one_recv_returns_a_bounded_number_of_messages():
    c = Channel()
    c.MOST = 10
    for i in range(40): c.send([AbortMsg(i), AbortMsg(i)])
    time.sleep(0.3)
    sizes = []
    while sum(sizes) < 80: sizes.append(len(c.recv(timeout=5)))
    assert max(sizes) <= 11 and len(sizes) >= 8


def test_many_processes_send_to_one_and_each_keeps_its_order():
    c = Channel()
    ps = [SPAWN.Process(target=burst, args=(c, k * 1000, 200), daemon=True) for k in range(3)]
    for p in ps: p.start()
    got = []
    while len(got) < 600: got += c.recv(timeout=30) or pytest.fail(f"only {len(got)} came")
    for p in ps: p.join(20)
    for k in range(3): assert [m.uid for m in got if m.uid // 1000 == k] == list(range(k * 1000, k * 1000 + 200))


def test_a_sender_ends_though_its_reader_never_reads():
    c = Channel()
    p = SPAWN.Process(target=put_and_leave, args=(c,), daemon=True)
    p.start(); p.join(20)
    assert p.exitcode == 0


def test_send_never_blocks_in_this_process_either():
    c, done = Channel(), threading.Event()
    threading.Thread(target=lambda: (put_and_leave(c), done.set()), daemon=True).start()
    assert done.wait(20)
    assert len(c.recv(timeout=10)) >= 1


def test_a_killed_reader_does_not_stop_its_sender(echo_process):
    there, back = Channel(), Channel()
    p = SPAWN.Process(target=echo, args=(there, back), daemon=True)
    p.start()
    there.send([AbortMsg(1)])
    assert back.recv(timeout=30) == [AbortMsg(1)]
    os.kill(p.pid, signal.SIGKILL); p.join()
    put_and_leave(there)  # returns


def test_the_event_loop_wakes_for_each_burst_and_stays_free_meanwhile(echo_process):
    there, back = echo_process
    async def go():
        receiver, ticks = AsyncReceiver(back), 0
        async def tick():
            nonlocal ticks
            while True: await asyncio.sleep(0.01); ticks += 1
        ticker = asyncio.create_task(tick())
        got = []
        for i in range(5):
            await asyncio.sleep(0.05)  # nothing is there: the loop must not be held
            there.send([AbortMsg(2 * i), AbortMsg(2 * i + 1)])
            while len(got) < 2 * i + 2: got += await asyncio.wait_for(receiver.recv(), 30)
        ticker.cancel(); receiver.close()
        return got, ticks
    got, ticks = asyncio.run(go())
    assert [m.uid for m in got] == list(range(10)) and ticks >= 5


def test_messages_that_came_before_the_receiver_are_not_lost_nor_read_after_close():
    async def go():
        c = Channel()
        c.send([AbortMsg(1)])
        await asyncio.sleep(0.2)
        receiver = AsyncReceiver(c)
        first = await asyncio.wait_for(receiver.recv(), 10)
        receiver.close()
        c.send([AbortMsg(2)])
        await asyncio.sleep(0.2)
        return first, receiver._msgs, c.recv(timeout=10)
    assert asyncio.run(go()) == ([AbortMsg(1)], [], [AbortMsg(2)])


def test_nobody_polls_while_nothing_comes():
    "The receiver's callback runs when the descriptor is readable, and at no other time"
    async def go():
        c, calls = Channel(), 0
        receiver = AsyncReceiver(c)
        inner = receiver.channel.recv
        def counted(**kw):
            nonlocal calls; calls += 1
            return inner(**kw)
        c.recv = counted
        await asyncio.sleep(0.3)
        idle = calls
        c.send([AbortMsg(1)])
        await asyncio.wait_for(receiver.recv(), 10)
        receiver.close()
        return idle, calls
    idle, calls = asyncio.run(go())
    assert idle == 0 and calls >= 1


def test_a_closed_channel_gives_its_descriptors_back():
    def count(): return len(os.listdir("/proc/self/fd"))
    Channel().close()
    before = count()
    used, unused = Channel(), Channel()
    used.send([AbortMsg(1)]); used.recv(timeout=10)
    assert count() == before + 4
    used.close(); unused.close()
    deadline = time.monotonic() + 10
    while count() > before and time.monotonic() < deadline: time.sleep(0.01)  # the sender's thread closes its own
    assert count() == before


def test_an_error_travels_as_plain_data():
    refused = ErrorInfo.of(RequestError("max_tokens is 9, room is 5", "max_tokens"))
    assert tuple(refused) == ("max_tokens is 9, room is 5", "max_tokens", "invalid_request")
    assert ErrorInfo.of(RequestError("too long", "prompt", "context_length_exceeded")).code == "context_length_exceeded"
    assert ErrorInfo.of(KeyError("x")) == ErrorInfo("KeyError: 'x'", None, "internal_error")


def test_a_message_that_cannot_travel_fails_in_its_sender():
    from minisgl_edu.messages import Channel
    channel = Channel()
    with pytest.raises(Exception, match="pickle|lambda"): channel.send([lambda: None])
    channel.send(["fine"])
    assert channel.recv(timeout=10) == ["fine"]
    channel.close()
