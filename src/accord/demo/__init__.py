"""The embedded default: a tiny bilingual world with an exact judge, and a base model that knows it.

`write(folder, seed)` writes its data files, `accord.demo.judge:score` judges an answer, `base_path()` is the shipped base model.
In a configuration `demo:sft`, `demo:preferences`, `demo:prompts`, `demo:heldout` name the files and `demo:base` the model.
"""

from pathlib import Path

from accord.demo.data import FILES, data_path, ensure_data, write
from accord.demo.judge import score

__all__ = ["FILES", "base_path", "data_path", "ensure_data", "score", "write"]


def base_path() -> Path:
    """Folder of the shipped base model (about a million parameters; made by scripts/make_demo_base.py)."""
    return Path(__file__).parent / "base"
