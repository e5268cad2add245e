"Layers against plain formulas and against transformers; sharded layers against whole ones"
import math, os, subprocess, sys

import numpy as np, pytest
import torch
import torch.nn.functional as F
from types import SimpleNamespace

from minisgl_edu import layers
from minisgl_edu.checkpoint import materialize
from minisgl_edu.core import Ops
from minisgl_edu.distributed import TPGroup, single
from minisgl_edu.layers import (ColumnLinear, LMHead, NumbaOps, PackedOps, RMSNorm, RowLinear, TorchOps, VocabEmbedding, attention_factor, can_loop, can_pack, default_inv_freq,
    rope_inv_freq, rope_rows, rope_table)

OPS = TorchOps()
LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def rope_config(head_dim=64, theta=10000.0, scaling=None):
    return SimpleNamespace(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_torch_ops_speak_the_protocol():
    assert isinstance(OPS, Ops)


@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_norms_follow_the_formula_and_leave_their_inputs_alone(dtype, tol, num_tokens):
    x, residual, weight = rand(num_tokens, 48, dtype=dtype), rand(num_tokens, 48, seed=1, dtype=dtype), rand(48, seed=2, dtype=dtype)
    before = x.clone(), residual.clone()
    want = lambda t: (t.double() / (t.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5).double(), want(x), rtol=tol, atol=tol)
    normed, summed = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed.double(), want(summed), rtol=tol, atol=tol)
    assert normed.dtype == summed.dtype == dtype and torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_norm_uses_eps_and_weight():
    tiny = torch.full((1, 4), 1e-4)
    assert OPS.rms_norm(tiny, torch.ones(4), 1e-5)[0, 0] == pytest.approx(1e-4 / math.sqrt(1e-8 + 1e-5), rel=1e-5)
    assert torch.equal(OPS.rms_norm(tiny, 2 * torch.ones(4), 1e-5), 2 * OPS.rms_norm(tiny, torch.ones(4), 1e-5))


@pytest.mark.parametrize("dtype,tol", [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 3e-2)])
def test_rope_equals_transformers(dtype, tol):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    q, k, positions = rand(9, 6, 16, dtype=dtype), rand(9, 2, 16, seed=1, dtype=dtype), torch.tensor([0, 1, 2, 7, 100, 3, 50, 99, 0])
    rows = rope_rows(rope_table(rope_config(16), 128), positions, dtype)
    got = OPS.rope(q, k, rows)
    hf = LlamaRotaryEmbedding(LlamaConfig(hidden_size=96, num_attention_heads=6, max_position_embeddings=128))
    cos, sin = hf(q, positions[None])
    want = [t[0] for t in apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)]
    for g, w in zip(got, want):
        assert g.dtype == dtype and g.shape == w.shape
        torch.testing.assert_close(g, w, rtol=tol, atol=tol)


