"Sampling against exact distributions; rows of a batch against the same rows alone"
import math

import pytest
import torch

from minisgl_edu.core import Req, RequestError, SamplingParams, TokenLogprobs
from minisgl_edu.engine import Engine, EngineConfig
from minisgl_edu.models import DenseAttention, full_context
from minisgl_edu.overlap import make_scheduler
from minisgl_edu.sampling import choose, prepare, read_logprobs, sample, uniform, with_seed

INF = float("inf")


def scheduled(params, output_len=0, uid=0, prompt_len=3):
    "A request that is about to sample output token number `output_len`"
    req = Req(uid, [1] * prompt_len, params)
    req.input_ids += [1] * output_len
    req.schedule(len(req.input_ids))
    return req


def rows_at(params, position): return prepare([scheduled(p, position, uid) for uid, p in enumerate(params)])


def draws(row, num, **kwargs):
    "`num` draws from one row: one batch of that many requests, a seed each"
    params = [SamplingParams(seed=i, **kwargs) for i in range(num)]
    return choose(torch.as_tensor(row).repeat(num, 1), rows_at(params, 0)).tolist()


def chi_square_ok(tokens, probs):
    "Counts fit `probs` at the 1e-4 level; what has probability zero never comes"
    expected = torch.as_tensor(probs, dtype=torch.float64) * len(tokens)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    assert (counts[expected == 0] == 0).all()
    used = expected > 0
    if used.sum() == 1: return True
    stat, freedom = ((counts - expected)[used].pow(2) / expected[used]).sum().item(), used.sum().item() - 1
    # chi-square with `freedom` degrees is close to freedom * (1 - 2/(9 freedom) + z sqrt(2/(9 freedom)))^3
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    return stat < limit


def exact(row, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    "The distribution by a slow loop: rank, keep the first k, then the smallest set with mass p, then the likely enough"
    probs = torch.softmax(torch.as_tensor(row, dtype=torch.float64) / temperature, 0).tolist()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[:top_k if top_k != -1 else None]
    mass, kept, left = 0.0, [], sum(probs[i] for i in order)
    for i in order:
        if mass >= top_p * left: break
        kept.append(i); mass += probs[i]
    kept = [i for i in kept if probs[i] >= min_p * probs[order[0]]]
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(probs))]


ROW = [2.0, -1.0, 0.5, 2.0, 1.0, 0.0, -INF, 1.5, -3.0, 0.7]
RULES = [dict(), dict(temperature=0.5), dict(temperature=3.0), dict(top_k=1), dict(top_k=3), dict(top_k=10), dict(top_k=1000), dict(top_p=0.5), dict(top_p=0.9),
    dict(top_p=1e-9), dict(min_p=0.3), dict(min_p=1.0), dict(top_k=6, top_p=0.8), dict(top_k=5, top_p=0.9, min_p=0.4, temperature=1.3)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_draws_follow_the_exact_distribution(rule):
    assert chi_square_ok(draws(ROW, 20000, **rule), exact(ROW, **rule))


def test_the_test_notices_a_small_bias():
    biased = exact([x + 0.1 * (i == 0) for i, x in enumerate(ROW)])
    assert not chi_square_ok(draws(ROW, 20000), biased)


def test_one_request_follows_the_distribution_over_its_positions():
    params = SamplingParams(seed=123, max_tokens=4001)
    reqs = [scheduled(params, position) for position in range(4000)]
    assert chi_square_ok(choose(torch.tensor(ROW).repeat(4000, 1), prepare(reqs)).tolist(), exact(ROW))


def test_zero_small_and_plain_temperatures_side_by_side():  # F18
    logits = torch.tensor([3.0, 1.0, 2.999, -INF]).repeat(3, 1)
    params = [SamplingParams(temperature=t, seed=7, max_tokens=2000) for t in (0, 1e-4, 1.0)]
    tokens = torch.stack([choose(logits, rows_at(params, i)) for i in range(1000)])
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1] == 0).sum() >= 990
    assert chi_square_ok(tokens[:, 2].tolist(), exact(logits[2].tolist()))
    assert (tokens != 3).all()
    for row in range(3):  # rows do not affect each other
        for i in range(0, 1000, 50):
            assert choose(logits[:1], prepare([scheduled(params[row], i, row)])).item() == tokens[i, row]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-45, 5e-324])
