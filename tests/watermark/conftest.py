"""What tests of marks in private text share."""

from __future__ import annotations

import pytest

from models.tokenizer import Tokenizer
from tests.app.conftest import Pair
from tests.tiny import make_pair, save_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*make_pair(tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)
