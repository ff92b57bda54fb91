import sys, time, cProfile, pstats, torch
from gpu import *

whole = data()
P = [network(whole)]
t = time.time()
sweeping(P, rates(4))(50)
print("warm", time.time() - t)
for r in (36, 100):
    run = sweeping(P, rates(r))
    for u in (100, 400, 400):
        torch.cuda.synchronize()
        t = time.time()
        n = run(u)
        torch.cuda.synchronize()
        print(r, u, time.time() - t, n, flush=True)
pr = cProfile.Profile()
pr.runcall(sweeping(P, rates(100)), 100)
pstats.Stats(pr).sort_stats("cumtime").print_stats(45)
