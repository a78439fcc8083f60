"""Shared by all tests: no network, few threads, and where the data is."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers of pytest-xdist share two cores

from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, which may be by torch

import pytest
from hypothesis import settings

# The same examples in every everyday run: what passed once does not fail a landing by chance. New ones are looked for
# with MOE_OPT_HYPOTHESIS=explore, as `make test-matrix` and `make test-soak` do.
settings.register_profile("everyday", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("MOE_OPT_HYPOTHESIS", "everyday"))

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real traces, prompts and corpora; tests that need them skip where they are not."""
    path = Path(os.environ.get("MOE_OPT_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data folder at {path}; set MOE_OPT_DATA")
    return path


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    path = ROOT / "examples" / "demo_model"
    if not (path / "config.json").is_file():
        pytest.skip("the demo model is not in this checkout")
    return path
