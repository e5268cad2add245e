"What a reader might plug in: a policy, a prefix cache and an attention backend of their own, by the protocols of `core` alone"
import torch

from minisgl_edu.core import Match


class DecodeFirst:
    "Prompts wait until nobody decodes, but not for ever"
    def order(self, view): return ("prefill", "decode") if view.decode_streak >= 4 else ("decode", "prefill")


class Lazy:
    "Names no phase at all: the scheduler must not stand still"
    def order(self, view): return ()


class PageChainCache:
    "Keeps whole pages; the key of a page is every token up to its end. The page used longest ago, at the end of a chain, goes first."
    def __init__(self, num_pages, page_size):
        self.page_size, self.num_pages, self.clock = page_size, num_pages, 0
        self.page, self.locks, self.used = {}, {}, {}  # by key

    @property
    def evictable_pages(self): return sum(n == 0 for n in self.locks.values())
    @property
    def protected_pages(self): return sum(n > 0 for n in self.locks.values())

    def _keys(self, token_ids):
        ids = tuple(token_ids)
        return [ids[:end] for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def _touch(self, key): self.clock += 1; self.used[key] = self.clock

    def match_prefix(self, token_ids):
        found = []
        for key in self._keys(token_ids):
            if key not in self.page: break
            self._touch(key); found.append(key)
        return Match([self.page[k] for k in found], len(found) * self.page_size, found)

    def lock(self, handle):
        for key in handle: self.locks[key] += 1

    def unlock(self, handle):
        for key in handle:
            assert self.locks[key] > 0, f"unlocked more often than locked: {key}"
            self.locks[key] -= 1

    def insert(self, token_ids, pages):
        keys, refused = self._keys(token_ids), []
        assert len(keys) == len(pages), (len(keys), len(pages))
        for key, page in zip(keys, pages):
            if self.page.setdefault(key, page) != page: refused.append(page)
            self.locks.setdefault(key, 0)
            self._touch(key)
        return refused

    def evict(self, num_pages):
        given_up = []
        while len(given_up) < num_pages:
            parents = {k[:-self.page_size] for k in self.page}
            ends = [k for k, n in self.locks.items() if n == 0 and k not in parents]
            if not ends: break
            key = min(ends, key=self.used.get)
            given_up.append(self.page.pop(key)); del self.locks[key], self.used[key]
        return given_up

    def check_integrity(self):
        assert self.page.keys() == self.locks.keys() == self.used.keys()
        assert len(set(self.page.values())) == len(self.page), "a page under two keys"
        for key in self.page:
            parent = key[:-self.page_size]
            assert not parent or self.locks[parent] >= self.locks[key], "locked below an unlocked page"


class LoopAttention:
    "One query token at a time, read straight off the page table"
    def __init__(self, config, pool, page_table): self.pool, self.page_table = pool, page_table

    def prepare(self, ctx): ctx.metadata = None

    def forward(self, q, k, v, layer_id, ctx):
        keys, values = self.pool.k[layer_id], self.pool.v[layer_id]
        keys[ctx.out_loc], values[ctx.out_loc] = k, v
        group, out, i = q.shape[1] // k.shape[1], torch.empty_like(q), 0
        for row, start, end in zip(ctx.rows.tolist(), ctx.cached_lens, ctx.device_lens):
            for position in range(start, end):
                slots = self.page_table[row, :position + 1].long()
                k_all, v_all = keys[slots].repeat_interleave(group, 1), values[slots].repeat_interleave(group, 1)
                weights = torch.softmax((q[i] * k_all).sum(-1) / q.shape[-1]**0.5, dim=0)
                out[i] = (weights.unsqueeze(-1) * v_all).sum(0)
                i += 1
        return out