def test_tiny_temperatures_are_greedy_and_safe(temperature):
    assert set(draws([1.0, 30000.0, 29999.0, -INF], 50, temperature=temperature)) == {1}


def test_large_temperatures_are_uniform_over_what_is_possible():
    assert chi_square_ok(draws([5.0, 0.0, -INF, 9.0], 6000, temperature=1e9), [1 / 3, 1 / 3, 0, 1 / 3])


def test_greedy_takes_the_first_of_equals():
    logits = torch.zeros(3, 5000)
    logits[0, [17, 4000]] = 1.0
    logits[1, [4999, 2, 3]] = 7.0
    greedy = [SamplingParams(temperature=0)] * 3
    assert rows_at(greedy, 0).all_greedy and choose(logits, rows_at(greedy, 0)).tolist() == [17, 2, 0]
    mixed = greedy[:2] + [SamplingParams(seed=1)]
    assert choose(logits, rows_at(mixed, 0))[:2].tolist() == [17, 2]


def test_ties_at_the_border_keep_the_lowest_ids():
    row = torch.zeros(1000)
    row[[900, 30, 500]] = 1.0
    assert set(draws(row, 200, top_k=1)) == {30}
    assert set(draws(row, 400, top_k=5)) == {900, 30, 500, 0, 1}       # the tied group goes on far beyond what is ranked at first
    flat = torch.zeros(1000)
    assert set(draws(flat, 400, top_p=0.004)) == {0, 1, 2, 3}
    assert set(draws(flat, 50, min_p=1.0)) <= set(range(1000))


