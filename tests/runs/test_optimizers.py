"""Optimisers and schedules of torch at the server: their steps, what they save, and which cannot work."""

import json
import math
from collections import deque
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, lr_scheduler

import dualdelay as dd
from dualdelay.core.state import BLOCK, State
from dualdelay.runs.optimizer import Optimizer, make_optimizer, optimizer_of
from dualdelay.storage.files import decode, encode
from helpers import drift, rounding
from own import Scenario, differences

pytestmark = pytest.mark.numeric

OPTIMIZERS = [
    "SGD",
    "SGD[momentum=0.9]",
    "SGD[momentum=0.9,nesterov=true,weight_decay=0.01]",
    "SGD[momentum=0.9,dampening=0.5,foreach=true]",
    "Adam[betas=(0.8,0.95),amsgrad=true]",
    "AdamW[weight_decay=0.1]",
    "Adamax",
    "Adagrad[initial_accumulator_value=0.1]",
    "RMSprop[momentum=0.5,centered=true]",
    "Adadelta",
    "NAdam",
    "RAdam",
    "Rprop",
    "ASGD[t0=3]",
    "Adafactor",
]


def sequential(optimizer):
    warm, steps = lr_scheduler.LinearLR(optimizer, total_iters=5), lr_scheduler.MultiStepLR(optimizer, [2, 4])
    return lr_scheduler.SequentialLR(optimizer, [warm, steps], milestones=[5])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULES = [
    "StepLR[step_size=3,gamma=0.5]",
    "MultiStepLR[milestones=[2,9],gamma=0.3]",
    "CosineAnnealingLR[T_max=10,eta_min=0.1]",
    "CosineAnnealingWarmRestarts[T_0=4,T_mult=2]",
    "OneCycleLR[max_lr=2.0,total_steps=40]",
    "CyclicLR[base_lr=0.1,max_lr=1,step_size_up=3]",
    "LinearLR[total_iters=9]",
    "PolynomialLR[total_iters=30,power=2]",
    "ExponentialLR[gamma=0.9]",
    "ConstantLR",
    sequential,
    chained,
    partial(lr_scheduler.LambdaLR, lr_lambda=lambda update: 1 / (1 + update)),
    partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda update: 0.9),
    partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=3, scale_fn=lambda cycle: 0.5),
]


def start(d=5, kind=torch.float32):
    return torch.linspace(-1, 2, d, dtype=torch.float64).to(kind)


def gradients(count, d=5, kind=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(d, generator=generator, dtype=torch.float64).to(kind) for _ in range(count)]


def server(optimizer=None, schedule=None, x=None, lr=0.05):
    x = start() if x is None else x
    given = optimizer is not None or schedule is not None
    return State(x.clone(), 1, optimizer=Optimizer(optimizer, schedule, lr=lr) if given else None)


def path(state, directions, lr=0.05, over=1):
    models = []
    for direction in directions:
        state.descend(direction, lr, over)
        models.append(state.x)
    return torch.stack(models or [state.x])


def steps(schedule, count, optimizer=None):
    """The step sizes over lr, read from how far weights move along a gradient of one."""
    models = path(server(optimizer, schedule, torch.zeros(1, dtype=torch.float64), 0.5), [torch.ones(1)] * count, lr=0.5)
    return (-torch.diff(models[:, 0], prepend=torch.zeros(1)) / 0.5).tolist()


@pytest.mark.parametrize("d", [1, 5, BLOCK + 3])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("lent", [True, False])
def test_without_an_optimizer_the_step_has_the_bits_of_one_addition(d, kind, lent):
    state = State(start(d), 7, lent=lent)
    for over in (1, 7, 3.5):
        (direction,) = gradients(1, d, kind)
        expected = torch.add(state.weights, direction.to(torch.float32), alpha=-(0.1 / over))
        state.descend(direction, 0.1, over)
        assert torch.equal(state.weights, expected)
        state.lent = lent
    assert state.version == 3


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("d", [5, BLOCK + 3])
def test_torchs_sgd_has_the_bits_of_the_plain_step(kind, weights, d):
    x, directions = start(d, weights), gradients(9, d, kind)
    assert torch.equal(path(server("SGD", x=x, lr=0.07), directions, 0.07), path(server(x=x), directions, 0.07))


