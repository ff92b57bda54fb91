"""Workers of two processes each: gradients split by dualdelay, by DDP, and by FSDP2, and how far apart they end."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dualdelay as dd


class WithDDP(dd.Digits):
    """Each rank takes its share of a minibatch, and DDP averages the gradients on their way back."""

    collective = True  # every rank calls gradient; what rank 0 returns is sent to the server

    def gradient(self, x, worker, draw):
        """The gradient by all ranks; without a process group, as in a replay, by one process."""
        if not dist.is_initialized():
            return super().gradient(x, worker, draw)
        model = self._model(x)
        rows = self.indices(worker, draw).chunk(dist.get_world_size())[dist.get_rank()]  # shares of one size
        loss = self.loss_on(model, self.shards()[worker].batch(rows))
        model.zero_grad()
        loss.backward()  # this is where the ranks exchange
        total = loss.detach()
        dist.all_reduce(total)
        return self._gradient(model), total.item() / dist.get_world_size()

    def _model(self, x):
        self.net.weights.copy_(x)  # the module's parameters are views of these
        if "_parallel" not in self.__dict__:
            self._parallel = DistributedDataParallel(self.net.module)
        return self._parallel

    def _gradient(self, model):
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


class WithFSDP(WithDDP):
    """Each rank keeps a part of the parameters and of their gradients; FSDP2 gathers them layer by layer."""

    def _model(self, x):
        if "_sharded" not in self.__dict__:
            self._sharded, mesh = copy.deepcopy(self.net.module), init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self._sharded.children():
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self._sharded, mesh=mesh)
        with torch.no_grad():
            for p, whole in zip(self._sharded.parameters(), self.net.named(x).values(), strict=True):
                p.copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))  # its part of x
        return self._sharded

    def _gradient(self, model):
        return torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters()])


if __name__ == "__main__":
    method, speeds = dd.SyncSGD(lr=0.1), dd.FixedSpeeds([1.0, 1.0])
    alone = dd.simulate(method, dd.Digits(workers=2), speeds, updates=30)
    for kind in (dd.Digits, WithDDP, WithFSDP):
        run = dd.train(method, kind(workers=2), dd.RayFleet(ranks=2, cpus=0.5), updates=30)
        apart = float((run.x - alone.x).norm() / alone.x.norm())
        print(f"{kind.__name__}: {run.version} updates, objective {run.metrics.objective[-1]:.3f}, {apart:.0e} from alone")
