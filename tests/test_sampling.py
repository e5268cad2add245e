"Sampling against exact distributions; rows of a batch against the same rows alone"
import math

import pytest
import torch

from minisgl_edu.core import Req, SamplingParams
from minisgl_edu.sampling import prepare, request_seed, sample, uniform

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
    return sample(torch.as_tensor(row).repeat(num, 1), rows_at(params, 0)).tolist()


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
    assert chi_square_ok(sample(torch.tensor(ROW).repeat(4000, 1), prepare(reqs)).tolist(), exact(ROW))


def test_zero_small_and_plain_temperatures_side_by_side():  # F18
    logits = torch.tensor([3.0, 1.0, 2.999, -INF]).repeat(3, 1)
    params = [SamplingParams(temperature=t, seed=7, max_tokens=2000) for t in (0, 1e-4, 1.0)]
    tokens = torch.stack([sample(logits, rows_at(params, i)) for i in range(1000)])
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1] == 0).sum() >= 990
    assert chi_square_ok(tokens[:, 2].tolist(), exact(logits[2].tolist()))
    assert (tokens != 3).all()
    for row in range(3):  # rows do not affect each other
        for i in range(0, 1000, 50):
            assert sample(logits[:1], prepare([scheduled(params[row], i, row)])).item() == tokens[i, row]


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
    assert rows_at(greedy, 0).all_greedy and sample(logits, rows_at(greedy, 0)).tolist() == [17, 2, 0]
    mixed = greedy[:2] + [SamplingParams(seed=1)]
    assert sample(logits, rows_at(mixed, 0))[:2].tolist() == [17, 2]


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
        together = sample(logits, rows_at(params, position))
        for i in range(24):
            assert sample(logits[i:i + 1], prepare([scheduled(params[i], position, uid=99)])).item() == together[i]
        order = torch.randperm(24, generator=gen)
        shuffled = sample(logits[order], prepare([scheduled(params[i], position, int(i)) for i in order]))
        assert torch.equal(shuffled, together[order])


def test_same_seed_same_draws_other_seed_other_draws():
    row = torch.zeros(1, 50000)
    def run(seed, **kwargs): return [sample(row, prepare([scheduled(SamplingParams(seed=seed, **kwargs), i, prompt_len=n)])).item() for i, n in ((0, 3), (1, 3), (2, 9))]
    assert run(5) == run(5) and run(5) != run(6) and len(set(run(5))) == 3
    assert len({tuple(run(s)) for s in (0, 1, -1, 2**63, 2**64 - 2)}) == 5
    assert run(5, top_p=0.9) == run(5, top_p=0.9)


def test_unseeded_requests_draw_their_own_numbers():
    reqs = [scheduled(SamplingParams(), uid=uid) for uid in range(100)]
    assert len({request_seed(r) for r in reqs}) == 100
    assert [request_seed(r) for r in reqs] == [request_seed(scheduled(SamplingParams(), uid=uid)) for uid in range(100)]
    assert len(set(sample(torch.zeros(100, 50000), prepare(reqs)).tolist())) > 90


def test_a_chunk_that_is_not_the_last_may_be_sampled_and_ignored():
    req = Req(0, list(range(10)), SamplingParams(seed=3))
    req.schedule(4)
    assert 0 <= sample(torch.zeros(1, 20), prepare([req])).item() < 20


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
        assert sample(logits, args).item() == token


def test_nan_logits_do_not_crash_the_batch():
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    good = logits[2].clone()
    logits[:2] = float("nan")
    params = [SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.9), SamplingParams(seed=0, top_k=5)]
    tokens = sample(logits, rows_at(params, 0))
    assert ((tokens >= 0) & (tokens < 100)).all()
    assert tokens[2] == sample(good[None], prepare([scheduled(params[2], 0, 2)]))[0]


def test_float64_logits_stay_float64():
    row = torch.tensor([0.0, 1e-12, 0.0], dtype=torch.float64)
    assert draws(row, 1, temperature=0) == [1] and chi_square_ok(draws(row, 3000), [1 / 3] * 3)


def test_a_greedy_batch_is_one_search_and_logits_are_left_alone():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    args = rows_at([SamplingParams(temperature=0)] * 4, 0)
    assert args.all_greedy and not args.needs_sort and args.uniforms is None
    assert torch.equal(sample(logits, args), logits.argmax(-1))
    assert not rows_at([SamplingParams(temperature=0), SamplingParams(temperature=0.5)], 0).needs_sort
    for extra in (dict(top_k=3), dict(top_p=0.5), dict(min_p=0.1)):
        args = rows_at([SamplingParams(temperature=0), SamplingParams(seed=1, **extra)], 0)
        assert args.needs_sort
        sample(logits, args)
    assert torch.equal(logits, before)