def test_any_shape_of_weights_moves():
    x, direction = torch.ones(2, 3), torch.full((2, 3), 4.0)
    state = server("SGD", x=x, lr=0.5)
    state.descend(direction, 0.5, over=4)
    assert torch.equal(state.x, torch.full((2, 3), 0.5))


def test_the_division_is_done_before_the_rounding():
    state = server("SGD", x=torch.zeros(1), lr=1.0)
    state.descend(torch.tensor([3e39], dtype=torch.float64), 1.0, over=10)  # the sum alone is no float32
    assert torch.equal(state.x, torch.tensor([-3e38]))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_follows_its_recursion(nesterov):
    directions, x, velocity, models = gradients(12, kind=torch.float64), start(kind=torch.float64), 0.0, []
    for direction in directions:
        mean = direction / 4 + 0.01 * x
        velocity = 0.9 * velocity + mean
        x = x - 0.05 * (mean + 0.9 * velocity if nesterov else velocity)
        models.append(x)
    text = f"SGD[momentum=0.9,weight_decay=0.01,nesterov={nesterov}]"
    torchs = path(server(text, x=start(kind=torch.float64)), directions, over=4)
    assert float((torchs - torch.stack(models)).abs().max()) <= drift(12, 0.05, 8 * 10) * 3  # velocities are ten gradients


@pytest.mark.parametrize("text", OPTIMIZERS)
def test_a_sum_over_its_count_is_the_mean(text):
    directions = gradients(10)
    mean, total = path(server(text), directions), path(server(text), [64 * direction for direction in directions], over=64)
    assert torch.equal(mean, total)


def test_the_first_step_of_adam_is_lr_whatever_the_gradient():
    state = server("Adam", x=torch.zeros(3, dtype=torch.float64), lr=0.01)
    state.descend(torch.tensor([1e-3, 5.0, -7e4], dtype=torch.float64), 0.01)
    assert state.x.tolist() == pytest.approx([-0.01, -0.01, 0.01], rel=1e-4)


def test_weight_decay_pulls_to_zero():
    models = path(server("SGD[weight_decay=0.5]", lr=0.1), [torch.zeros(5)] * 100, lr=0.1)
    torch.testing.assert_close(models[-1], start() * 0.95**100, rtol=rounding(4 * 100, torch.float32), atol=0.0)


def test_a_schedule_changes_the_step_at_its_update():
    assert steps("StepLR[step_size=3,gamma=0.5]", 8) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert steps("steplr[step_size=2,gamma=0.5]", 3, "sgd") == [1, 1, 0.5]
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * update / 6)) / 2 for update in range(6)]  # of an lr of 0.5
    assert steps("CosineAnnealingLR[T_max=6,eta_min=0.1]", 6) == pytest.approx(cosine)
    assert steps(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update)), 4) == pytest.approx(
        [1, 1 / 2, 1 / 3, 1 / 4]
    )


def test_the_algorithm_s_lr_is_the_learning_rate_and_another_is_refused():
    assert steps(None, 2, lambda params: SGD(params, lr=0.5)) == [1.0, 1.0]
    assert steps(None, 2, lambda params, lr: SGD(params, lr=lr)) == [1.0, 1.0]
    assert steps(lambda o: lr_scheduler.StepLR(o, 1, 0.5), 3, lambda params: SGD(params, lr=0.5)) == [1.0, 0.5, 0.25]
    with pytest.raises(dd.BadInput, match=r"method's lr is 0.5, and the optimizer's own is 0.001.*=lambda params, lr: "):
        steps(None, 2, lambda params: Adam(params))


QUADRATIC, TWO = dd.Quadratic([[5.0, -3.0], [7.0, -9.0]]), dd.FixedSpeeds([1.0, 2.0])


