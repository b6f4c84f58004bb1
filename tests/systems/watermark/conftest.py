"""What tests of marks in private text share."""

from __future__ import annotations

import pytest

from models.tokenizer import Tokenizer
from tests.kit.models import make_pair, save_tokenizer
from tests.kit.pair import Pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*make_pair(tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)