def test_top_p_that_needs_more_tokens_than_are_ranked_at_first():
    row = torch.linspace(0, 0.1, 6000)   # almost flat: 0.9 of the mass is in thousands of tokens
    want = exact(row.tolist(), top_p=0.9)
    tokens = torch.tensor(draws(row, 1200, top_p=0.9))
    kept = torch.tensor(want) > 0
    assert kept[tokens].all()
    bins = lambda t: t.reshape(20, 300).sum(-1)
    assert chi_square_ok((tokens // 300).tolist(), bins(torch.tensor(want, dtype=torch.float64)))


def test_top_k_between_the_ranks_with_top_p():
    row = torch.randn(9000, generator=torch.Generator().manual_seed(0))
    for top_k in (255, 256, 257, 4096, 5000, 8999, 9000, 10000):
        want = exact(row.tolist(), top_k=top_k, top_p=0.7)
        assert all(want[t] > 0 for t in draws(row, 60, top_k=top_k, top_p=0.7))


def test_a_mixed_batch_equals_each_row_alone():
    gen = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(24, 7000, generator=gen)
    logits[5:9] *= 0.05  # flat rows: these rank everything
    kinds = [dict(temperature=0), dict(), dict(top_k=50), dict(top_p=0.95), dict(min_p=0.1, temperature=0.7), dict(top_p=0.9, temperature=2.0), dict(top_k=300, top_p=0.5)]
    params = [SamplingParams(seed=i % 5, **kinds[i % len(kinds)]) for i in range(24)]
    for position in range(3):
        together = choose(logits, rows_at(params, position))
        for i in range(24):
            assert choose(logits[i:i + 1], prepare([scheduled(params[i], position, uid=99)])).item() == together[i]
        order = torch.randperm(24, generator=gen)
        shuffled = choose(logits[order], prepare([scheduled(params[i], position, int(i)) for i in order]))
        assert torch.equal(shuffled, together[order])


def test_same_seed_same_draws_other_seed_other_draws():
    row = torch.zeros(1, 50000)
    def run(seed, **kwargs): return [choose(row, prepare([scheduled(SamplingParams(seed=seed, **kwargs), i, prompt_len=n)])).item() for i, n in ((0, 3), (1, 3), (2, 9))]
    assert run(5) == run(5) and run(5) != run(6) and len(set(run(5))) == 3
    assert len({tuple(run(s)) for s in (0, 1, -1, 2**63, 2**64 - 2)}) == 5
    assert run(5, top_p=0.9) == run(5, top_p=0.9)


def test_unseeded_requests_draw_their_own_numbers():
    reqs = [scheduled(SamplingParams(), uid=uid) for uid in range(100)]
    seeds = [with_seed(SamplingParams(), uid).seed for uid in range(100)]
    assert len(set(seeds)) == 100 and seeds == [with_seed(SamplingParams(), uid).seed for uid in range(100)]
    tokens = choose(torch.zeros(100, 50000), prepare(reqs))
    assert len(set(tokens.tolist())) > 90
    at_the_door = [scheduled(with_seed(SamplingParams(), uid), uid=999) for uid in range(100)]  # a rank that was told the seed
    assert torch.equal(choose(torch.zeros(100, 50000), prepare(at_the_door)), tokens)
    assert with_seed(SamplingParams(seed=0), 5).seed == 0


def test_a_chunk_that_is_not_the_last_may_be_sampled_and_ignored():
    req = Req(0, list(range(10)), SamplingParams(seed=3))
    req.schedule(4)
    assert 0 <= choose(torch.zeros(1, 20), prepare([req])).item() < 20


def test_uniforms_are_uniform_and_independent_of_neighbours():
    values = torch.tensor([[uniform(seed, i) for i in range(200)] for seed in range(200)], dtype=torch.float64)
    assert values.min() > 0 and values.max() <= 1
    counts = torch.histc(values.float(), 100, 0, 1)
    assert chi_square_ok([i for i, c in enumerate(counts.long().tolist()) for _ in range(c)], [0.01] * 100)
    centred = values - values.mean()
    for shifted in (centred[1:, :] * centred[:-1, :], centred[:, 1:] * centred[:, :-1], centred[1:, 1:] * centred[:-1, :-1]):
        assert abs(shifted.mean()) < 4 / 12 / math.sqrt(shifted.numel())
    assert uniform(2**64 - 1, 5) == uniform(-1, 5)


@pytest.mark.parametrize("u,token", [(2.0**-53, 1), (0.25, 1), (0.5000001, 3), (1.0, 3)])
def test_the_ends_of_the_unit_interval_never_draw_the_impossible(u, token):
    logits = torch.tensor([[-INF, 1.0, -INF, 1.0, -INF]])
    for params in (SamplingParams(seed=0), SamplingParams(seed=0, top_k=4)):
        args = rows_at([params], 0)
        args.uniforms.fill_(u)
        assert choose(logits, args).item() == token


BROKEN = [[float("nan")] * 600, [1.0] * 599 + [float("nan")], [INF] + [0.0] * 599, [-INF] * 600]


@pytest.mark.parametrize("rule", [dict(temperature=0), dict(), dict(top_p=0.9), dict(top_k=5), dict(min_p=0.2), dict(temperature=0, presence_penalty=1.0), dict(logit_bias={3: 2.0})], ids=str)
def test_a_row_without_finite_scores_gives_minus_one_and_harms_nobody(rule):
    good = torch.randn(600, generator=torch.Generator().manual_seed(0))
    logits = torch.stack([row for bad in BROKEN for row in (torch.tensor(bad), good)])
    params = [SamplingParams(seed=i, **rule) for i in range(8)]
    tokens = choose(logits, rows_at(params, 0)).tolist()
    assert tokens[::2] == [-1] * 4
    assert tokens[1::2] == [choose(good[None], prepare([scheduled(params[i], 0, i)])).item() for i in (1, 3, 5, 7)] and min(tokens[1::2]) >= 0


def test_float64_logits_stay_float64():
    row = torch.tensor([0.0, 1e-12, 0.0], dtype=torch.float64)
    assert draws(row, 1, temperature=0) == [1] and chi_square_ok(draws(row, 3000), [1 / 3] * 3)


def test_a_greedy_batch_is_one_search_and_logits_are_left_alone():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    args = rows_at([SamplingParams(temperature=0)] * 4, 0)
    assert args.all_greedy and not args.needs_sort and args.uniforms is None
    assert torch.equal(choose(logits, args), logits.argmax(-1))
    assert not rows_at([SamplingParams(temperature=0), SamplingParams(temperature=0.5)], 0).needs_sort
    for extra in (dict(top_k=3), dict(top_p=0.5), dict(min_p=0.1)):
        args = rows_at([SamplingParams(temperature=0), SamplingParams(seed=1, **extra)], 0)
        assert args.needs_sort
        choose(logits, args)
    assert torch.equal(logits, before)


# --- penalties and bias ---

def with_history(params, prompt, answer, uid=0):
    req = Req(uid, prompt, params)
    req.input_ids += answer
    req.schedule(len(req.input_ids))
    return req


def adjusted(row, prompt, answer, params):
    "The scores by a slow loop over the tokens"
    row = [float(x) for x in row]
    for t in set(prompt + answer):
        row[t] = row[t] / params.repetition_penalty if row[t] > 0 else row[t] * params.repetition_penalty
    for t in set(answer): row[t] -= params.frequency_penalty * answer.count(t) + params.presence_penalty
    for t, b in params.logit_bias: row[t] += b
    return row


PENALTIES = [dict(repetition_penalty=1.7), dict(repetition_penalty=0.5), dict(presence_penalty=1.5), dict(presence_penalty=-2), dict(frequency_penalty=0.4), dict(frequency_penalty=-0.7),
    dict(logit_bias={0: 3.0, 7: -100, 9: 0.5}), dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 1.0, 2: -1.0})]