@pytest.mark.parametrize("text", [True, False])
def test_adamw_moves_by_the_method_s_learning_rate(text):
    """The first step of Adam is lr in every coordinate, whatever the gradient; lr must not be applied twice.

    By its name it is the mean of the gradients over the root of the mean of their squares: 6 over that of 25 and 49.
    """
    given = "AdamW[weight_decay=0.0]" if text else lambda params: AdamW(params, lr=0.003, weight_decay=0.0)
    run = dd.simulate(dd.DuDe(lr=0.003), QUADRATIC, TWO, updates=1, server=dd.Server(optimizer=given))
    sizes = (6 / math.sqrt((25 + 49) / 2), 6 / math.sqrt((9 + 81) / 2)) if text else (1.0, 1.0)
    assert run.x.tolist() == pytest.approx([0.003 * sizes[0], -0.003 * sizes[1]], rel=1e-3 if text else 1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("more", ["", "[amsgrad=true]", "[betas=(0.5,0.9),eps=0.01,weight_decay=0.1]"])
def test_where_the_direction_is_the_gradient_that_arrives_it_is_torch_s_adam(name, more):
    """Vanilla ASGD steps along what arrives, so both definitions are one; Adam's weight decay is not in what arrives."""
    problem, speeds = dd.Digits(workers=3), dd.TruncatedNormalSpeeds(3, std=1.0)
    more = more.replace(",weight_decay=0.1", "") if name == "Adam" else more
    kind, settings = getattr(torch.optim, name), {}
    if more:
        settings = {"amsgrad": True} if "amsgrad" in more else {"betas": (0.5, 0.9), "eps": 0.01}
    if "weight_decay" in more:
        settings["weight_decay"] = 0.1
    own, torchs = (
        dd.simulate(dd.VanillaASGD(lr=0.01), problem, speeds, updates=30, server=dd.Server(optimizer=given)).x
        for given in (name + more, lambda params, lr: kind(params, lr=lr, **settings))
    )
    assert torch.allclose(own, torchs, rtol=1e-4, atol=1e-6)


def test_adam_s_second_moment_is_that_of_the_gradients_that_arrive():
    """By hand, with DuDe: the direction is the mean of the last gradients, and its square is nowhere in the step."""
    problem, arrived = dd.Quadratic([[5.0, -3.0], [7.0, -9.0]], noise=1.0), []
    watch = [lambda state, arrival: arrived.append((arrival.worker, arrival.value.clone(), state.version))]
    run = dd.simulate(dd.DuDe(lr=0.1), problem, TWO, updates=7, watch=watch, server=dd.Server(optimizer="Adam"))
    x, mean, square, last = torch.zeros(2, dtype=torch.float64), torch.zeros(2), torch.zeros(2), {}
    for seen, (worker, gradient, version) in enumerate(arrived, 1):
        square, last[worker] = 0.999 * square + 0.001 * gradient**2, gradient
        if version:
            mean = 0.9 * mean + 0.1 * (last[0] + last[1]) / 2
            root = (square / (1 - 0.999**seen)).sqrt() + 1e-8
            x = x - 0.1 * mean / (1 - 0.9**version) / root
    assert torch.allclose(run.x.double(), x, rtol=1e-6)


@pytest.mark.parametrize("text", ["Adam[betas=(1.0,0.9)]", "AdamW[eps=-1.0]", "AdamW[weight_decay=-0.1]"])
def test_adam_s_settings_are_checked(text):
    with pytest.raises(dd.BadInput, match="expected a number of zero or more"):
        Optimizer(text, lr=0.1)


def test_steps_that_a_method_shortens_are_shortened_by_as_much():
    """Delay-adaptive ASGD divides its step for old gradients; torch's SGD then makes the same steps as the plain one."""
    method = dd.algorithms.DelayAdaptiveASGD(lr=0.1)
    plain, torchs = (
        dd.simulate(method, QUADRATIC, TWO, updates=40, server=dd.Server(optimizer=given)) for given in (None, "SGD")
    )
    assert float((torchs.x - plain.x).abs().max()) <= drift(40, 0.1, 8) * 16  # no weight and no gradient is larger


@pytest.mark.parametrize("server", [dd.Server(optimizer="AdamW"), dd.Server(schedule="ConstantLR")])
def test_a_method_that_sets_its_own_step_takes_no_optimizer(server):
    with pytest.raises(dd.BadInput, match="FADAS takes no optimizer and no schedule: it"):
        dd.simulate(dd.algorithms.FADAS(lr=0.05), QUADRATIC, TWO, updates=1, server=server)


@pytest.mark.parametrize("server", [dd.Server(optimizer="AdamW"), dd.Server(schedule="ConstantLR")])
def test_a_default_lr_that_is_no_learning_rate_is_refused_with_what_it_is_and_what_to_give(server):
    """AutoDuDe's lr is a factor of its own step unless an optimizer makes the step; one that is given is a rate."""
    what = r"the lr of AutoDuDe is 1\.4, the factor of a step .*no learning rate.*; give one: dd\.AutoDuDe\(lr=0\.001\)"
    with pytest.raises(dd.BadInput, match=what):
        dd.simulate(dd.AutoDuDe(), QUADRATIC, TWO, updates=1, server=server)
    assert dd.simulate(dd.AutoDuDe(lr=0.01), QUADRATIC, TWO, updates=1, server=server).version == 1
    assert dd.simulate(dd.AutoDuDe(), QUADRATIC, TWO, updates=1).version == 1  # without an optimizer it needs none


def net():
    """A small network with weights, biases and a norm layer, and three workers' data."""
    torch.manual_seed(3)
    layers = torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2)
    data = [(torch.randn(12, 4), torch.randint(2, (12,))) for _ in range(3)]
    return dd.Network(torch.nn.Sequential(*layers), torch.nn.functional.cross_entropy, data, 6)


