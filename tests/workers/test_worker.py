"""A worker's half of the protocol, without a transport: each request is computed once, and what is kept was accepted."""

import pickle

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core.compression import Packed, size_of
from dualdelay.workers.messages import EvaluationRequest, JobRequest
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
    return Worker(0, PROBLEM, dd.DuDe(lr=0.1, memory="workers").message, 1)


def close(a, b):
    """Equal but for the rounding of a difference; no gradient here is larger than 8."""
    return float(np.abs(a - b).max()) <= rounding(4) * 8


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
    assert close(worker.kept(0), GRADIENTS[0]) and close(worker.kept(1), GRADIENTS[1])


def test_what_is_kept_changes_only_when_the_server_has_accepted_it():
    worker, g = new_worker(), GRADIENTS
    first = worker.compute(request(0, 0), ORIGIN, None)
    assert close(first.value, g[0]) and worker.kept(-1) is None and close(worker.kept(0), g[0])
    second = worker.compute(request(1, 1, accepted=-1), ORIGIN, None)  # the first was rejected: the whole gradient again
    assert close(second.value, g[1])
    third = worker.compute(request(2, 2, accepted=1), ORIGIN, None)
    assert close(third.value, g[2] - g[1]) and close(worker.kept(1), g[1])
    fourth = worker.compute(request(3, 3, accepted=1), ORIGIN, None)  # the third was lost for good
    assert close(fourth.value, g[3] - g[1]) and close(worker.kept(3), g[3])


def test_a_new_process_starts_with_what_it_is_given_to_keep():
    worker, given = new_worker(), np.array([5.0, 5.0])
    reply = worker.compute(request(7, 3), ORIGIN, given)
    assert close(reply.value, GRADIENTS[3] - given) and close(worker.kept(7), GRADIENTS[3])
    assert reply.keeps and reply.error == ""


def test_an_exception_becomes_a_traceback_and_leaves_what_is_kept_as_it_was():
    worker = new_worker()
    worker.compute(request(0, 0), ORIGIN, None)
    failed = worker.compute(request(1, 4, accepted=0), ORIGIN, None)
    assert "KeyError: 'nothing here'" in failed.error and "Traceback" in failed.error and not failed.keeps
    assert close(worker.kept(0), GRADIENTS[0])
    after = worker.compute(request(2, 2, accepted=0), ORIGIN, None)
    assert close(after.value, GRADIENTS[2] - GRADIENTS[0]) and after.error == ""


def test_an_evaluation_that_raises_becomes_a_traceback():
    answer = new_worker().evaluate(EvaluationRequest(0, 0, 1, None), ORIGIN)
    assert answer.part.startswith("Traceback") and answer.part.endswith("MemoryError: too many samples\n")


@pytest.mark.parametrize(("compress", "size"), [(None, 8 * 10_000), ("int8", 10_000 + 8), (0.01, 100 * (8 + 4))])
def test_a_reply_is_as_small_on_its_way_as_it_is_counted(compress, size):
    """Of 10,000 float64: all, a byte each and the step, or the largest hundredth with places; names take some more."""
    problem = dd.Quadratic([[1.0] * 10_000], noise=1.0)
    worker = Worker(0, problem, dd.DuDe(lr=0.1, memory="workers", compress=compress).message, 1)
    replies = [worker.compute(request(draw, draw, accepted=draw - 1), np.zeros(10_000), None) for draw in range(2)]
    value = replies[1].value
    assert size_of(value if isinstance(value, Packed) else torch.from_numpy(value)) == size
    assert size <= len(pickle.dumps(replies[1])) < size + 2000
