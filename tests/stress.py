"""The machine of `test_invariants` for as long as you like: `make stress`, or `make stress ARGS="--steps 5000 --seed 3"`.

A round is 25 random schedules from one seed. A round that fails says so with its seed, prints the schedule as short as hypothesis can
make it, and ends the run with status 1; `--seed` with that seed runs the same round again, on the same sources.

A part of your own in place of the engine's: `--cache mine:PageDict`, with the class in `mine.py` beside the Makefile (or in an installed module)."""
import argparse, logging, os, pkgutil, sys, tempfile, time
from pathlib import Path

import conftest  # threads and hypothesis settings as in the suite
from minisgl_edu.checkpoint import save_random_model
from test_invariants import World, run_machine

ROUND = 25  # schedules


def main(argv=None):
    p = argparse.ArgumentParser(prog="stress", description="random schedules against every invariant, until enough scheduler steps are done")
    p.add_argument("--steps", type=int, default=200_000, help="scheduler steps to reach (default 200,000)")
    p.add_argument("--seed", type=int, default=0, help="of the first round; the next one adds 1 (default 0)")
    for part in ("attention-backend", "cache", "policy"): p.add_argument(f"--{part}", metavar="MODULE:CLASS", help=f"your own {part}; without it, all there are")
    args = p.parse_args(argv)
    sys.path.append(os.getcwd())
    given = dict(backend=args.attention_backend, cache=args.cache, policy=args.policy)
    try: own = {part: pkgutil.resolve_name(name) for part, name in given.items() if name}
    except (ImportError, AttributeError, ValueError) as e: p.error(f"{e}; a part is given as MODULE:CLASS, and its module lies in this folder")
    if args.steps < 1 or args.seed < 0: p.error("--steps must be at least 1, and --seed at least 0")
    logging.getLogger("minisgl_edu.engine").setLevel(logging.ERROR)  # small pools are meant to be small
    with tempfile.TemporaryDirectory() as path:
        save_random_model(Path(path), dict(conftest.TINY_CONFIG), seed=0)
        world = World(path)
        try: return stress(world, args.steps, args.seed, own)
        finally: world.close()


def stress(world, wanted, first, own):
    "Round after round; returns the exit status"
    steps, seed, start, told = 0, first, time.perf_counter(), 0.0
    while steps < wanted:
        try: steps += run_machine(world, seed, ROUND, own)
        except KeyboardInterrupt: raise
        except BaseException:
            print(f"FAILED with seed {seed}, after {steps:,} steps without a failure; again: --steps 1 --seed {seed}", flush=True)
            raise
        seed += 1
        seconds = time.perf_counter() - start
        if seconds - told > 10 or steps >= wanted:
            print(f"{steps:,} of {wanted:,} steps, seeds {first} to {seed - 1}, {seconds:.0f} s", flush=True)
            told = seconds
    print(f"no failure in {steps:,} scheduler steps, {(seed - first) * ROUND:,} schedules, seeds {first} to {seed - 1}")
    return 0


if __name__ == "__main__": raise SystemExit(main())