def decayed(params, lr):
    """AdamW with weight decay on matrices alone, its gradient clipped."""
    matrices = [p for name, p in params.named() if p.ndim > 1]
    rest = [p for name, p in params.named() if p.ndim <= 1]
    assert {name for name, p in params.named() if p.ndim > 1} == {"0.weight", "2.weight"}
    adam = AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0, "lr": 2 * lr}], lr=lr)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(params, 0.01)

    adam.register_step_pre_hook(clip)
    return adam


def warmed(optimizer):
    warm, cosine = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[4])


def test_groups_clipping_warm_up_and_cosine_are_those_of_torch_by_itself():
    problem, speeds = net(), dd.FixedSpeeds([1.0, 1.0, 1.0])
    run = dd.simulate(
        dd.SyncSGD(lr=0.01), problem, speeds, updates=12, server=dd.Server(optimizer=decayed, schedule=warmed)
    )
    model = problem.model(problem.start(0)).train()
    params = list(model.parameters())
    groups = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]]
    plain = AdamW(
        [{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1], "weight_decay": 0.0, "lr": 0.02}], 0.01
    )
    schedule = warmed(plain)
    for draw in range(12):
        x = torch.cat([p.detach().reshape(-1) for p in params])
        mean = torch.stack([problem.gradient(x, worker, draw)[0] for worker in range(3)]).double().mean(0).float()
        for part, p in zip(mean.split([p.numel() for p in params]), params, strict=True):
            p.grad = part.view_as(p)
        torch.nn.utils.clip_grad_norm_(params, 0.01)
        plain.step()
        schedule.step()
    # the same operations on the same numbers, but for the order in which three gradients are added: half a last digit
    # of each gradient, which Adam turns into at most that share of a step, in each of twelve
    assert (run.x - torch.cat([p.detach().reshape(-1) for p in params])).abs().max() <= 12 * 0.02 * 8 * 2**-24


def test_a_run_with_groups_can_be_killed_resumed_and_replayed(tmp_path):
    problem, again = net(), {"optimizer": decayed, "schedule": warmed}
    scenario = Scenario(dd.DuDe(lr=0.01), problem, dd.TruncatedNormalSpeeds(3, std=1.0), server=dd.Server(**again))
    straight = scenario.run(tmp_path / "straight")
    scenario.killed(tmp_path / "killed", 17)
    assert differences(dd.resume(tmp_path / "killed", problem=problem, **again), straight) == []
    assert dd.replay(tmp_path / "killed", problem, **again).same_bits
    with pytest.raises(dd.BadInput, match=r"the recorded optimizer is .*decayed.*, but .*own.* was given; pass the same"):
        dd.resume(tmp_path / "killed", updates=30, problem=problem, **{**again, "optimizer": own})