@pytest.mark.parametrize("rule", PENALTIES, ids=str)
def test_adjusted_draws_follow_the_exact_distribution(rule):
    prompt, answer = [0, 1, 1, 6, 5], [1, 2, 2, 2, 8, 0]
    for kind in (dict(), dict(temperature=0.6, top_k=6, top_p=0.9)):
        reqs = [with_history(SamplingParams(seed=i, **rule, **kind), prompt, answer, i) for i in range(12000)]
        want = exact(adjusted(ROW, prompt, answer, reqs[0].params), **kind)
        assert chi_square_ok(choose(torch.tensor(ROW).repeat(12000, 1), prepare(reqs)).tolist(), want)


def test_the_test_notices_a_penalty_that_is_not_applied():
    weak, plain = SamplingParams(frequency_penalty=0.1), [with_history(SamplingParams(seed=i), [0], [0, 3, 3], i) for i in range(20000)]
    assert not chi_square_ok(choose(torch.tensor(ROW).repeat(20000, 1), prepare(plain)).tolist(), exact(adjusted(ROW, [0], [0, 3, 3], weak)))


def test_penalties_equal_transformers_and_openais_formula():
    from transformers import RepetitionPenaltyLogitsProcessor
    logits, ids = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)), [3, 4, 4, 9, 17, 3]
    greedy = [with_history(SamplingParams(temperature=0, repetition_penalty=p, logprobs=0), ids[:3], ids[3:]) for p in (1.3, 0.7, 20.0)]
    for req in greedy:
        theirs = RepetitionPenaltyLogitsProcessor(req.params.repetition_penalty)(torch.tensor([ids]), logits.clone())
        assert choose(logits, prepare([req])).item() == theirs.argmax().item()
        assert adjusted(logits[0].tolist(), ids[:3], ids[3:], req.params) == pytest.approx(theirs[0].tolist(), rel=1e-6)


def mixed_rows(num, vocab, seed=0):
    "(logits, requests) of every kind, with histories of all lengths"
    gen = torch.Generator().manual_seed(seed)
    kinds = [dict(temperature=0), dict(), dict(top_k=50), dict(top_p=0.95), dict(min_p=0.1, temperature=0.7)]
    extras = [dict(), *PENALTIES[:-1], dict(logprobs=3), dict(logprobs=0, frequency_penalty=1.0)]
    def req(i):
        length = int(torch.randint(1, 40, (), generator=gen))
        tokens = torch.randint(0, 12, (2 * length,), generator=gen).tolist()
        return with_history(SamplingParams(seed=i % 7, max_tokens=90, **kinds[i % 5], **extras[i % len(extras)]), tokens[:length], tokens[length:], i)
    return 3 * torch.randn(num, vocab, generator=gen), [req(i) for i in range(num)]


