"Triton kernels: interpreted against float64, refused when wrong, and compiled for GPUs that are not there"
import inspect, os, random, subprocess, sys, textwrap
from pathlib import Path

import pytest, torch

ROOT = Path(__file__).parent.parent

def run_python(code, interpret, timeout=170, **env):
    "Run code in a process of its own, since `TRITON_INTERPRET` counts only before triton is imported"
    env = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1", **env}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT/"tests"), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout

# ---- run in a child, interpreted -----------------------------------------------------------------------------------------------

class Case:
    "Requests of (cached_len, device_len) in random pages of a pool whose other slots, in front of and behind their ends too, are NaN"
    def __init__(self, spans, num_qo=4, num_kv=2, dim=64, page_size=3, dtype=torch.float32, seed=0):
        from minisgl_edu.kvcache import KVPool, create_page_table, pages_needed, slots_of
        gen = torch.Generator().manual_seed(seed)
        self.spans, self.group = spans, num_qo // num_kv
        num_pages = sum(pages_needed(e, page_size) for _, e in spans) + 2
        pages = list(range(num_pages)); random.Random(seed).shuffle(pages)
        self.pool = KVPool(1, num_pages, page_size, num_kv, dim, "cpu", dtype)
        self.pool.kv.fill_(torch.nan)
        self.table = create_page_table(len(spans) + 1, max(e for _, e in spans), "cpu").fill_(num_pages * page_size) # behind the ends: NaN
        self.rows = torch.tensor(random.Random(seed).sample(range(len(spans) + 1), len(spans)))
        for (_, e), row in zip(spans, self.rows.tolist()):
            slots = torch.from_numpy(slots_of([pages.pop() for _ in range(pages_needed(e, page_size))], page_size, 0, e))
            self.table[row, :e] = slots.int()
            self.pool.kv[0, slots] = torch.randn(e, 2, num_kv, dim, generator=gen).to(dtype)
        counts = [e - c for c, e in spans]
        self.starts = torch.tensor([sum(counts[:i]) for i in range(len(counts))], dtype=torch.int32)
        self.cached, self.lens = (torch.tensor(t, dtype=torch.int32) for t in zip(*spans))
        self.most = max(counts)
        # a slice of a wider buffer, as it comes out of the fused projection
        self.q = torch.randn(sum(counts), (num_qo + 2) * dim, generator=gen).to(dtype)[:, :num_qo * dim].view(-1, num_qo, dim)
        self.out = torch.full(self.q.shape, torch.nan, dtype=dtype)

    def to(self, device):
        "The same case on another device; queries keep their stride"
        for name in ("table", "rows", "starts", "cached", "lens", "out"): setattr(self, name, getattr(self, name).to(device))
        wide = torch.empty(len(self.q), self.q.stride(0), device=device, dtype=self.q.dtype)
        self.q = wide[:, :self.q.shape[1] * self.q.shape[2]].view(self.q.shape).copy_(self.q)
        self.pool.kv = self.pool.kv.to(device)
        self.pool.k, self.pool.v = [[layer[:, i] for layer in self.pool.kv] for i in (0, 1)]
        return self

    def reference(self):
        "Dense attention in float64"
        out = []
        for i, (c, e) in enumerate(self.spans):
            slots = self.table[self.rows[i], :e].long()
            k, v = self.pool.kv[0, slots].double().repeat_interleave(self.group, dim=2).unbind(1)
            q = self.q[self.starts[i]:self.starts[i] + e - c].double()
            scores = torch.einsum("mhd,nhd->hmn", q, k) / q.shape[-1]**0.5
            at = torch.arange(e, device=scores.device)
            scores.masked_fill_(at > at[c:, None], -torch.inf)
            out.append(torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v))
        return torch.cat(out)

    def check(self, out, tolerance=1e-5):
        expected = self.reference()
        error = float((out.double() - expected).abs().max() / expected.abs().max())
        assert error < tolerance, (error, self.spans, tuple(self.q.shape))

    def decode(self, splits=1):
        from minisgl_edu.kernels import decode_attention
        return decode_attention(self.q, self.pool.k[0], self.pool.v[0], self.table, self.rows, self.lens, self.starts,
                                self.out, splits)

    def extend(self):
        from minisgl_edu.kernels import extend_attention
        return extend_attention(self.q, self.pool.k[0], self.pool.v[0], self.table, self.rows, self.starts, self.cached,
                                self.lens, self.most, self.out)