def test_a_function_of_the_same_name_that_makes_another_optimizer_is_refused(tmp_path):
    adam = dd.Server(optimizer=lambda params, lr: AdamW(params, lr=lr))
    dd.simulate(dd.DuDe(lr=0.05), QUADRATIC, TWO, updates=5, folder=tmp_path / "run", server=adam)
    with pytest.raises(dd.BadInput, match="cannot go on from what was saved"):
        dd.resume(tmp_path / "run", updates=9, optimizer=lambda params, lr: SGD(params, lr=lr))


def test_every_parameter_is_in_one_group():
    problem, speeds = net(), dd.FixedSpeeds([1.0, 1.0, 1.0])
    for given, message in (
        (
            lambda params: SGD(params[:2], lr=0.1),
            r"without 1.weight, 1.bias, 2.weight, 2.bias: weights that it would never",
        ),
        (lambda params: SGD([*params, torch.nn.Parameter(torch.zeros(1))], lr=0.1), "of other parameters"),
        (lambda params: AdamW([{"params": params}]), r"the method's lr is 0.1, and the optimizer's own is 0.001"),
    ):
        with pytest.raises(dd.BadInput, match=message):
            dd.simulate(dd.DuDe(lr=0.1), problem, speeds, updates=1, server=dd.Server(optimizer=given))


@pytest.mark.parametrize("text", OPTIMIZERS)
@pytest.mark.parametrize("d", [3, BLOCK + 3])
def test_what_was_read_keeps_its_values_and_the_rest_moves_in_place(text, d):
    state, directions = server(text, x=start(d), lr=0.1), gradients(6, d)
    held, copies = [], []
    for version, direction in enumerate(directions):
        held.append(state.x)
        copies.append(state.x.clone())
        state.descend(direction, 0.1)
        memory = state.weights.data_ptr()
        state.descend(direction, 0.1)
        assert state.weights.data_ptr() == memory
        assert state.version == 2 * version + 2
    assert all(map(torch.equal, held, copies))


def test_a_direction_is_never_written_to():
    class Greedy(SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].grad.zero_()

    (direction,) = gradients(1)
    state, before = server(lambda params: Greedy(params, lr=0.1), lr=0.1), direction.clone()
    state.descend(direction, 0.1)
    assert torch.equal(direction, before) and torch.equal(state.x, start())


def test_an_optimiser_may_put_other_weights_in_place():
    class Replacing(SGD):
        @torch.no_grad()
        def step(self, closure=None):
            (x,) = self.param_groups[0]["params"]
            x.data = x - self.param_groups[0]["lr"] * x.grad

    directions = gradients(4)
    replaced, plain = path(server(lambda params: Replacing(params, lr=0.05)), directions), path(server(), directions)
    assert float((replaced - plain).abs().max()) <= drift(4, 0.05, 1, torch.float32) * 3  # no gradient is larger


def resumed(optimizer, schedule, kind, before):
    """Two servers that have made the same steps, the second saved and loaded on the way."""
    x, directions = start(kind=kind), gradients(30, kind=kind)
    whole, first, second = (server(optimizer, schedule, x) for _ in range(3))
    path(first, directions[:before])
    content = decode(encode({"optimizer": first.optimizer.save(), "weights": first.weights}))
    second.optimizer.load(content["optimizer"])
    second.weights = content["weights"]
    return path(whole, directions)[before:], path(second, directions[before:])


@pytest.mark.parametrize("text", OPTIMIZERS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 11])
def test_a_saved_optimizer_goes_on_with_the_same_bits(text, kind, before):
    assert torch.equal(*resumed(text, None, kind, before))
    assert torch.equal(*resumed(text, "ExponentialLR[gamma=0.95]", kind, before))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("before", [0, 3, 6, 17])
def test_a_saved_schedule_goes_on_with_the_same_bits(schedule, before):
    for optimizer in (None, "Adam", "SGD[momentum=0.9]"):
        assert torch.equal(*resumed(optimizer, schedule, torch.float32, before))