def test_rope_takes_strided_slices_and_keeps_lengths_and_relative_angles():
    qkv = rand(5, 8, 16, dtype=torch.float64)
    table = rope_table(rope_config(16), 64)
    rows = rope_rows(table, torch.arange(5), torch.float64)
    q, k = OPS.rope(qkv[:, :4], qkv[:, 4:6], rows)
    same_q, _ = OPS.rope(qkv[:, :4].contiguous(), qkv[:, 4:6].contiguous(), rows)
    assert torch.equal(q, same_q)
    torch.testing.assert_close(q.norm(dim=-1), qkv[:, :4].norm(dim=-1), rtol=1e-6, atol=0)
    assert torch.equal(q[0], qkv[0, :4])  # position 0 is not turned
    a, b = rand(1, 1, 16, dtype=torch.float64), rand(1, 1, 16, seed=1, dtype=torch.float64)
    def score(i, j):
        turn = lambda x, p: OPS.rope(x, x, rope_rows(table, torch.tensor([p]), torch.float64))[0]
        return (turn(a, i) * turn(b, j)).sum().item()
    assert score(7, 3) == pytest.approx(score(40, 36), abs=1e-5) and abs(score(7, 3) - score(7, 4)) > 1e-3


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_frequencies(key):  # F36
    scaling = {**LLAMA3, key: "llama3"}
    if key == "type": del scaling["rope_type"]
    got, plain = rope_inv_freq(rope_config(64, 500000.0, scaling)), default_inv_freq(64, 500000.0)
    assert len(got) == 32
    assert torch.equal(got[:15], plain[:15])
    assert ((got[15:18] < plain[15:18]) & (got[15:18] > plain[15:18] / 32)).all()
    torch.testing.assert_close(got[18:], plain[18:] / 32, rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor,low,high,original,theta,head_dim", [(32.0, 1.0, 4.0, 8192, 5e5, 64), (8.0, 1.0, 4.0, 8192, 5e5, 128), (4.0, 2.0, 8.0, 64, 1e4, 16)])
def test_llama3_frequencies_equal_transformers(factor, low, high, original, theta, head_dim):  # F36
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    scaling = dict(rope_type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original)
    hf = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters={**scaling, "rope_theta": theta})
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    torch.testing.assert_close(rope_inv_freq(rope_config(head_dim, theta, scaling)), want, rtol=1e-6, atol=1e-9)


LONG = dict(factor=4.0, original_max_position_embeddings=32)
SCALINGS = {
    "linear": dict(rope_type="linear", factor=2.5), "llama3": dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **LONG),
    "yarn": dict(rope_type="yarn", **LONG), "yarn betas": dict(rope_type="yarn", beta_fast=4.0, beta_slow=0.5, **LONG), "yarn whole": dict(rope_type="yarn", truncate=False, **LONG),
    "yarn as deepseek": dict(rope_type="yarn", mscale=1.0, mscale_all_dim=0.8, **LONG), "yarn one mscale": dict(rope_type="yarn", mscale=0.7, **LONG),
    "yarn given": dict(rope_type="yarn", attention_factor=1.25, **LONG), "yarn of nothing": dict(rope_type="yarn", factor=1.0, original_max_position_embeddings=128),
    "yarn as qwen": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), "yarn short": dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=8),
}

@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim,theta", [(16, 1e4), (128, 1e6)])
def test_scalings_equal_transformers(name, key, head_dim, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    scaling = SCALINGS[name]
    hf = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=128, rope_parameters={**scaling, "rope_theta": theta})
    want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf, "cpu")
    ours = rope_config(head_dim, theta, {key: scaling["rope_type"], **{k: v for k, v in scaling.items() if k != "rope_type"}})
    torch.testing.assert_close(rope_inv_freq(ours), want, rtol=1e-6, atol=1e-9)
    assert attention_factor(ours.rope_scaling) == pytest.approx(factor, rel=1e-12)
    angles = torch.outer(torch.arange(128.0), want)
    torch.testing.assert_close(rope_table(ours, 128), torch.cat((angles.cos(), angles.sin()), -1) * factor, rtol=0, atol=2e-5)


def test_unknown_rope_scaling_is_refused():  # F36
    for scaling in (dict(rope_type="longrope", factor=4.0), dict(type="dynamic", factor=2.0)):
        with pytest.raises(ValueError, match="longrope|dynamic"): rope_inv_freq(rope_config(scaling=scaling))


@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_rope_with_norms_is_norms_then_rope(dtype, tol):
    qkv, weights = rand(5, 8, 16, dtype=dtype), [1 + 0.1 * rand(16, seed=i, dtype=dtype) for i in (1, 2)]
    q, k, rows = qkv[:, :4], qkv[:, 4:6], rope_rows(rope_table(rope_config(16), 64), torch.arange(5), dtype)
    norm = lambda x, w: (x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * w.double()).to(dtype)
    for got, want in zip(OPS.rope(q, k, rows, *weights, 1e-3), OPS.rope(norm(q, weights[0]), norm(k, weights[1]), rows)):
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 1, 4), (0, 0, 0, 5), (2, 2, 2, 2), (0, 0, 0, 0)])
def test_grouped_linear_gives_each_row_its_matrix(dtype, counts):
    weight, rows = rand(4, 7, 6, dtype=dtype), sum(counts)
    x, ends = rand(rows, 6, seed=1, dtype=dtype), torch.tensor(counts).cumsum(0).int()
    want = torch.cat([F.linear(part, w) for part, w in zip(x.split(counts), weight)])
    for ops in (OPS, PackedOps()): torch.testing.assert_close(ops.grouped_linear(x, weight, ends), want)