def interpreted_decode():
    from minisgl_edu import kernels as K
    ends = lambda *lens: [(n - 1, n) for n in lens]
    for dim, num_qo, num_kv, page_size in ((64, 2, 2, 1), (80, 6, 2, 3), (128, 4, 1, 16), (64, 16, 2, 64),
                                             (96, 7, 1, 3), (256, 2, 1, 1), (8, 4, 2, 4)):
        for splits in (1, 3):
            case = Case(ends(1, 32, 65), num_qo, num_kv, dim, page_size)
            case.check(case.decode(splits))
    for lens in ((31, 33, 64), (1, 2, 200)):
        case = Case(ends(*lens)); case.check(case.decode(4))
    case = Case(ends(5, 17), dtype=torch.float16); case.check(case.decode(), 1e-3)
    for block_n in (1, 16):
        case = Case(ends(1, 19), 6, 2, 80)
        case.check(K.naive_decode(case.q, case.pool.k[0], case.pool.v[0], case.table, case.rows, case.lens, block_n))

def interpreted_extend():
    for dim, num_qo, num_kv, page_size in ((64, 2, 2, 1), (80, 6, 2, 3), (128, 4, 1, 16), (64, 8, 1, 64)):
        case = Case([(0, 5), (3, 36), (31, 33)], num_qo, num_kv, dim, page_size)
        case.check(case.extend())
    for spans in ([(0, 1)], [(0, 64), (0, 65)], [(63, 64), (64, 65)], [(32, 97), (0, 31)], [(0, 150), (9, 10), (40, 42)]):
        case = Case(spans, 2, 1); case.check(case.extend())
    case = Case([(7, 40)], dtype=torch.float16); case.check(case.extend(), 1e-3)

def interpreted_heads():
    "12 query heads over 2 KV heads whose values are their number"
    for spans, run in (([(0, 9), (3, 5)], Case.extend), ([(8, 9), (4, 5)], Case.decode)):
        case = Case(spans, 12, 2, 64)
        for head in (0, 1): case.pool.v[0][:, head][~case.pool.v[0][:, head].isnan()] = head
        out = run(case)
        assert (out[:, :6] == 0).all() and ((out[:, 6:] - 1).abs() < 1e-6).all()

def interpreted_small():
    from minisgl_edu import kernels as K
    from minisgl_edu.layers import TorchOps
    ops, close = TorchOps(), lambda a, b: torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    for size in (1, 80, 576):
        x, residual, weight = torch.randn(3, 2 * size)[:, :size], torch.randn(3, size), torch.randn(size)
        close(K.rms_norm(x, weight, 1e-5), ops.rms_norm(x.double(), weight.double(), 1e-5))
        expected = ops.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
        for a, b in zip(K.add_rms_norm(x, residual, weight, 1e-5), expected): close(a, b)
        gate_up = torch.randn(2, 2 * size) * 8
        close(K.silu_mul(gate_up), ops.silu_mul(gate_up.double()))
    for dim, heads, kv_heads in ((64, 3, 1), (80, 8, 2), (128, 7, 7)):
        q, k = (t.view(4, -1, dim) for t in torch.randn(4, (heads + kv_heads) * dim).split([heads * dim, kv_heads * dim], 1))
        angles = torch.rand(4, dim // 2) * 6
        cos_sin = torch.cat((angles.cos(), angles.cos(), -angles.sin(), angles.sin()), 1)
        weights, kept = (torch.randn(dim), torch.randn(dim)), (q.clone(), k.clone())
        for norm in (False, True):
            normed = [ops.rms_norm(t.double(), w.double(), 1e-6) if norm else t.double() for t, w in zip(kept, weights)]
            expected = ops.rope(*normed, cos_sin.double())
            for in_place in (False, True):
                q.copy_(kept[0]); k.copy_(kept[1])
                out = K.rope(q, k, cos_sin, *(weights if norm else (None, None)), in_place=in_place)
                for a, b, t, old in zip(out, expected, (q, k), kept):
                    close(a, b)
                    assert (a.data_ptr() == t.data_ptr()) == in_place and (in_place or torch.equal(t, old))
    pool = torch.full((9, 2, 2, 80), torch.nan)
    k, v = torch.randn(2, 3, 400)[:, :, :160].view(2, 3, 2, 80).unbind(0)
    for slots in (torch.tensor([8, 0, 3]), torch.tensor([8, 0, 3], dtype=torch.int32)):
        pool.fill_(torch.nan)
        K.store_kv(k, v, pool[:, 0], pool[:, 1], slots)
        assert torch.equal(pool[slots.long(), 0], k) and torch.equal(pool[slots.long(), 1], v)
        assert int(pool.isfinite().sum()) == 2 * k.numel()
    for empty in (K.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5), K.silu_mul(torch.empty(0, 8))): assert len(empty) == 0