def test_loading_leaves_what_was_saved_alone():
    (first, second), (direction,) = (server("SGD[momentum=0.9]", lr=0.1) for _ in range(2)), gradients(1)
    first.descend(direction, 0.1)
    second.optimizer.load(first.optimizer.save())
    kept = encode(first.optimizer.save())
    second.descend(direction, 0.1)
    assert encode(first.optimizer.save()) == kept


def own(params):
    return Adam(params, lr=0.1)


def test_a_description_is_plain_and_makes_the_same_again():
    onto = (dd.DuDe(lr=0.1), QUADRATIC)

    def again(recorded, optimizer=None, schedule=None):
        return optimizer_of(recorded, optimizer, schedule, None, *onto, "replay")

    schedule = "onecyclelr[max_lr=1,total_steps=5,anneal_strategy=cos]"
    made = Optimizer(" adam[weight_decay=0.1, betas=(0.9,0.99)]", schedule, lr=0.1)
    described = json.loads(json.dumps(made.describe()))
    assert described["optimizer"] == "Adam[betas=(0.9, 0.99),weight_decay=0.1]"
    assert again(described).describe() == described
    assert again(described, "Adam[betas=(0.9,0.99),weight_decay=0.1]").describe() == described
    assert make_optimizer(None, None, None, *onto) is None and again(None) is None
    only = make_optimizer(None, "ConstantLR", None, *onto)
    assert only.describe() == {"optimizer": "SGD", "schedule": "ConstantLR"}
    described = make_optimizer(own, sequential, None, *onto).describe()
    assert described == {"optimizer": {"function": "own"}, "schedule": {"function": "sequential"}}
    assert again(described, own, sequential).describe() == described
    with pytest.raises(dd.BadInput, match=r"function own, which cannot be built .* dd.replay\(folder, optimizer=...\)"):
        again(described, None, sequential)
    with pytest.raises(dd.BadInput, match="recorded schedule is None, but 'ConstantLR' was given"):
        again(None, None, "ConstantLR")
    with pytest.raises(dd.BadInput, match="recorded optimizer is 'Adam', but 'SGD' was given"):
        again({"optimizer": "Adam", "schedule": None}, "SGD")


def closing(params):
    class Closing(SGD):
        def step(self, closure):
            closure()

    return Closing(params, lr=0.05)


def unsavable(params):
    optimizer = SGD(params, lr=0.05)
    optimizer.param_groups[0]["window"] = deque()
    return optimizer


