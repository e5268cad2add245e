"Experiments that go well, fail, die and hang: imported by name in the runner's child processes"
import os, time

from minisgl_edu.experiments import experiment


@experiment("99_tests", title="Squares", units={"square": "m2"})
def sample_good(device="cpu", quick=False, seed=0):
    "Returns rows"
    return [dict(n=n, square=n * n, seed=seed, quick=quick) for n in range(3)]


@experiment("99_tests")
def sample_bad(device="cpu", quick=False, seed=0):
    "Raises"
    raise ZeroDivisionError("no luck")


@experiment("99_tests")
def sample_dead(device="cpu", quick=False, seed=0):
    "Takes its process with it, as a CUDA fault would"
    os._exit(9)


@experiment("99_tests")
def sample_slow(device="cpu", quick=False, seed=0):
    "Never ends"
    time.sleep(600)


@experiment("99_tests", units={"ms": "ms"})
def sample_missing(device="cpu", quick=False, seed=0):
    "Needs what is not here"
    raise FileNotFoundError("no such model")
