"Attention backends that a spawned scheduler can import: one that takes its time, one that cannot start"
import time

from minisgl_edu.attention import TorchAttention


class Slow(TorchAttention):
    "At least 20 ms a step, so that an answer is still on its way when a test interferes"
    def prepare(self, ctx):
        time.sleep(0.02)
        return super().prepare(ctx)


class Broken:
    def __init__(self, config, pool, page_table): raise RuntimeError("this backend never starts")


class FailsOnRank1(TorchAttention):
    "One rank of several fails in its first step, and the others wait for it"
    def prepare(self, ctx):
        import torch.distributed as dist
        if dist.get_rank() == 1: raise MemoryError("rank 1 ran out")
        return super().prepare(ctx)