def grouped(params):
    return SGD([{"params": params}, {"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Adm", "no optimizer 'Adm' in torch; did you mean 'Adam'"),
        ("Optimizer", "no optimizer 'Optimizer'"),
        ("zzz", "known: ASGD, Adadelta"),
        ("StepLR[step_size=3]", "no optimizer 'StepLR'"),
        ("LBFGS", "LBFGS cannot be used: it computes the loss many times"),
        ("lbfgs[history_size=3]", "LBFGS cannot be used"),
        ("SparseAdam", "sparse gradients only; use Adam"),
        ("muon", "Muon cannot be used: it moves matrices"),
        ("SGD[lr=0.1]", "algorithm's lr is the step size"),
        ("SGD[momentun=0.9]", "no parameter 'momentun'; did you mean 'momentum'"),
        ("SGD[params=3]", "no parameter 'params'"),
        ("SGD[momentum=big]", "momentum='big'; expected a finite number"),
        ("SGD[momentum=true]", "expected a finite number"),
        ("SGD[momentum=1e999]", "expected a finite number"),
        ("SGD[momentum=0.9,nesterov=maybe]", "expected true or false"),
        ("SGD[foreach=maybe]", "foreach='maybe'; expected no text"),
        ("SGD[momentum=-1]", "Invalid momentum value: -1"),
        ("SGD[momentum", "open bracket"),
        ("SGD[momentum]", "'momentum' in .* is no setting"),
        ("SGD[differentiable=true]", "cannot make a step: "),
        ("Adam[betas=(0.9,)]", r"expected something like \(0.9, 0.999\)"),
        ("Adam[betas=0.9]", "expected something like"),
        ("Adam[betas=(0.9,two)]", "expected something like"),
        ("Adam[betas=(0.9,'two')]", "cannot be made: "),
        ("Adam[capturable=true]", "capturable; expected some of betas, eps, weight_decay, amsgrad.*torch.optim.Adam"),
        ("SGD[weight_decay=1e38]", "steps to .*inf"),
        (3, "optimizer is 3; expected a text such as 'SGD.momentum=0.9.' or a function: lambda params"),
        (Adam, "optimizer is <class .*; expected a text"),
        (Adam([torch.zeros(1)]), "expected a text"),
        (lambda params: None, "optimizer made None; expected a torch optimiser"),
        (lambda params: SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), "a SGD of other parameters"),
        (grouped, "of other parameters"),
        (lambda params: torch.optim.LBFGS(params, lr=0.05), "cannot make a step: .*closure"),
        (lambda params: 1 / 0, "cannot be made: division by zero"),
        (lambda: None, "cannot be made: .*takes 0 positional arguments"),
        (closing, "cannot make a step: .*closure"),
        (unsavable, "cannot be saved: its state holds a deque"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused_when_it_is_made(given, message):
    with pytest.raises(dd.BadInput, match=message):
        Optimizer(given, lr=0.05)


def remembering(optimizer):
    schedule = lr_scheduler.ConstantLR(optimizer)
    schedule.window = deque()
    return schedule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("CosineLR", "no schedule 'CosineLR' in torch; did you mean 'C"),
        ("LRScheduler", "no schedule"),
        ("Adam", "no schedule 'Adam'"),
        ("ReduceLROnPlateau", "follows a metric"),
        ("LambdaLR[lr_lambda=1]", "cannot hold its function; pass a function of your own, schedule=lambda optimizer"),
        ("SequentialLR", "cannot hold its schedules"),
        ("StepLR", r"StepLR needs step_size: write StepLR\[step_size=...\]"),
        ("StepLR[step_size=ten]", "step_size='ten'; expected no text"),
        ("StepLR[step_size=0]", "schedule StepLR.step_size=0. cannot make a step: .*zero"),
        ("StepLR[step_size=3,last_epoch=5]", "no parameter 'last_epoch'"),
        ("StepLR[step_size=3,optimizer=5]", "no parameter 'optimizer'"),
        ("MultiStepLR[milestones=3]", "cannot be made: "),
        ("OneCycleLR[max_lr=1]", "cannot be made: .*total_steps"),
        ("OneCycleLR[max_lr=1,total_steps=9,anneal_strategy=3]", "expected a text"),
        ("OneCycleLR[max_lr=1,total_steps=9,anneal_strategy=up]", "cannot be made: "),
        (lr_scheduler.ConstantLR, "schedule is <class .*; expected a text"),
        (0.5, "schedule is 0.5; expected a text such as 'StepLR"),
        (lambda optimizer: 0.5, "schedule made 0.5; expected a torch.optim.lr_scheduler.LRScheduler"),
        (lambda optimizer: lr_scheduler.ConstantLR(own([torch.nn.Parameter(torch.zeros(1))])), "of the optimizer that it"),
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer), "cannot make a step: .*metrics"),
        (remembering, "schedule .* cannot be saved: its state holds a deque"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_when_it_is_made(given, message):
    with pytest.raises(dd.BadInput, match=message):
        Optimizer(None, given, lr=0.1)


def test_a_schedule_that_ends_before_the_run_is_refused():
    text = "OneCycleLR[max_lr=1,total_steps=9]"
    with pytest.raises(dd.BadInput, match=r"ends after 9 steps, but the run is to make 10 updates.*total_steps=10"):
        Optimizer(None, text, updates=10, lr=0.05)
    state = State(start(), 1, optimizer=Optimizer(None, text, updates=9, lr=0.05))
    path(state, gradients(9))
    with pytest.raises(dd.BadInput, match=r"cannot make a step: .*total steps is 9"):  # a run by time cannot know before
        path(state, gradients(1))
    Optimizer(None, "StepLR[step_size=3]", updates=10, lr=0.05)