def interpreted_refusals():
    "Bad calls raise before anything runs"
    from minisgl_edu import kernels as K
    q, pool = torch.randn(2, 4, 64), torch.randn(9, 2, 2, 64)
    table, rows, lens = torch.zeros(3, 32, dtype=torch.int32), torch.arange(2), torch.ones(2, dtype=torch.int32)
    def refused(words, error=ValueError, **changes):
        args = dict(q=q, k_pool=pool[:, 0], v_pool=pool[:, 1], page_table=table, rows=rows, seq_lens=lens) | changes
        with pytest.raises(error, match=words): K.decode_attention(**args)
    refused("do not divide", q=torch.randn(2, 3, 64))
    refused("head_dim of q is 80", q=torch.randn(2, 4, 80))
    refused("at most 256", q=torch.randn(2, 4, 512))
    refused("v_pool is torch.float16", TypeError, v_pool=pool[:, 1].half())
    refused("float64 is not supported", TypeError, q=q.double(), k_pool=pool[:, 0].double(), v_pool=pool[:, 1].double())
    refused("interpreter computes bfloat16", TypeError, q=q.bfloat16(), k_pool=pool[:, 0].bfloat16(), v_pool=pool[:, 1].bfloat16())
    refused("page_table must be int32", TypeError, page_table=table.long())
    refused("packed rows", page_table=table.t())
    refused("rows must be int32 or int64", TypeError, rows=rows.float())
    refused(r"seq_lens must be \[2\]", seq_lens=lens[:1])
    refused("stride 1", q=torch.randn(2, 64, 4).transpose(1, 2))
    refused("side by side", q=torch.randn(4, 2, 64).transpose(0, 1))
    refused("num_splits", num_splits=0)
    refused("out must be contiguous", out=torch.empty(2, 4, 80))
    k = torch.randn(2, 2, 64)
    with pytest.raises(TypeError, match="out_loc"): K.store_kv(k, k, pool[:, 0], pool[:, 1], torch.zeros(2))
    with pytest.raises(ValueError, match="do not match"): K.store_kv(k, k, pool[:, 0], pool[:1, 1], rows)
    with pytest.raises(ValueError, match="or neither"): K.rope(q, k, torch.randn(2, 128), q_weight=torch.ones(64))
    with pytest.raises(ValueError, match="cos_sin"): K.rope(q, k, torch.randn(2, 64))
    with pytest.raises(ValueError, match="2 \\* size"): K.silu_mul(torch.randn(2, 7))
    with pytest.raises(ValueError, match="weight"): K.rms_norm(torch.randn(2, 8), torch.ones(7), 1e-5)

