import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # families.py
torch.set_num_threads(1)


@pytest.fixture
def tiny_dir(tmp_path):
    """A stock checkpoint folder of a tiny Qwen2-MoE."""
    from families import make_stock

    make_stock("qwen2_moe").save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def tiny(tiny_dir):
    """The same with moe_opt=True."""
    from transformers import AutoModelForCausalLM

    import moe_opt  # noqa: F401 - installs the keyword

    return AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt=True)