def test_silu_mul():
    x = rand(3, 20)
    torch.testing.assert_close(OPS.silu_mul(x), F.silu(x[:, :10]) * x[:, 10:])


class Seat(TPGroup):
    "One of several ranks whose collectives hand back this rank's part, for the test to combine"
    def all_reduce(self, t): return t
    def all_gather(self, t, dim=-1): return t


def fill(module, prefix, tensors):
    "Do by hand what loading does: each slot takes its part"
    materialize(module, "cpu", torch.float64)
    slots = module.slots(prefix)
    for name, slot in slots.items():
        assert tuple(tensors[name].shape) == slot.shape
        slot.param.data[slot.dst] = tensors[name][slot.src or ...]
    return set(slots)


def shards(make, prefix, tensors, size):
    modules = []
    for rank in range(size):
        with torch.device("meta"): module = make(Seat(rank, size) if size > 1 else single())
        fill(module, prefix, tensors)
        modules.append(module)
    return modules


def test_fused_columns_equal_separate_linears_whole_and_sharded():
    outs, x = dict(q_proj=12, k_proj=4, v_proj=4), rand(3, 10, dtype=torch.float64)
    w = {f"p.{n}.{kind}": rand(*((o, 10) if kind == "weight" else (o,)), seed=i, dtype=torch.float64)
         for i, (n, o) in enumerate(outs.items()) for kind in ("weight", "bias")}
    want = {n: F.linear(x, w[f"p.{n}.weight"], w[f"p.{n}.bias"]) for n in outs}
    for size in (1, 2, 4):
        parts = [m(x).split(m.sizes, -1) for m in shards(lambda tp: ColumnLinear(10, outs, True, tp, OPS), "p", w, size)]
        for i, name in enumerate(outs): torch.testing.assert_close(torch.cat([p[i] for p in parts], -1), want[name])


