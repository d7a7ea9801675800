"""What several files of this folder start from."""

from collections.abc import Iterator

import pytest

from tests.support.zygote import Zygote
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> str:
    """Folder of a tiny dense model, for adapters; read only."""
    path = tmp_path_factory.mktemp("dense")
    save_checkpoint(build_model(build_tiny_config("qwen3", "nano")), path)
    return str(path)


@pytest.fixture(scope="package")
def transformer_engine() -> Iterator[Zygote]:
    """The helper of ranks that import TransformerEngine; tests/conftest.py leaves its files to one worker."""
    with Zygote({"NVTE_PROJECT_BUILDING": "1"}) as helper:
        yield helper
