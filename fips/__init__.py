"""Compresses Hugging Face transformer checkpoints after training: shared bases, sparse projections (FiPS).

Importing this package teaches transformers to load compressed checkpoints; everything else is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from fips import _register

if TYPE_CHECKING:
    from fips.benchmark import bench
    from fips.checkpoint.load import load
    from fips.checkpoint.quantizer import FipsConfig
    from fips.config import CompressionConfig, EvaluationConfig
    from fips.dense_export import Export, export
    from fips.errors import FipsError
    from fips.evaluation import evaluate
    from fips.inspection import inspect
    from fips.pipeline import compress
    from fips.publishing import PushConfig, push
    from fips.report import CompressionReport
    from fips.tasks import TaskConfig
    from fips.verification import Verification, verify
    from fips.workload import BenchConfig

__version__ = "0.1.0"

_HOMES = {
    "bench": "fips.benchmark",
    "compress": "fips.pipeline",
    "load": "fips.checkpoint.load",
    "evaluate": "fips.evaluation",
    "export": "fips.dense_export",
    "inspect": "fips.inspection",
    "push": "fips.publishing",
    "verify": "fips.verification",
    "BenchConfig": "fips.workload",
    "CompressionConfig": "fips.config",
    "CompressionReport": "fips.report",
    "EvaluationConfig": "fips.config",
    "Export": "fips.dense_export",
    "FipsConfig": "fips.checkpoint.quantizer",
    "FipsError": "fips.errors",
    "PushConfig": "fips.publishing",
    "Verification": "fips.verification",
    "TaskConfig": "fips.tasks",
}

__all__ = [
    "BenchConfig",
    "CompressionConfig",
    "CompressionReport",
    "EvaluationConfig",
    "Export",
    "FipsConfig",
    "FipsError",
    "PushConfig",
    "TaskConfig",
    "Verification",
    "__version__",
    "bench",
    "compress",
    "evaluate",
    "export",
    "inspect",
    "load",
    "push",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fips' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


_register.install()