def test_ranks_may_share_a_part_of_an_output():
    x, w = rand(3, 10, dtype=torch.float64), {f"p.{n}.{kind}": rand(*((8, 10) if kind == "weight" else (8,)), seed=i, dtype=torch.float64)
        for i, n in enumerate(("q_proj", "k_proj")) for kind in ("weight", "bias")}
    make = lambda tp: ColumnLinear(10, dict(q_proj=8, k_proj=8), True, tp, OPS, dict(k_proj=slice(tp.rank // 2 * 4, tp.rank // 2 * 4 + 4)))
    for rank, module in enumerate(shards(make, "p", w, 4)):
        q, k = module(x).split(module.sizes, -1)
        torch.testing.assert_close(q, F.linear(x, w["p.q_proj.weight"], w["p.q_proj.bias"])[:, 2 * rank:2 * rank + 2])
        torch.testing.assert_close(k, F.linear(x, w["p.k_proj.weight"], w["p.k_proj.bias"])[:, rank // 2 * 4:][:, :4])


def test_row_linear_embedding_and_head_add_or_line_up_over_ranks():
    ids, x = torch.tensor([0, 5, 11, 6]), rand(4, 8, dtype=torch.float64)
    w = {"o.weight": rand(6, 8, dtype=torch.float64), "e.weight": rand(12, 8, seed=1, dtype=torch.float64), "h.weight": rand(12, 8, seed=2, dtype=torch.float64)}
    for size in (1, 2, 4):
        rows = shards(lambda tp: RowLinear(8, 6, tp, OPS), "o", w, size)
        torch.testing.assert_close(sum(m(x[:, m.part]) for m in rows), F.linear(x, w["o.weight"]))
        embeddings = shards(lambda tp: VocabEmbedding(12, 8, tp, OPS), "e", w, size)
        assert torch.equal(sum(m(ids) for m in embeddings), w["e.weight"][ids])
        heads = shards(lambda tp: LMHead(VocabEmbedding(12, 8, tp, OPS), False), "h", w, size)
        torch.testing.assert_close(torch.cat([m(x) for m in heads], -1), F.linear(x, w["h.weight"]))


def test_tied_head_has_no_weight_of_its_own():  # F35
    with torch.device("meta"):
        both = torch.nn.Module()
        both.e = VocabEmbedding(12, 8, single(), OPS)
        both.h = LMHead(both.e, True)
    materialize(both, "cpu", torch.float32)
    assert both.h.weight is both.e.weight and both.h.slots("h") == {} and len(list(both.parameters())) == 1


def test_uneven_shares_are_refused_with_both_numbers():
    for make in (lambda tp: ColumnLinear(8, dict(q_proj=10), False, tp, OPS), lambda tp: RowLinear(10, 8, tp, OPS), lambda tp: VocabEmbedding(10, 8, tp, OPS)):
        with pytest.raises(ValueError, match=r"10.*3"): make(Seat(0, 3))


def test_norm_module():
    norm = RMSNorm(8, 1e-5, OPS)
    norm.weight.data = rand(8)
    x, r = rand(2, 8, seed=1), rand(2, 8, seed=2)
    normed, summed = norm(x, r)
    assert torch.equal(normed, norm(summed)) and torch.equal(summed, x + r)


needs_packing = pytest.mark.skipif(not can_pack("cpu", torch.float32), reason="this build of PyTorch has no packed products")


def test_packing_is_for_float32_on_cpus():
    assert not can_pack("cpu", torch.float64) and not can_pack("cpu", torch.bfloat16) and not can_pack("cuda", torch.float32)


@needs_packing
@pytest.mark.parametrize("out,size", [(960, 576), (576, 1536), (7, 5), (1, 64), (100, 33)])
def test_packed_products_equal_plain_ones_for_every_number_of_tokens(out, size):
    ops, weight, bias = PackedOps(), torch.nn.Parameter(rand(out, size)), rand(out, seed=1)
    with torch.inference_mode():
        for n in range(1, 70):
            x = rand(n, size, seed=n)
            want = x.double() @ weight.double().T
            torch.testing.assert_close(ops.linear(x, weight).double(), want, rtol=1e-5, atol=2e-5 * size**0.5)
            torch.testing.assert_close(ops.linear(x, weight, bias).double(), want + bias.double(), rtol=1e-5, atol=2e-5 * size**0.5)
            wide = rand(n, 2 * size, seed=n)[:, ::2]  # not contiguous
            torch.testing.assert_close(ops.linear(wide, weight).double(), wide.double() @ weight.double().T, rtol=1e-5, atol=2e-5 * size**0.5)


@needs_packing
def test_weights_are_packed_once_each():
    ops, weights = PackedOps(), [rand(24, 16, seed=i) for i in range(3)]
    for n in (1, 3, 8, 64, 200):
        for w in weights: torch.testing.assert_close(ops.linear(rand(n, 16), w), F.linear(rand(n, 16), w), rtol=1e-5, atol=1e-4)
    assert len(ops._packed) == 3
    assert isinstance(ops, Ops)


# --- loops of our own ---------------------------------------------------------------------------------------------------

loops = pytest.mark.skipif(not can_loop("cpu", torch.float32), reason="needs numba")

def looped(): return NumbaOps()

@loops
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 65])
@pytest.mark.parametrize("size", [1, 10, 96])
def test_loops_equal_torch(num_tokens, size):
    x, residual, weight = rand(num_tokens, size), rand(num_tokens, size, seed=1), rand(size, seed=2)
    torch.testing.assert_close(looped().rms_norm(x, weight, 1e-5), OPS.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    want, got = OPS.add_rms_norm(x, residual, weight, 1e-5), looped().add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    gate_up = 8 * rand(num_tokens, 2 * size, seed=3)
    torch.testing.assert_close(looped().silu_mul(gate_up), OPS.silu_mul(gate_up), rtol=1e-5, atol=1e-6)

@loops
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 65])
def test_loops_turn_strided_heads_in_place_and_leave_the_values_alone(num_tokens, normed):
    qkv = rand(num_tokens, 8, 16)
    rows = rope_rows(rope_table(rope_config(16), 128), torch.arange(num_tokens) + 3, torch.float32)
    norms = (rand(16, seed=1), rand(16, seed=2), 1e-5) if normed else ()
    want, values = OPS.rope(*qkv.clone().split((4, 2, 2), 1)[:2], rows, *norms), qkv[:, 6:].clone()
    got = looped().rope(*qkv.split((4, 2, 2), 1)[:2], rows, *norms)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(qkv[:, 6:], values)

@loops
def test_loops_leave_other_types_and_layouts_to_torch():
    for dtype in (torch.float64, torch.bfloat16):
        x, weight = rand(3, 8, dtype=dtype), rand(8, seed=1, dtype=dtype)
        assert torch.equal(looped().rms_norm(x, weight, 1e-5), OPS.rms_norm(x, weight, 1e-5))
        assert torch.equal(looped().silu_mul(x), OPS.silu_mul(x))
        rows = rope_rows(rope_table(rope_config(8), 8), torch.arange(3), dtype)
        for a, b in zip(looped().rope(x[:, None], x[:, None], rows), OPS.rope(x[:, None], x[:, None], rows)): assert torch.equal(a, b)
    columns = rand(8, 3).T  # not contiguous
    torch.testing.assert_close(looped().rms_norm(columns, torch.ones(8), 1e-5), OPS.rms_norm(columns, torch.ones(8), 1e-5))
    across = rand(3, 8, 2).transpose(1, 2)  # heads whose features lie apart
    rows = rope_rows(rope_table(rope_config(8), 8), torch.arange(3), torch.float32)
    for a, b in zip(looped().rope(across, across, rows), OPS.rope(across, across, rows)): assert torch.equal(a, b)

@loops
def test_loops_do_not_hide_what_is_broken():
    wild = torch.tensor([[math.nan, math.inf, -math.inf, 1e30, 2.0, 1.0, 0.0, -1.0]])
    torch.testing.assert_close(looped().silu_mul(wild), OPS.silu_mul(wild), equal_nan=True)
    for bad in (math.nan, math.inf):
        x = torch.ones(2, 8); x[1, 3] = bad
        out = looped().rms_norm(x, torch.ones(8), 1e-5)
        assert out[0].isfinite().all() and out[1].isnan().any()

@loops
def test_exponential_over_its_whole_range():
    values = np.linspace(-87, 88, 20_011, dtype=np.float32)
    got = np.array([layers.exp(v) for v in values], dtype=np.float64)
    assert np.abs(got / np.exp(values.astype(np.float64)) - 1).max() < 1e-5
    near = np.linspace(-1, 1, 2_001, dtype=np.float32)
    assert max(abs(layers.exp(v) / math.exp(v) - 1) for v in near) < 5e-7
    assert layers.exp(np.float32(np.inf)) == np.inf and 0 <= layers.exp(np.float32(-np.inf)) < 1e-37 and math.isnan(layers.exp(np.float32(np.nan)))

@loops
@pytest.mark.parametrize("out,size", [(960, 576), (576, 1536), (7, 5), (1, 64), (100, 33), (64, 1), (33, 40)])
def test_our_product_equals_the_plain_one_for_every_number_of_tokens(out, size):
    "Every tile, several passes, several blocks, ragged panels, a bias or none"
    ops, weight, bias = looped(), torch.nn.Parameter(rand(out, size)), rand(out, seed=1)
    with torch.inference_mode():
        for n in (*range(1, 40), 64, 96, 97, 98, 193, 300):
            x = rand(n, size, seed=n)
            want = x.double() @ weight.double().T
            torch.testing.assert_close(ops.linear(x, weight).double(), want, rtol=1e-5, atol=2e-5 * size**0.5)
            torch.testing.assert_close(ops.linear(x, weight, bias).double(), want + bias.double(), rtol=1e-5, atol=2e-5 * size**0.5)
        wide = rand(3, 2 * size)[:, ::2]  # not contiguous
        torch.testing.assert_close(ops.linear(wide, weight).double(), wide.double() @ weight.double().T, rtol=1e-5, atol=2e-5 * size**0.5)
        assert ops.linear(rand(0, size), weight).shape == (0, out)
    assert len(ops._panels) == 1, "laid out once"

@loops
def test_loops_leave_what_does_not_fit_to_torch():
    "Wrong shapes raise as PyTorch's do, and are never read past their end"
    ops, weight = looped(), rand(64, 32)
    with pytest.raises(RuntimeError): ops.linear(rand(4, 10), weight)
    torch.testing.assert_close(ops.linear(rand(2, 3, 32), weight), F.linear(rand(2, 3, 32), weight), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ops.linear(rand(32), weight), F.linear(rand(32), weight), rtol=1e-5, atol=1e-4)
    with pytest.raises(RuntimeError): ops.add_rms_norm(rand(4, 32), rand(3, 32), torch.ones(32), 1e-5)

@loops
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_our_product_on_any_team(threads):
    "Panels are shared out without a gap, whatever the number of threads; with more of them than panels some have nothing to do"
    before, weight = torch.get_num_threads(), rand(70, 24)
    try:
        torch.set_num_threads(threads)
        many = threads * layers.MANY # from here on tokens are shared out, and not panels
        for n in (1, 2, 13, 100, many - 1, many, many + 5, 1000): torch.testing.assert_close(looped().linear(rand(n, 24), weight), rand(n, 24) @ weight.T, rtol=1e-5, atol=1e-4)
        test_loops_equal_torch(7, 10)
    finally: torch.set_num_threads(before)

@loops
def test_our_product_reads_and_writes_nothing_beside_its_place():
    "Values around the input and the output are NaN, and stay"
    ops, weight = looped(), rand(45, 19)
    for n in (1, 3, 13, 97, 255, 256, 301):
        frame_x, frame_out = torch.full((n + 2, 19), math.nan), torch.full((n + 2, 45), math.nan)
        frame_x[1:-1] = rand(n, 19)
        panels = layers.panels_of(weight)
        layers.product_loop(frame_x[1].data_ptr(), panels.data_ptr(), 0, frame_out[1].data_ptr(), n, 19, 45)
        torch.testing.assert_close(frame_out[1:-1], rand(n, 19) @ weight.T, rtol=1e-5, atol=1e-4)
        assert frame_out[0].isnan().all() and frame_out[-1].isnan().all()

def test_without_numba_torch_does_it_all():
    "Nothing else breaks where the package is missing"
    code = ("import sys; sys.modules['numba'] = None\n"
            "import torch; from minisgl_edu.layers import can_loop; from minisgl_edu.attention import make_backend; from minisgl_edu.kvcache import KVPool, create_page_table\n"
            "from minisgl_edu.engine import pick_parts\n"
            "pool, table = KVPool(1, 2, 4, 2, 8, 'cpu', torch.float32), create_page_table(1, 8, 'cpu')\n"
            "cpu = torch.device('cpu')\n"
            "print(can_loop('cpu', torch.float32), type(make_backend('auto', None, pool, table)).__name__, type(pick_parts('auto', cpu, torch.float32, False)[0]).__name__)\n"
            "try: pick_parts('numba', cpu, torch.float32, True)\n"
            "except ValueError as e: print(e)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert out.stdout.splitlines() == ["False TorchAttention TorchOps", "attention_backend='numba' needs the package numba, a CPU and float32; it is not installed"], out.stderr

def test_jit_switched_off_means_torch():
    code = "import torch; from minisgl_edu.layers import can_loop; import minisgl_edu.attention; print(can_loop('cpu', torch.float32))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, "NUMBA_DISABLE_JIT": "1"})
    assert out.stdout.split() == ["False"], out.stderr

@loops
@pytest.mark.parametrize("harm", ["truncate", "fill", "gone"])
def test_kept_code_is_a_convenience(tmp_path, harm):
    "A broken, full or vanished cache of machine code costs the time to translate, and nothing else"
    code = ("import sys, torch; from minisgl_edu.layers import NumbaOps; import minisgl_edu.layers as l, shutil, os, resource\n"
            "if sys.argv[1] == 'gone': NumbaOps().rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5); shutil.rmtree(os.environ['NUMBA_CACHE_DIR']); open(os.environ['NUMBA_CACHE_DIR'], 'w').close()\n"
            "if sys.argv[1] == 'fill': resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)); import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "print(NumbaOps().silu_mul(torch.ones(1, 4)).tolist())")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    def run(how): return subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=300, env=env)
    if harm == "truncate":
        assert run("plain").returncode == 0
        files = [f for f in (tmp_path / "kept").rglob("*") if f.is_file()]
        assert files
        for f in files: f.write_bytes(f.read_bytes()[:30])
        harm = "plain"
    out = run(harm)
    assert out.stdout.startswith("[[0.73"), out.stderr


def test_the_tile_of_another_processor(tmp_path):
    "Registers decide the widths of panels and tiles: those that are not this processor's give the same products and the same attention"
    code = """
import types, torch, torch.nn.functional as F, llvmlite.binding as binding
ask = binding.get_host_cpu_features
class Other(type(ask())): # what Numba asks for is what there is: it lists all features
    def get(self, name, *default): return super().get(name, *default) != (name == "avx512f")
binding.get_host_cpu_features = lambda: Other(ask())
from minisgl_edu import layers
from minisgl_edu.attention import NumbaAttention
from minisgl_edu.kvcache import KVPool, create_page_table
from minisgl_edu.core import ForwardContext

g = torch.Generator().manual_seed(0)
def random(*shape): return torch.randn(shape, generator=g)
ops = layers.NumbaOps()
for outs, size in ((50, 24), (96, 64)):
    w, b = random(outs, size), random(outs)
    for n in (1, 2, 4, 5, 6, 11, 12, 13, 37, 100, 300): torch.testing.assert_close(ops.linear(x := random(n, size), w, b), F.linear(x, w, b), rtol=1e-4, atol=1e-4)

pool, table = KVPool(1, 80, 1, 2, 40, torch.device("cpu"), torch.float32), create_page_table(1, 80, torch.device("cpu"))
table[0, :80] = torch.randperm(80, generator=g)
attention = NumbaAttention(types.SimpleNamespace(num_qo_heads=6, num_kv_heads=2, head_dim=40), pool, table)
keys, values, cached = random(61, 2, 40), random(61, 2, 40), 0
for n in (1, 7, 19, 33, 1):
    one, here = torch.tensor([0]), slice(cached, cached + n)
    ctx = ForwardContext("prefill", [cached], [cached + n], one, torch.zeros(n, dtype=torch.long), torch.arange(cached, cached + n), table[0, here].long(), torch.tensor([n - 1]))
    attention.prepare(ctx)
    q = random(n, 6, 40)
    got = attention.forward(q, keys[here].clone(), values[here].clone(), 0, ctx).view(n, 6, 40)
    k, v = (t[:cached + n].repeat_interleave(3, 1).transpose(0, 1)[None] for t in (keys, values))
    mask = torch.ones(n, cached + n, dtype=torch.bool).tril(cached)
    want = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    cached += n
print(layers.WIDE, layers.MOST_ROWS)"""
    r = subprocess.run([sys.executable, "-c", code], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=240)
    assert r.returncode == 0, r.stderr[-2000:]
    assert r.stdout.split() == {16: ["32", "12"], 32: ["16", "5"]}[layers.WIDE]
