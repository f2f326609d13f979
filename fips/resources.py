"""What the process uses, and the machine it runs on."""

import ctypes
import platform
import sys
from pathlib import Path

_STATUS, _PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_memory() -> tuple[int, int] | None:
    """Resident memory of this process now, and its largest since `reset_peak`, in bytes; None except on Linux.

    `peak_memory` will not do for a process that another one started: its value begins with the other's.
    """
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    values = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    return (1024 * int(values["VmRSS"]), 1024 * int(values["VmHWM"])) if len(values) == 2 else None


def reset_peak() -> bool:
    """Starts the largest resident memory anew, and tells whether the system allowed that."""
    try:
        _PEAK_RESET.write_text("5", encoding="utf-8")
    except OSError:  # not Linux, or a container that forbids it: the peak then holds from the start of the process
        return False
    return True


def release_memory() -> None:
    """Gives memory that was freed in this process back to the system, where the C library keeps it (glibc)."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def processor() -> str:
    """Name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