def test_a_mixed_batch_with_penalties_equals_each_row_alone_and_leaves_logits():
    logits, reqs = mixed_rows(44, 700)
    before = logits.clone()
    together = sample(logits, prepare(reqs))
    assert torch.equal(logits, before)
    for i, r in enumerate(reqs): assert choose(logits[i:i + 1], prepare([r])).item() == together.tokens[i]
    order = torch.randperm(44, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(choose(logits[order], prepare([reqs[i] for i in order])), together.tokens[order])


def test_the_token_pool_says_the_same_as_the_requests():
    "Rows in any order, longer than the request, with somebody else's tokens behind its end"
    logits, reqs = mixed_rows(33, 60)
    gen = torch.Generator().manual_seed(5)
    pool = torch.randint(0, 60, (40, 100), generator=gen)
    for r, row in zip(reqs, torch.randperm(40, generator=gen).tolist()):
        r.table_idx = row
        pool[row, :len(r.input_ids)] = torch.tensor(r.input_ids)
    want = choose(logits, prepare(reqs))
    for r in reqs: r.input_ids = r.input_ids[:r.prompt_len]  # the host may know less
    assert torch.equal(choose(logits, prepare(reqs, pool)), want)


def test_only_rows_that_ask_are_adjusted():
    args = rows_at([SamplingParams(temperature=0), SamplingParams(temperature=0, presence_penalty=1.0), SamplingParams(seed=1), SamplingParams(logit_bias={0: 1})], 2)
    assert args.adjustments.rows.tolist() == [1, 3] and args.logprob_rows is None
    assert rows_at([SamplingParams(temperature=0, logit_bias={}, repetition_penalty=1)], 2).adjustments is None


def test_extreme_penalties_stay_finite():
    row = torch.tensor([[3.0, -3.0, 0.0, 1.0]])
    for rule in (dict(repetition_penalty=1e-6), dict(repetition_penalty=100), dict(frequency_penalty=2.0), dict(logit_bias={i: -100 for i in range(4)})):
        assert 0 <= choose(row, prepare([with_history(SamplingParams(seed=1, **rule), [0, 1, 2], [1, 3, 3])])).item() < 4
    impossible = torch.tensor([[0.0, -INF, 1.0]])
    assert choose(impossible, prepare([with_history(SamplingParams(temperature=0, logit_bias={1: 100, 0: 5}, repetition_penalty=0.5), [1], [1])])).item() == 0


# --- log-probabilities ---

def logprobs_of(logits, reqs):
    args = prepare(reqs)
    return read_logprobs(sample(logits, args), args.logprobs)


def test_logprobs_are_the_models_own_whatever_the_rules():
    logits, _ = mixed_rows(1, 300)
    want = torch.log_softmax(logits[0], -1)
    for rule in (dict(temperature=0), dict(), dict(temperature=0.3, top_k=4), dict(presence_penalty=2.0, logit_bias={7: 50}), dict(repetition_penalty=3.0, temperature=2.0)):
        req = with_history(SamplingParams(seed=2, logprobs=4, **rule), [1, 2], [7, 7, 8])
        args = prepare([req])
        out = sample(logits, args)
        got = read_logprobs(out, args.logprobs)[0]
        assert got.logprob == want[out.tokens[0]].item()
        top = want.topk(4)
        assert got == TokenLogprobs(got.logprob, tuple(zip(top.indices.tolist(), top.values.tolist())))


def test_each_row_gets_as_many_as_it_asks_for():
    logits, counts = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)), [None, 0, 20, None, 3]
    got = logprobs_of(logits, [scheduled(SamplingParams(seed=i, logprobs=k), uid=i) for i, k in enumerate(counts)])
    assert {i: len(t.top) for i, t in got.items()} == {1: 0, 2: 20, 4: 3}
    assert logprobs_of(logits, [scheduled(SamplingParams(seed=i)) for i in range(5)]) == {}


