"""A worker's half of the protocol, without a transport: each request is computed once, and what is kept was accepted."""

import pickle
import queue
import threading

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core import Job
from dualdelay.core.compression import Packed, pack, size_of
from dualdelay.engine.half import Half, Task
from dualdelay.workers.messages import EvaluationRequest, JobRequest, PollRequest
from dualdelay.workers.worker import Worker
from helpers import rounding

ORIGIN = np.zeros(2)


class Failing(dd.Quadratic):
    """A noisy quadratic whose job number 4 raises, and evaluations too."""

    def gradient(self, x, worker, draw):
        if draw == 4:
            raise KeyError("nothing here")
        return super().gradient(x, worker, draw)

    def measure(self, x, worker, samples=None):
        raise MemoryError("too many samples")


PROBLEM = Failing([[2.0, 4.0]], noise=1.0)
GRADIENTS = [PROBLEM.gradient(torch.zeros(2, dtype=torch.float64), 0, draw)[0].numpy() for draw in range(4)]


def request(sequence, draw, accepted=-1):
    return JobRequest(0, 0, sequence, draw, draw, accepted)


def new_worker():
    return Worker(0, PROBLEM, Half(dd.DuDe(lr=0.1, memory="workers")), 1)


def kept(worker, accepted):
    """The gradient that a worker keeps, given the last reply taken, and nothing else; None if it keeps nothing."""
    held = worker.kept(accepted)
    assert held is None or (held.keys(), held["method"].keys()) == ({"method"}, {"gradient"})
    return None if held is None else held["method"]["gradient"]


def close(a, b):
    """Equal but for the rounding of a difference; no gradient here is larger than 8."""
    return float(np.abs(a - b).max()) <= rounding(4) * 8


class Where(dd.Quadratic):
    """Remembers the models that it was given, and how far they begin from where torch's own do."""

    def gradient(self, x, worker, draw):
        self.seen = (x.data_ptr() % 64, x.clone())
        return super().gradient(x, worker, draw)


def test_a_model_begins_where_torch_s_own_do_wherever_its_message_lies():
    problem = Where([[1.0] * 5, [2.0] * 5])
    worker, memory = Worker(0, problem, Half(dd.DuDe(lr=0.1)), 1), np.zeros(100, np.float32)
    for sequence in range(20):
        x = memory[sequence : sequence + 5]
        x[:] = np.arange(5) + sequence
        reply = worker.compute(request(sequence, sequence), x, None)
        assert not reply.error and problem.seen[0] == 0 and np.array_equal(problem.seen[1], np.arange(5) + sequence)


def test_a_repeated_request_gets_the_same_reply_without_computing_again():
    worker = new_worker()
    first = worker.compute(request(0, 0), ORIGIN, None)
    assert worker.compute(request(0, 0), np.ones(2), None) is first  # another model would give another gradient
    assert np.array_equal(first.value, GRADIENTS[0])


def test_a_request_that_was_overtaken_gets_no_reply_and_changes_nothing():
    worker = new_worker()
    worker.compute(request(0, 0), ORIGIN, None)
    worker.compute(request(1, 1, accepted=0), ORIGIN, None)
    assert worker.compute(request(0, 0), ORIGIN, None) is None
    assert close(kept(worker, 0), GRADIENTS[0]) and close(kept(worker, 1), GRADIENTS[1])


def test_what_is_kept_changes_only_when_the_server_has_accepted_it():
    worker, g = new_worker(), GRADIENTS
    first = worker.compute(request(0, 0), ORIGIN, None)
    assert close(first.value, g[0]) and kept(worker, -1) is None and close(kept(worker, 0), g[0])
    second = worker.compute(request(1, 1, accepted=-1), ORIGIN, None)  # the first was rejected: the whole gradient again
    assert close(second.value, g[1])
    third = worker.compute(request(2, 2, accepted=1), ORIGIN, None)
    assert close(third.value, g[2] - g[1]) and close(kept(worker, 1), g[1])
    fourth = worker.compute(request(3, 3, accepted=1), ORIGIN, None)  # the third was lost for good
    assert close(fourth.value, g[3] - g[1]) and close(kept(worker, 3), g[3])


