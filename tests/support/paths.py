"""Where the tests find what they read: the repository, its test data, its benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "support" / "data"
GOLDEN = TESTS / "golden"
CAMPAIGNS = TESTS / "campaigns"
BENCHMARKS = ROOT / "benchmarks"