def test_logprobs_at_the_edges():
    "Fewer tokens than asked for, ties by id, impossible tokens left out, exact in float64, no end for NaN"
    ties = torch.tensor([[0.0, 1.0, 1.0, -INF, 1.0]], dtype=torch.float64)
    got = logprobs_of(ties, [scheduled(SamplingParams(temperature=0, logprobs=20))])[0]
    assert [t for t, _ in got.top] == [1, 2, 4, 0] and sum(math.exp(lp) for _, lp in got.top) == pytest.approx(1, abs=1e-12) and got.logprob == got.top[0][1]
    nan = torch.tensor([[float("nan"), 1.0], [0.0, 1.0]])
    args = prepare([scheduled(SamplingParams(temperature=0, logprobs=1), uid=i) for i in range(2)])
    out = sample(nan, args)
    assert out.tokens.tolist() == [-1, 1] and read_logprobs(out, args.logprobs)[1].top[0][0] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_host_never_waits_and_the_tokens_are_the_same():
    logits, reqs = mixed_rows(44, 700)
    pool = torch.zeros(44, 100, dtype=torch.int64)
    for r in reqs: r.table_idx = r.uid; pool[r.uid, :len(r.input_ids)] = torch.tensor(r.input_ids)
    want, args, there, pool = sample(logits.double(), prepare(reqs)), prepare(reqs, pool.cuda()), logits.double().cuda(), pool.cuda()
    sample(there, args)  # the first call loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try: got = sample(there, args)
    finally: torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.tokens.cpu(), want.tokens) and torch.allclose(got.chosen.cpu(), want.chosen) and torch.equal(got.top_ids.cpu(), want.top_ids)


# --- behind the scheduler: what the device knows is enough, whatever the loop does ---

@pytest.fixture
def make(tiny_model_dir):
    "Schedulers over the tiny float64 model; at the end nothing may be held"
    made = []
    def make(overlap=False, **kw):
        engine = Engine(EngineConfig(**(dict(model=str(tiny_model_dir), dtype="float64", device="cpu", page_size=4, num_pages=64, max_running_requests=8,
            disable_overlap=not overlap) | kw)))
        made.append(make_scheduler(engine))
        return made[-1]
    yield make
    for s in made:
        s.close(); s.check_integrity()
        stats = s.stats()
        s.engine.close()
        assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0 and stats["rows_free"] == s.engine.dummy_row, stats


def run(s):
    "Step to the end; events by uid"
    out = {}
    while s.has_work:
        for e in s.step(): out.setdefault(e.uid, []).append(e)
        s.check_integrity()
    return out


def oracle(engine, prompt, params):
    "(token, its log-probability, the likeliest) of a greedy request, one full forward pass a token"
    told = []
    def loop():
        ids = list(prompt)
        while len(ids) < len(prompt) + params.max_tokens:
            row = engine.model(full_context([ids], "cpu"), DenseAttention())[0]
            logprobs = torch.log_softmax(row, -1)
            best = max(range(len(row)), key=lambda t, new=adjusted(row, list(prompt), ids[len(prompt):], params): (new[t], -t))
            told.append((best, logprobs[best].item(), logprobs.topk(params.logprobs or 0).indices.tolist()))
            ids.append(best)
    engine.stream.submit(loop).synchronize()
    return told


def penalised(i):
    return SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=(None, 3, 0)[i % 3],
        **[dict(repetition_penalty=1.5), dict(presence_penalty=2.0), dict(), dict(frequency_penalty=2.0, repetition_penalty=1.1), dict(logit_bias={5: 4.0, 9: -3}, presence_penalty=-1.0)][i % 5])


WORK = [([3 + (7 * i + j * j) % 90 for j in range(4 + 3 * i)], penalised(i)) for i in range(10)]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("config", [dict(), dict(max_prefill_length=5, policy="mixed"), dict(num_pages=12, page_size=4, admission="optimistic", max_seq_len=48)], ids=["whole", "chunks", "retraction"])
def test_penalties_and_logprobs_equal_the_oracle(make, overlap, config):
    s = make(overlap, **config)
    for uid, (prompt, params) in enumerate(WORK): s.add(uid, prompt, params)
    out = run(s)
    if "admission" in config: assert s.stats()["retracted"] > 0
    plain = [oracle(s.engine, prompt, SamplingParams(temperature=0, max_tokens=10)) for prompt, _ in WORK]
    changed = 0
    for uid, (prompt, params) in enumerate(WORK):
        want, events = oracle(s.engine, prompt, params), out[uid]
        assert [e.token_id for e in events] == [t for t, *_ in want]
        changed += [t for t, *_ in want] != [t for t, *_ in plain[uid]]
        for e, (token, logprob, top) in zip(events, want):
            if params.logprobs is None: assert e.logprobs is None; continue
            assert e.logprobs.logprob == pytest.approx(logprob, abs=1e-9) and [t for t, _ in e.logprobs.top] == top
    assert changed >= 6, "the rules make a difference"