def test_a_new_process_starts_with_what_it_is_given_to_keep():
    worker, given = new_worker(), np.array([5.0, 5.0])
    reply = worker.compute(request(7, 3), ORIGIN, {"method": {"gradient": given}})
    assert close(reply.value, GRADIENTS[3] - given) and close(kept(worker, 7), GRADIENTS[3])
    assert reply.keeps and reply.error == ""


def test_an_exception_becomes_a_traceback_and_leaves_what_is_kept_as_it_was():
    worker = new_worker()
    worker.compute(request(0, 0), ORIGIN, None)
    failed = worker.compute(request(1, 4, accepted=0), ORIGIN, None)
    assert "KeyError: 'nothing here'" in failed.error and "Traceback" in failed.error and not failed.keeps
    assert close(kept(worker, 0), GRADIENTS[0])
    after = worker.compute(request(2, 2, accepted=0), ORIGIN, None)
    assert close(after.value, GRADIENTS[2] - GRADIENTS[0]) and after.error == ""


def test_an_evaluation_that_raises_becomes_a_traceback():
    answer = new_worker().evaluate(EvaluationRequest(0, 0, 1, None), ORIGIN)
    assert answer.part.startswith("MemoryError:\nTraceback") and answer.part.endswith("MemoryError: too many samples\n")


@pytest.mark.parametrize(("compress", "size"), [(None, 8 * 10_000), ("int8", 10_000 + 8), (0.01, 100 * (8 + 4))])
def test_a_reply_is_as_small_on_its_way_as_it_is_counted(compress, size):
    """Of 10,000 float64: all, a byte each and the step, or the largest hundredth with places; names take some more."""
    problem = dd.Quadratic([[1.0] * 10_000], noise=1.0)
    worker = Worker(0, problem, Half(dd.DuDe(lr=0.1, memory="workers", compress=compress)), 1)
    replies = [worker.compute(request(draw, draw, accepted=draw - 1), np.zeros(10_000), None) for draw in range(2)]
    value = replies[1].value
    assert size_of(value if isinstance(value, Packed) else torch.from_numpy(value)) == size
    assert size <= len(pickle.dumps(replies[1])) < size + 2000


# --- polls, by another thread ---


class Steps(dd.VanillaASGD):
    """Local steps from the model that was sent."""

    most_steps = 3

    def work(self, memory, model, job):
        y = model
        for _ in job:
            y = y - 0.1 * job.gradient(y)
        return model - y, {"y": y}


