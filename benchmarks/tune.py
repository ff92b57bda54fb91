import torch, time, statistics, itertools, sys
import triton
from dualdelay.problems import convolution as C

torch.manual_seed(0)


def t(f, n=20):
    for _ in range(3):
        f()
    s = torch.cuda.Event(enable_timing=True)
    e = torch.cuda.Event(enable_timing=True)
    ts = []
    for _ in range(n):
        s.record()
        f()
        e.record()
        e.synchronize()
        ts.append(s.elapsed_time(e))
    return statistics.median(ts) * 1e3


shapes = {"conv1": (3, 6, 32, 28), "conv2": (6, 16, 14, 10)}
G = 180
which = sys.argv[1]
for name, (c, o, h, ho) in shapes.items():
    x = torch.randn(G, 64, c, h, h, device="cuda")
    dy = torch.randn(G, 64, o, ho, ho, device="cuda")
    w = torch.randn(G, o, c, 5, 5, device="cuda")
    b = torch.randn(G, o, device="cuda")
    taps = c * 25
    pixels = 64 * ho * ho
    shape = (c, h, h, o, ho, ho, 5, 5, 1, 1, 0, 0)
    if which == "weigh":
        for (BN, BP, BK, warps), ch in [
            ((8, 128, 8, 4), 16),
            ((8, 128, 8, 4), 8),
            ((8, 128, 8, 4), 4),
            ((8, 128, 16, 4), 8),
            ((8, 64, 16, 2), 8),
            ((8, 64, 8, 2), 8),
            ((16, 128, 8, 4), 8),
            ((8, 32, 16, 1), 8),
            ((8, 256, 8, 8), 8),
        ]:
            if BN == 16 and name == "conv1":
                continue
            chunks = min(max(pixels // 1024, 1), ch)
            length = triton.cdiv(pixels, chunks * BP) * BP
            chunks = triton.cdiv(pixels, length)
            parts = x.new_empty(G, chunks, o, taps + 1)
            grid = (G * chunks * triton.cdiv(o, BN) * triton.cdiv(taps + 1, BK),)
            try:
                us = (
                    t(lambda: C._weigh[grid](x, dy, parts, 64, *shape, "fma", BN, BP, BK, chunks, length, num_warps=warps))
                    / G
                )
                k = C._weigh[grid](x, dy, parts, 64, *shape, "fma", BN, BP, BK, chunks, length, num_warps=warps)
                print(name, "weigh", BN, BP, BK, warps, chunks, f"{us:.2f} regs {k.n_regs} spills {k.n_spills}", flush=True)
            except Exception as e:
                print(name, BN, BP, BK, warps, ch, "failed", str(e)[:80], flush=True)
    else:
        for what in ("forward", "x"):
            if what == "x" and name == "conv1":
                continue
            if what == "forward":
                X, Wt, Bi, pad = x, w, b, (0, 0)
            else:
                X, Wt, Bi, pad = dy, w.flip(3, 4).transpose(1, 2), None, (4, 4)
            CC, N = X.shape[2], Wt.shape[1]
            H = X.shape[3]
            HO = H + 2 * pad[0] - 4
            for BN, BP, warps in [
                (8, 512, 2),
                (8, 512, 4),
                (8, 256, 2),
                (8, 1024, 4),
                (8, 128, 1),
                (8, 256, 4),
                (16, 256, 2),
                (16, 256, 4),
                (16, 512, 4),
                (16, 128, 2),
                (16, 128, 1),
            ]:
                if BN == 16 and N <= 8:
                    continue
                NB = triton.cdiv(N, BN)
                packed = Wt.new_zeros(G, CC, 5, 5, NB * BN)
                packed[..., :N] = Wt.permute(0, 2, 3, 4, 1)
                y = X.new_empty(G, 64, N, HO, HO)
                sh = (CC, H, H, N, HO, HO, 5, 5, 1, 1, *pad)
                grid = (G * triton.cdiv(64 * HO * HO, BP) * NB,)
                try:
                    us = t(lambda: C._correlate[grid](X, packed, Bi, y, 64, *sh, "fma", BN, BP, 1, num_warps=warps)) / G
                    k = C._correlate[grid](X, packed, Bi, y, 64, *sh, "fma", BN, BP, 1, num_warps=warps)
                    print(name, what, BN, BP, warps, f"{us:.2f} regs {k.n_regs} spills {k.n_spills}", flush=True)
                except Exception as e:
                    print(name, what, BN, BP, warps, "failed", str(e)[:80], flush=True)