def poison(monkeypatch, when):
    "NaN in the scores of whoever asks for log-probabilities, the `when`th time it samples"
    calls = [0]
    def poisoned(logits, args):
        if args.logprob_rows is not None:
            calls[0] += 1
            if calls[0] == when: logits[args.logprob_rows[0], 7] = float("nan")
        return sample(logits, args)
    monkeypatch.setattr("minisgl_edu.engine.sample", poisoned)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("when", [1, 2, 5, 6])
@pytest.mark.parametrize("rule", [dict(temperature=0), dict(seed=1, top_p=0.9), dict(seed=1, presence_penalty=1.0)], ids=str)
def test_nan_ends_one_request_with_an_error(make, monkeypatch, overlap, when, rule):
    def others(s): return [s.add(uid, [uid + 3, 5, 8], SamplingParams(max_tokens=9, seed=uid, ignore_eos=True, frequency_penalty=uid / 2)) for uid in (1, 2, 3)]
    s = make(overlap, max_prefill_length=8)
    others(s)
    alone = {uid: [e.token_id for e in events] for uid, events in run(s).items()}
    poison(monkeypatch, when)
    victim = [40 + i for i in range(20)]  # its prompt is at least two chunks
    s.add(0, victim, SamplingParams(max_tokens=9, ignore_eos=True, logprobs=0, **rule))
    others(s)
    out = run(s)
    *before, last = out.pop(0)
    assert (last.finish_reason, last.token_id, last.error.code) == ("error", None, "not_finite") and "not finite numbers" in str(last.error)
    assert len(before) < when and all(e.finish_reason is None and e.token_id >= 0 for e in before)
    assert {uid: [e.token_id for e in events] for uid, events in out.items()} == alone
    monkeypatch.undo()
    s.add(9, victim, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
    s.add(10, victim, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, logprobs=0))
    after = run(s)
    assert [e.token_id for e in after[9]] == [e.token_id for e in after[10]] == [t for t, *_ in oracle(s.engine, victim, SamplingParams(temperature=0, max_tokens=3))]


def test_a_bias_outside_the_vocabulary_is_refused_at_the_door(make):
    s = make()
    s.add(0, [3, 4], SamplingParams(temperature=0, max_tokens=2, logit_bias={127: 100}, ignore_eos=True))
    with pytest.raises(RequestError, match="logit_bias names token 128; .* 0 to 127") as e: s.add(1, [3, 4], SamplingParams(logit_bias={5: 1, 128: 1}))
    assert e.value.param == "logit_bias" and [e.token_id for e in run(s)[0]] == [127, 127]


def test_an_implicit_limit_is_cut_to_the_room_an_explicit_one_is_refused(make):
    s = make(max_seq_len=20)
    prompt = [3] * 15
    s.add(0, prompt, SamplingParams(temperature=0, ignore_eos=True))
    with pytest.raises(RequestError, match="max_tokens is 16.*room for 5"): s.add(1, prompt, SamplingParams(temperature=0, max_tokens=16))
    s.add(2, [3], SamplingParams(temperature=0, ignore_eos=True))
    out = run(s)
    assert len(out[0]) == 5 and len(out[2]) == 16


def test_a_seed_gives_the_same_text_with_penalties_in_any_company(make):
    params = SamplingParams(seed=4, max_tokens=12, ignore_eos=True, frequency_penalty=0.8, repetition_penalty=1.2, top_p=0.95, logit_bias={9: 1.0})
    alone = make()
    alone.add(0, [5, 6, 7], params)
    want = [e.token_id for e in run(alone)[0]]
    crowd = make(True, max_prefill_length=4, policy="mixed")
    for uid, (prompt, other) in enumerate(WORK[:5]): crowd.add(uid, prompt, other)
    crowd.add(77, [5, 6, 7], params)
    assert [e.token_id for e in run(crowd)[77]] == want


def test_a_request_without_a_seed_has_one_when_it_is_queued(make):
    s = make()
    s.add(0, [5], SamplingParams(max_tokens=2))
    assert s.ledger.live[0].params.seed == with_seed(SamplingParams(), 0).seed