def interpreted_engine(model_dir):
    "The engine's greedy tokens with our attention and operations, and with torch's"
    import minisgl_edu.engine as engine
    from minisgl_edu.core import SamplingParams
    from minisgl_edu.kernels import TritonAttention, TritonOps
    from minisgl_edu.llm import LLM
    prompts, params = [[5, 9, 17, 33, 2, 7], [11]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    run = {}
    for name, backend, ops in (("torch", "torch", engine.TorchOps), ("triton", TritonAttention, TritonOps)):
        engine.TorchOps = ops
        with LLM(model_dir, dtype="float32", device="cpu", attention_backend=backend, page_size=3, num_pages=16) as llm:
            run[name] = [o.token_ids for o in llm.generate(prompts, params)]
    assert run["torch"] == run["triton"] and all(len(ids) == 4 for ids in run["torch"]), run

def interpreted_peers():
    "What the experiment times against each other computes the same"
    from minisgl_edu.experiments import extend_runners, walk_runners
    torch.manual_seed(0)
    walk = walk_runners("cpu", 2, 32, 4, 2, 16, torch.float32, num_sms=16)
    assert set(walk) == {"naive", "tiles", "grouped", "split", "torch, dense", "flex, dense"}
    outs = {name: fn().view(2, 4, 16) for name, fn in walk.items() if fn}
    for name, out in outs.items(): torch.testing.assert_close(out, outs["torch, dense"], rtol=1e-5, atol=1e-5, msg=name)
    for cached in (0, 9):
        runners = extend_runners("cpu", 7, cached, 4, 2, 16, torch.float32)
        outs = {name: fn() if name == "extend" else fn()[0].transpose(0, 1) for name, fn in runners.items() if fn}
        for name, out in outs.items(): torch.testing.assert_close(out, outs["torch, dense"], rtol=1e-5, atol=1e-5, msg=name)

@pytest.mark.parametrize("what", ["decode", "extend", "heads", "small", "refusals", "peers"])
def test_interpreted(what):
    run_python(f"import test_kernels; test_kernels.interpreted_{what}()", interpret=True)

def test_engine_output_equals_torch(tiny_model_dir):
    run_python(f"import test_kernels; test_kernels.interpreted_engine({str(tiny_model_dir)!r})", interpret=True)

# ---- compiled, or not interpreted ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("early", ["import triton", "import minisgl_edu.kernels"])
def test_switch_set_too_late(early):
    "Set between triton and our module, or after both: the message says what to do"
    out = run_python(f"""
        {early}
        import os, torch
        os.environ["TRITON_INTERPRET"] = "1"
        from minisgl_edu import kernels as K
        from minisgl_edu.kvcache import KVPool
        for call in (lambda: K.silu_mul(torch.randn(2, 8)),
                     lambda: K.TritonAttention(None, KVPool(1, 2, 2, 1, 8, "cpu", torch.float32), None)):
            try: call()
            except RuntimeError as e: print(e)
        """, interpret=False)
    assert out.count("TRITON_INTERPRET") == 2 and out.count("first imported") == 2, out

def test_nothing_else_imports_triton():
    run_python("""
        import sys, minisgl_edu.llm, minisgl_edu.attention, minisgl_edu.experiments, minisgl_edu.cli
        assert "triton" not in sys.modules
        """, interpret=False)

def compile_kernel(name, consts, arch, warps=4, stages=2, dtype="bf16"):
    "Compile for an architecture; returns the kernel with its registers and spills"
    import re, tempfile
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource
    from minisgl_edu import kernels as K
    fn = getattr(K, name)
    types = dict.fromkeys(("table_ptr", "token_ptr", "len_ptr", "cached_ptr"), "*i32") | dict.fromkeys(("row_ptr", "out_loc_ptr"), "*i64")
    if name == "decode_attention_kernel": types["len_ptr"] = "*i64"  # positions plus one
    types |= dict(part_ptr="*fp32", lse_ptr="*fp32", scale="fp32", eps="fp32")
    sig = {n: "constexpr" if n in consts else types.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in fn.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(fn.arg_names) if n.startswith("stride") or sig[n][0] == "*"}
    kernel = triton.compile(ASTSource(fn, signature=sig, constexprs=consts, attrs=attrs), target=GPUTarget("cuda", arch, 32),
                            options=dict(num_warps=warps, num_stages=stages))
    with tempfile.TemporaryDirectory() as d:
        (Path(d)/"k.ptx").write_text(kernel.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", "--gpu-name", "sm_90a" if arch == 90 else f"sm_{arch}", f"{d}/k.ptx", "-o", f"{d}/k"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return kernel, int(re.search(r"Used (\d+) registers", report)[1]), int(re.search(r"(\d+) bytes spill stores", report)[1])

def compiled_table(arch):
    "Every kernel, bfloat16: registers, spills and shared memory, and what must be in them"
    from minisgl_edu import kernels as K
    limit = {80: 163, 90: 227}[arch] * 1024
    jobs = [("store_kv_kernel", dict(WIDTH=1024, BLOCK=1024), 4, 2), ("silu_mul_kernel", dict(SIZE=14336, BLOCK=1024), 4, 2),
            ("rms_norm_kernel", dict(SIZE=4096, BLOCK=4096, ADD=False), 8, 2),
            ("rms_norm_kernel", dict(SIZE=4096, BLOCK=4096, ADD=True), 8, 2),
            ("rope_kernel", dict(Q_HEADS=32, K_HEADS=8, DIM=128, BLOCK_Q=32, BLOCK_K=8, BLOCK_HALF=64, NORM=False), 4, 2),
            ("rope_kernel", dict(Q_HEADS=16, K_HEADS=8, DIM=128, BLOCK_Q=16, BLOCK_K=8, BLOCK_HALF=64, NORM=True), 4, 2),
            *(("reduce_splits_kernel", dict(Q_HEADS=32, DIM=dim, BLOCK_D=dim), 4, 2) for dim in (64, 128, 256)), ("naive_decode_kernel", dict(GROUP=4, DIM=128, BLOCK_D=128), 4, 2),
            ("tiled_decode_kernel", dict(GROUP=4, DIM=128, BLOCK_D=128, BLOCK_N=64), 4, 2)]
    for dim, group in ((80, 4), *((dim, group) for dim in (64, 128, 256) for group in (1, 4, 8))):
        for kind, options in K.tile_shape(dim, 2, arch >= 90).items():
            consts = dict(options, Q_HEADS=8 * group, GROUP=group, DIM=dim, **(dict(BLOCK_H=16) if kind == "decode" else {}))
            jobs.append((f"{kind}_attention_kernel", consts, consts.pop("num_warps"), consts.pop("num_stages")))
    for name, consts, warps, stages in jobs:
        kernel, registers, spilled = compile_kernel(name, consts, arch, warps, stages)
        ptx, shared = kernel.asm["ptx"], kernel.metadata.shared
        found = [i for i in ("mma.sync", "wgmma", "cp.async") if i in ptx]
        print(f"sm_{arch} {name} {consts.get('DIM', '-')}/{consts.get('GROUP', '-')}: {registers} registers, {spilled} B spilled,",
              f"{shared} B shared, {found}")
        assert spilled == 0 and shared <= limit
        if "attention" in name:
            assert "cp.async" in found and ("wgmma" if arch == 90 and name.startswith("extend") else "mma.sync") in found
    for name in ("store_kv_kernel", "decode_attention_kernel", "extend_attention_kernel"): check_wide_offsets(name, jobs, arch)

def test_no_kernel_knows_the_page_size():
    "The page table names slots: pages of 1 and of 16 tokens are one and the same compiled kernel"
    run_python("""
        from minisgl_edu import kernels as K
        for name, fn in vars(K).items():
            if name.endswith("_kernel"): assert not [a for a in fn.arg_names if "page" in a.lower()], name
        """, interpret=False)

def check_wide_offsets(name, jobs, arch):
    "A slot is 64 bits wide when it meets its stride: in the IR, the stride is widened and no 32-bit product of it exists"
    import re
    name, consts, warps, stages = next(j for j in jobs if j[0] == name)
    kernel, _, _ = compile_kernel(name, consts, arch, warps, stages)
    ir = kernel.asm["ttir"]
    stride = re.search(r"(%\w*stride_slot\w*): i32", ir)[1]
    uses = [line for line in ir.splitlines() if re.search(re.escape(stride) + r"\b(?!:)", line) and "func" not in line]
    assert uses and all("arith.extsi" in line for line in uses), uses
    # slots come as i64 or are widened right after their load
    assert re.search(r"arith\.extsi %slots?\w* : tensor<\d+xi32> to tensor<\d+xi64>", ir) or name == "store_kv_kernel", ir[:3000]

@pytest.mark.parametrize("arch", [80, 90])
def test_compiled(arch, tmp_path):
    print(run_python(f"import test_kernels; test_kernels.compiled_table({arch})", interpret=False, timeout=900, TRITON_CACHE_DIR=str(tmp_path)))

def cuda_attention():
    "Compiled and run on a GPU: every dtype, head sizes and groups, ragged lengths"
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        for dim, num_qo, num_kv, page_size in ((64, 2, 2, 1), (80, 6, 2, 3), (128, 32, 8, 16), (256, 8, 1, 64)):
            case = Case([(0, 5), (3, 300), (1023, 1025)], num_qo, num_kv, dim, page_size, dtype).to("cuda")
            case.check(case.extend(), tolerance)
            for splits in (1, 7):
                case = Case([(n - 1, n) for n in (1, 64, 65, 2000)], num_qo, num_kv, dim, page_size, dtype).to("cuda")
                case.check(case.decode(splits), tolerance)

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda():
    run_python("import test_kernels; test_kernels.cuda_attention()", interpret=False)

def test_splits_do_not_recompile():
    run_python("""
        from minisgl_edu import kernels as K
        params = {p.name: p for p in K.reduce_splits_kernel.params}
        assert params["num_splits"].do_not_specialize and not params["num_splits"].is_constexpr
        assert "num_splits" not in K.decode_attention_kernel.arg_names # the grid's third dimension
        for batch in (1, 3, 256):
            for length in (1, 300, 32768): assert 1 <= K.num_kv_splits(batch, 8, length, 132) <= max(1, length // 128)
        """, interpret=False)
