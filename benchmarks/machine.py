"""Old names of report.py, for benchmarks/gpu and benchmarks/peers until they use the new ones."""

try:
    from report import *  # noqa: F403  beside a script
except ImportError:
    from benchmarks.report import *  # noqa: F403  in a package
