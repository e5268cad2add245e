"""An LLM inference engine you can read in a week and believe in."""
__version__ = "0.1.0"

# Two settings that PyTorch reads once. Idle OpenMP threads that spin for long starve whatever shares the cores; those that sleep
# at once wake late (chapter 24). Large tensors in pages of 2 MiB are read faster (chapter 02; Linux). Whoever has chosen keeps
# the choice, and with MINISGL_PLAIN=1 PyTorch stays as it comes.
import os
_tuned = {"THP_MEM_ALLOC_ENABLE": "1", **({} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "20000"})}
_ours = os.environ.get("MINISGL_TUNED", "").split(",") # set by this package in the process that started this one
_tuned = {name: os.environ.get(name, value) for name, value in _tuned.items() if name not in os.environ or name in _ours}
if os.environ.get("MINISGL_PLAIN", "0") not in ("", "0"): _tuned = {}
if _tuned: os.environ.update(_tuned, MINISGL_TUNED=",".join(_tuned))
del os

# Names of the public face and the chapter that defines each. Imported on first use, so that
# `from minisgl_edu.core import Req` and spawned worker processes do not load the whole engine.
_PUBLIC = {
    "LLM": "llm", "SamplingParams": "core", "RequestError": "core",
    "default_model": "checkpoint", "start_server": "launch",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name):
    if name not in _PUBLIC: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__(): return sorted(__all__)