class Gated(dd.Quadratic):
    """A problem that says when a gradient begins, and waits until it may go on; evaluations tell their thread."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.begun, self.go_on = queue.Queue(), threading.Semaphore(0)

    def gradient(self, x, worker, draw):
        self.begun.put(draw)
        assert self.go_on.acquire(timeout=60)
        return super().gradient(x, worker, draw)

    def measure(self, x, worker, samples=None):
        return {"loss": float(x[0]), "samples": 1, "thread": threading.get_ident()}


def held(sequence, draw=0, **more):
    return request(sequence, draw)._replace(steps=3, hold=True, **more)


@pytest.fixture
def holding():
    """A worker, its problem, and its answers to jobs that one thread of it does."""
    problem = Gated([[2.0, 4.0]], noise=1.0)
    worker, asked, answers = Worker(0, problem, Half(Steps(0.1)), 1), queue.Queue(), queue.Queue()

    def serve():
        while (call := asked.get()) is not None:
            answers.put(call())

    thread = threading.Thread(target=serve)
    thread.start()
    yield worker, problem, asked, answers, thread
    worker.poll(PollRequest(0, 0, 1000))
    problem.go_on.release(100)
    asked.put(None)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_held_job_takes_the_steps_that_it_has_begun_when_it_is_polled(holding, steps):
    worker, problem, asked, answers, _ = holding
    if steps == 0:
        worker.poll(PollRequest(0, 0, 0))  # before its request
    asked.put(lambda: worker.compute(held(0), ORIGIN, None))
    for step in range(steps):
        assert problem.begun.get(timeout=60) == step
        if step == steps - 1 and steps < 3:
            worker.poll(PollRequest(0, 0, 0))
            worker.poll(PollRequest(0, 0, 0))
        problem.go_on.release()
    if steps == 3:
        with pytest.raises(queue.Empty):
            answers.get(timeout=0.05)
        worker.poll(PollRequest(0, 0, 0))
    reply = answers.get(timeout=60)
    alone = Half(Steps(0.1)).run(PROBLEM, Task(Job(0, 0, 0), torch.zeros(2, dtype=torch.float64), steps))
    assert (reply.steps, reply.error, reply.keeps) == (steps, "", True)
    assert reply.value.tobytes() == alone.message.numpy().tobytes()
    assert worker.kept(0)["method"]["y"].tobytes() == alone.keep["method"]["y"].numpy().tobytes()


@pytest.mark.parametrize("polls", [[-1], [0], [0, 0, -1]])
def test_polls_of_earlier_jobs_do_not_end_the_next_one(holding, polls):
    worker, problem, asked, answers, _ = holding
    asked.put(lambda: worker.compute(held(0, polled=True), ORIGIN, None))
    assert answers.get(timeout=60).steps == 0
    asked.put(lambda: worker.compute(held(1, 1), ORIGIN, None))
    for _ in range(3):
        problem.begun.get(timeout=60)
        for sequence in polls:
            worker.poll(PollRequest(0, 0, sequence))
        problem.go_on.release()
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.05)
    worker.poll(PollRequest(0, 0, 2))  # for a later one, which has not come: those before it are over
    assert answers.get(timeout=60).steps == 3
    asked.put(lambda: worker.compute(held(2, 2), ORIGIN, None))
    assert answers.get(timeout=60).steps == 0


def test_a_job_that_is_not_held_ends_by_itself_or_early_if_it_is_polled(holding):
    worker, problem, asked, answers, _ = holding
    problem.go_on.release(3)
    asked.put(lambda: worker.compute(held(0)._replace(hold=False), ORIGIN, None))
    assert answers.get(timeout=60).steps == 3
    asked.put(lambda: worker.compute(held(1, 1)._replace(hold=False), ORIGIN, None))
    while problem.begun.get(timeout=60) != 3:
        pass
    worker.poll(PollRequest(0, 0, 1))
    problem.go_on.release()
    assert answers.get(timeout=60).steps == 1


@pytest.mark.parametrize("waits", [False, True])
def test_an_evaluation_is_made_between_the_steps_of_a_held_job_or_while_it_waits_by_the_same_thread(holding, waits):
    worker, problem, asked, answers, thread = holding
    asked.put(lambda: worker.compute(held(0), ORIGIN, None))
    problem.begun.get(timeout=60)
    if waits:
        problem.go_on.release(3)
    ask, parts = EvaluationRequest(0, 0, 1, None, aside=True), queue.Queue()
    aside = threading.Thread(target=lambda: parts.put(worker.aside(ask, np.array([7.0, 0.0]))))
    aside.start()
    if not waits:
        with worker._turn:
            assert worker._turn.wait_for(lambda: worker._aside is not None, 60)
    problem.go_on.release()
    part = parts.get(timeout=60)
    assert (part.part["loss"], part.part["thread"], part.evaluation) == (7.0, thread.ident, 1)
    worker.poll(PollRequest(0, 0, 0))
    problem.go_on.release(3)
    reply = answers.get(timeout=60)
    alone = Half(Steps(0.1)).run(PROBLEM, Task(Job(0, 0, 0), torch.zeros(2, dtype=torch.float64), reply.steps))
    assert reply.value.tobytes() == alone.message.numpy().tobytes(), "the job has a model of its own"
    asked.put(lambda: worker.evaluate(ask, np.array([7.0, 0.0])))
    assert answers.get(timeout=60) is None, "it was made already"
    aside.join(60)


def test_an_evaluation_that_comes_when_the_held_job_has_ended_is_made_once(holding):
    worker, _, asked, answers, _ = holding
    ask, parts = EvaluationRequest(0, 0, 1, None, aside=True), queue.Queue()
    aside = threading.Thread(target=lambda: parts.put(worker.aside(ask, np.array([7.0, 0.0]))))
    aside.start()
    asked.put(lambda: worker.evaluate(ask, np.array([7.0, 0.0])))
    assert answers.get(timeout=60).part["loss"] == 7.0 and parts.get(timeout=60) is None
    aside.join(60)
    assert worker.aside(ask, ORIGIN) is None


class Identity(dd.Quadratic):
    """Its gradient is the model itself, and no other tensor."""

    def gradient(self, x, worker, draw):
        return x, 0.0


def test_an_evaluation_does_not_write_over_the_model_of_the_job_that_waits():
    worker, replies, parts = Worker(0, Identity([[0.0, 0.0]]), Half(dd.VanillaASGD(0.1)), 1), queue.Queue(), queue.Queue()
    ask = EvaluationRequest(0, 0, 1, None, aside=True)
    job = threading.Thread(target=lambda: replies.put(worker.compute(request(0, 0)._replace(hold=True), ORIGIN, None)))
    aside = threading.Thread(target=lambda: parts.put(worker.aside(ask, np.array([7.0, 7.0]))))
    job.start()
    aside.start()
    assert parts.get(timeout=60) is not None
    worker.poll(PollRequest(0, 0, 0))
    assert replies.get(timeout=60).value.tolist() == [0.0, 0.0]
    job.join(60)
    aside.join(60)


def test_who_ends_a_process_ends_it_and_not_a_job():
    class Interrupted(dd.Quadratic):
        def gradient(self, x, worker, draw):
            raise KeyboardInterrupt

    worker = Worker(0, Interrupted([[0.0, 0.0]]), Half(dd.VanillaASGD(0.1)), 1)
    with pytest.raises(KeyboardInterrupt):
        worker.compute(request(0, 0), ORIGIN, None)


# --- models as differences ---


def test_a_model_is_made_of_the_one_before_as_the_server_makes_it():
    """Whole, as differences, and as the name of one that is here; the one before stays until the next is answered."""
    worker = Worker(0, dd.Quadratic([[0.0] * 50]), Half(dd.VanillaASGD(0.1)), 1)
    base = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    small = [pack(base * scale, "int8") for scale in (1e-3, 1e-2)]
    first, second = base + small[0].unpack(), base + small[1].unpack()

    def ask(sequence, x, serial, on):
        """The gradient of |x|^2 / 2 is the model."""
        reply = worker.compute(request(sequence, sequence)._replace(serial=serial, base=on), x, None)
        return torch.from_numpy(reply.value) if not reply.error else reply.error

    assert torch.equal(ask(0, base.numpy(), 1, 0), base)
    assert torch.equal(ask(1, [{"": small[0].arrays()}], 2, 1), first)
    assert torch.equal(ask(2, [{"": small[1].arrays()}], 3, 1), second), "the second was never answered"
    assert torch.equal(ask(3, None, 3, 3), second)
    both = (second + small[0].unpack()) + small[1].unpack()
    assert torch.equal(ask(4, [{"": one.arrays()} for one in small], 4, 3), both), "one after the other"
    assert "KeyError" in ask(5, [{"": small[0].arrays()}], 5, 2)
    assert torch.equal(ask(6, base.numpy(), 6, 0), base)
